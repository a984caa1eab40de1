"""The pictures of the course. Each takes measurements and returns a figure, and a sentence that says what to see."""

from zerolab.lab.plots.addresses import address_map
from zerolab.lab.plots.against import tradeoff
from zerolab.lab.plots.attention import attention_map
from zerolab.lab.plots.bandwidth import link_sweep
from zerolab.lab.plots.bars import stacks
from zerolab.lab.plots.bench import step_times
from zerolab.lab.plots.calls import Cost, call_costs
from zerolab.lab.plots.cells import before_after
from zerolab.lab.plots.cuts import Area, who_computes_what
from zerolab.lab.plots.experts import tokens_by_expert
from zerolab.lab.plots.flat import flat_storage
from zerolab.lab.plots.formats import binades, lost, number_line
from zerolab.lab.plots.holdings import who_holds_what
from zerolab.lab.plots.hybrid import sharding_map, where_time_goes
from zerolab.lab.plots.latency import cost, fit_cost
from zerolab.lab.plots.losses import curves, reproduced
from zerolab.lab.plots.members import Attempt, membership
from zerolab.lab.plots.memory import memory_plan
from zerolab.lab.plots.outer import rounds
from zerolab.lab.plots.overlap import gantt
from zerolab.lab.plots.page import png, show
from zerolab.lab.plots.pipeline import bubble, in_flight, pipeline_runs
from zerolab.lab.plots.reads import who_reads_what
from zerolab.lab.plots.ring import ring_against_root
from zerolab.lab.plots.scrubber import moment_picture
from zerolab.lab.plots.shards import Piece, largest_share, shard_map
from zerolab.lab.plots.spread import bands
from zerolab.lab.plots.stages import ladder
from zerolab.lab.plots.step_growth import scaling
from zerolab.lab.plots.style import COLOURS, HATCHES, LABELS
from zerolab.lab.plots.timeline import skyline
from zerolab.lab.plots.tokens import token_weights
from zerolab.lab.plots.trend import fit_line, growth
from zerolab.lab.plots.trillion import to_a_trillion
from zerolab.lab.plots.turns import ring_turns
from zerolab.measure.overlap import Phase, knee

__all__ = [
    "COLOURS",
    "HATCHES",
    "LABELS",
    "Area",
    "Attempt",
    "Cost",
    "Phase",
    "Piece",
    "address_map",
    "attention_map",
    "bands",
    "before_after",
    "binades",
    "bubble",
    "call_costs",
    "cost",
    "curves",
    "fit_cost",
    "fit_line",
    "flat_storage",
    "gantt",
    "growth",
    "in_flight",
    "knee",
    "ladder",
    "largest_share",
    "lost",
    "link_sweep",
    "membership",
    "memory_plan",
    "moment_picture",
    "number_line",
    "pipeline_runs",
    "png",
    "reproduced",
    "ring_against_root",
    "ring_turns",
    "rounds",
    "scaling",
    "shard_map",
    "sharding_map",
    "show",
    "skyline",
    "stacks",
    "step_times",
    "to_a_trillion",
    "tokens_by_expert",
    "tradeoff",
    "token_weights",
    "where_time_goes",
    "who_computes_what",
    "who_holds_what",
    "who_reads_what",
]
