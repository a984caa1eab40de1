"""What a notebook imports: small models, real text, plots, exercises, explorers, and live ranks.

    %load_ext zerolab.lab
    from zerolab import lab
    lab.start(4)

The engine never imports it. Names are looked up when they are first used, so importing this package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "zerolab.lab.ranks.session": (
        "Session",
        "RankFailure",
        "start",
        "stop",
        "reset",
        "push",
        "pull",
        "size",
        "current",
        "link",  # lab.link("200 MB/s, 50 us")
    ),
    "zerolab.lab.ranks.network": ("linked",),  # on a rank, what link() does in the notebook
    "zerolab.lab.ranks.counting": ("calls",),
    "zerolab.lab.exercises.learner": (
        "Todo",
        "check",
        "hint",
        "progress",
        "mine",
        "passed",
        "exchange",
    ),
    "zerolab.lab.exercises.on_trial": ("trial",),
    "zerolab.lab.exercises.predictions": ("predict", "predicted", "reveal", "measured", "skip"),
    "zerolab.lab.explorers": ("memory_explorer", "timeline_scrubber"),
    "zerolab.lab.ladder": ("measure_ladder",),
    "zerolab.lab.lessons.lesson01.bytes_written": ("written",),
    "zerolab.lab.lessons.lesson03.compared": (
        "batch_by_batch",
        "held_after_step",
        "in_one_piece",
        "largest_difference",
        "seconds",
        "train_alone",
    ),
    "zerolab.lab.lessons.lesson03.told": ("calls_beside_link",),
    "zerolab.lab.lessons.lesson04.dealt": ("ways_to_deal",),
    "zerolab.lab.lessons.lesson08.runs": (
        "beyond_formula",
        "both_kinds_of_gradients",
        "held_and_sent",
        "peak_of_step",
        "scale_by_step",
        "train_with",
        "unmoved_by_a_step",
    ),
    "zerolab.lab.lessons.lesson10.arena": ("OutOfMemory", "replay"),
    "zerolab.lab.lessons.lesson10.host": ("HostLink",),
    "zerolab.lab.lessons.lesson10.moment": ("Moment",),
    "zerolab.lab.lessons.lesson10.steps": (
        "bit_for_bit",
        "held_on_device_and_host",
        "left_by_forward",
        "lines_of_places",
        "on_device_and_host",
        "second_step",
        "with_blocks_run_by",
    ),
    "zerolab.lab.lessons.lesson09.recorded": ("Recorded",),
    "zerolab.lab.lessons.lesson11": ("crash",),  # these are modules
    "zerolab.lab.lessons.lesson11.survival": ("deaths",),
    "zerolab.lab.lessons.lesson11.files": (
        "in_shards",
        "load_shards",
        "pieces_of",
        "reads_needed",
        "state_bytes_in",
        "whose_tensors",
    ),
    "zerolab.lab.lessons.lesson11.run": (
        "all_weights",
        "dcp_load_on",
        "dealt",
        "fsdp_run",
        "full_state",
        "my_state",
        "one_step",
        "small_run",
        "ten_steps",
        "two_ranks_train",
    ),
    "zerolab.lab.lessons.lesson11.told": ("going_on",),
    "zerolab.lab.lessons.lesson12.messages": ("Messages", "asynchronous"),
    "zerolab.lab.lessons.lesson12.quantised": ("Int8Gathers",),
    "zerolab.lab.lessons.lesson12.rounding": (
        "all_gathered",
        "from_int4",
        "int4_means",
        "relative_length",
        "to_int4",
        "to_int8",
    ),
    "zerolab.lab.lessons.lesson12.told": (
        "bytes_against_loss",
        "inside_and_between",
        "seven_steps_beside_zero1",
        "staleness_against_loss",
        "updates_of_workers",
    ),
    "zerolab.lab.lessons.lesson12.training": (
        "gradient_at",
        "gradient_on_text",
        "loss_on_other_text",
        "small_gpt",
        "train_compressed",
        "train_in_stage",
        "train_with_hook",
        "zero1_step",
    ),
    "zerolab.lab.lessons.lesson16.told": ("figure_1", "other_plans", "weigh_plan"),
    "zerolab.lab.lessons.lesson18": ("production",),
    "zerolab.lab.lessons.lesson18.whole_files": ("read_checkpoint", "write_checkpoint"),
    "zerolab.lab.lessons.lesson20": ("compiled", "observed"),
    "zerolab.lab.lessons.lesson20.gather_again": ("release",),
    "zerolab.lab.lessons.lesson20.placed": ("place",),
    "zerolab.lab.lessons.lesson20.by_experts": ("routed",),
    "zerolab.lab.lessons.lesson22.compared": ("relative_error", "same_step"),
    "zerolab.lab.lessons.lesson22.expert_gpt": ("ExpertGPT", "Experts", "expert_groups", "part"),
    "zerolab.lab.lessons.lesson23.blocks": ("blocks_and_owners", "in_other_blocks"),
    "zerolab.lab.lessons.lesson23.updates": ("Ragged", "StoredAdam", "four_steps"),
    "zerolab.lab.lessons.lesson25.compared": ("attend_in_pieces",),
    "zerolab.lab.lessons.lesson25.ring": ("RingGPT", "by_halves", "seen", "turn", "with_backward"),
    "zerolab.lab.lessons.lesson15.pipeline": ("Pipeline",),
    "zerolab.lab.lessons.lesson15.stages": ("GPTStage", "gpt_loss", "gpt_pipeline", "put_off_weights"),
    "zerolab.lab.lessons.lesson15.split": ("SplitAttention", "split_gradients"),
    "zerolab.lab.lessons.lesson15.compared": ("computed_in_three_ways", "most_on_a_rank", "run_way", "three_ways"),
    "zerolab.lab.lessons.lesson09.counted": (
        "buckets_of_ddp",
        "flop_by_phase",
        "gathers_of_fsdp2",
        "gathers_of_ours",
        "sent_by_phase",
    ),
    "zerolab.lab.lessons.lesson09.processor": ("Processor",),
    "zerolab.lab.lessons.lesson09.paced": ("Paced", "bandwidth_sweep", "computing", "taken_off"),
    "zerolab.lab.activations": ("saved",),
    "zerolab.lab.held": ("fingerprint", "held_by"),
    "zerolab.lab.scripts": ("reproduce", "against_one_rank"),
    "zerolab.lab.lessons.lesson13.cost": ("cost_of_step",),
    "zerolab.lab.lessons.lesson14.encoders": ("Encoder",),
    "zerolab.lab.lessons.lesson14.table": ("table_traffic",),
    "zerolab.lab.lessons.lesson14.uneven": (
        "uneven_batch",
        "token_weight",
        "gradient_with",
        "gradient_alone",
        "gradient_in_micro_batches",
    ),
    "zerolab.lab.lessons.lesson17.clinic": ("admit", "uncover"),
    "zerolab.lab.lessons.lesson17.listing": ("losses_of_listing",),
    "zerolab.lab.exercises.verdicts": ("claim", "claims"),
    "zerolab.lab.lessons.lesson21.replicas": ("replica",),
    "zerolab.lab.lessons.lesson21.quorums": ("Quorums", "checksum", "die_in_backward", "in_one_process"),
    "zerolab.lab.lessons.lesson21.background": ("life", "scratch_folder", "write_in_background", "written_meanwhile"),
    "zerolab.lab.lessons.lesson24.compared": ("average_gradients", "fastest", "sent_by", "validation_loss"),
    "zerolab.lab.lessons.lesson24.plane": ("PlainAverage", "walk"),
    "zerolab.lab.lessons.lesson19.beside": ("sent_by_fsdp2", "through_one_file"),
    "zerolab.lab.lessons.lesson19.trial": (
        "by_kind",
        "envelopes",
        "evidence",
        "in_the_messages",
        "laid_out",
        "states_in_plain_torch",
        "torch_has",
    ),
    "zerolab.tasks.data": ("batch", "cifar10", "digits", "pairs", "text", "windows"),
    "zerolab.tasks.models": ("CNN", "GPT", "MLP", "Block", "ConvBlock", "PairEncoder", "ResidualBlock", "ResNet"),
}
_MODULE_OF = {name: module for module, names in _HOME.items() for name in names}

__all__ = [*_MODULE_OF]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(_MODULE_OF[name])
    return getattr(home, name) if hasattr(home, name) else importlib.import_module(f"{home.__name__}.{name}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext zerolab.lab`: the magics `%%ranks` and `%%exercise`."""
    from zerolab.world import nursery

    nursery.prepare()  # it imports torch while we do
    from zerolab.lab.exercises import learner
    from zerolab.lab.ranks import magics

    magics.register(shell)
    learner.register(shell)
