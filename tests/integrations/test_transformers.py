"""ZeroTrainer on real ranks, against the plain Trainer with torch's DDP on the same ranks."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs_common import PYTHONPATH, ROOT, attempt
from torch import Tensor, nn

import zerolab

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402

from zerolab.integrations.transformers import REFUSED, ZeroTrainer  # noqa: E402

TIMES = ("runtime", "per_second", "time", "memory")  # what differs from run to run
CLIP = 0.5
STAGES = (0, 1, 2, 3)


def text(first: int, count: int) -> list[dict[str, Tensor]]:
    """English, 16 bytes at a time; of every third example only half is to be predicted."""
    data = torch.frombuffer(bytearray((ROOT / "LICENSE").read_bytes()), dtype=torch.uint8).long()
    examples = []
    for i in range(first, first + count):
        tokens = data[16 * i : 16 * (i + 1)]
        labels = tokens.clone()
        if i % 3 == 0:
            labels[:8] = -100
        examples.append({"input_ids": tokens, "labels": labels})
    return examples


def gpt2(dropout: float = 0.1) -> nn.Module:
    """Two blocks, tied embeddings."""
    torch.manual_seed(0)
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=128, n_layer=2, n_head=2, n_embd=16, n_positions=16, **ends, **drop))


def accuracy(prediction: Any) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


class Falling:
    """A metric that calls the first evaluation the best."""

    worth = 0.0

    def __call__(self, prediction: Any) -> dict[str, float]:
        self.worth -= 1.0
        return {"worth": self.worth}


class Collator:
    """Notes which examples this rank was given."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.batches.append([int(tensors["input_ids"].sum()) for tensors in examples])
        return {key: torch.stack([example[key] for example in examples]) for key in examples[0]}


def arguments(folder: str | Path, **more: Any) -> TrainingArguments:
    settings = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 5e-3,
        "adam_epsilon": 1e-5,
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": [],
        "log_level": "error",
    }
    return TrainingArguments(str(folder), **settings | more)


def trainer_of(
    stage: int | None, folder: str | Path, make: Callable[[], nn.Module] = gpt2, examples: int = 18, **more: Any
) -> Trainer:
    """stage None: the plain Trainer, which takes torch's DDP.

    With 18 examples, the last step of an epoch has one micro-batch, be it with one, two or three ranks.
    """
    args, model = arguments(folder, **more), make()
    data: dict[str, Any] = {
        "train_dataset": text(0, examples),
        "eval_dataset": text(examples, 5),
        "data_collator": Collator(),
        "compute_metrics": accuracy,
    }
    if stage is None:
        trainer = Trainer(model, args, **data)
    else:
        zero = zerolab.shard(model, stage, units=GPT2Block if isinstance(model, GPT2LMHeadModel) else None)
        trainer = ZeroTrainer(zero=zero, args=args, **data)
    trainer.remove_callback(PrinterCallback)
    return trainer


def result(trainer: Trainer) -> dict[str, Any]:
    logs = [{k: v for k, v in log.items() if not any(t in k for t in TIMES)} for log in trainer.state.log_history]
    state = trainer.zero.full_state_dict() if isinstance(trainer, ZeroTrainer) else trainer.model.state_dict()
    logs = [log for log in logs if "train_loss" not in log]  # of the part since the last resume alone
    return {"logs": logs, "weights": {k: v.numpy().copy() for k, v in state.items()}}


# -- training ---------------------------------------------------------------------------------------------------------


def trained(folder: str, stages: tuple[int | None, ...], **more: Any) -> list[dict[str, Any]]:
    results = []
    for stage in stages:
        trainer = trainer_of(stage, folder, **more)
        flops = trainer.train().metrics["total_flos"]
        batches = trainer.data_collator.batches[:]
        prediction = trainer.predict(trainer.eval_dataset)
        test = {"loss": prediction.metrics["test_loss"], "predictions": prediction.predictions}
        results.append(result(trainer) | {"batches": batches, "flops": flops, "test": test})
    return results


def compare(got: dict[str, Any], wanted: dict[str, Any], within: float = 1e-6) -> None:
    assert [sorted(log) for log in got["logs"]] == [sorted(log) for log in wanted["logs"]]
    for log, other in zip(got["logs"], wanted["logs"]):
        for key, value in other.items():
            assert log[key] == pytest.approx(value, rel=within, abs=within), (key, log, other)
    assert got["weights"].keys() == wanted["weights"].keys()
    for name, value in wanted["weights"].items():
        np.testing.assert_allclose(got["weights"][name], value, rtol=0, atol=within, err_msg=name)


@pytest.mark.parametrize("n", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_training_equals_ddp(ranks, tmp_path, n):
    """Losses, norms, evaluations, predictions and weights; with accumulation, clipping, dropout and tied weights."""
    results = ranks.run(trained, str(tmp_path), (None, *STAGES), ranks=n)
    for rank, (ddp, *others) in enumerate(results):
        norms = [log["grad_norm"] for log in ddp["logs"] if "grad_norm" in log]
        assert len(norms) == {1: 10, 2: 6, 3: 4}[n] and min(norms) > CLIP
        for got in others:
            compare(got, ddp)
            assert (got["batches"], got["flops"]) == (ddp["batches"], ddp["flops"])
            assert got["test"]["loss"] == pytest.approx(ddp["test"]["loss"], abs=1e-6)
            np.testing.assert_allclose(got["test"]["predictions"], ddp["test"]["predictions"], rtol=0, atol=1e-6)
            if rank:
                assert got["batches"] != results[0][0]["batches"], "each rank has examples of its own"
    for of_ranks in zip(*results):  # the same stage on all ranks
        assert all(got["logs"] == of_ranks[0]["logs"] for got in of_ranks)
        assert len({got["test"]["loss"] for got in of_ranks}) == 1


def one_by_one() -> dict[str, Any]:
    """TrainingArguments that reduce every micro-batch. The Trainer writes into this dict, so each gets its own."""
    return {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}}


def trained_in_other_ways(folder: str) -> dict[str, list[dict[str, Any]]]:
    settings = {
        "bf16, checkpointing": {"bf16": True, "gradient_checkpointing": True},
        "unclipped": {"max_grad_norm": 0, "average_tokens_across_devices": False, "optim": "sgd"},
    }
    return {name: trained(folder, (None, *STAGES), **more) for name, more in settings.items()}


def reductions(folder: str) -> list[list[int]]:
    """Of each stage: how many there are with one per step, and with one per micro-batch."""
    counts = []
    for stage in STAGES:
        counts.append([])
        for more in ({}, one_by_one()):
            trainer = trainer_of(stage, folder, eval_strategy="no", **more)
            with trainer.zero.comm.record() as calls:
                trainer.train()
            kinds = ("all_reduce", "reduce_scatter")
            counts[-1].append(sum(call.op in kinds and not call.control for call in calls))
    return counts


@pytest.mark.slow
def test_bf16_checkpointing_and_no_clipping(ranks, tmp_path):
    for of_rank in ranks.run(trained_in_other_ways, str(tmp_path), ranks=2):
        for name, (ddp, *others) in of_rank.items():
            for got in others:
                compare(
                    got, ddp, 1e-3 if "bf16" in name else 1e-6
                )  # one bit of bf16, where a sum was rounded otherwise


def test_one_reduction_per_step(ranks, tmp_path):
    for counts in ranks.run(reductions, str(tmp_path), ranks=2):
        for at_the_end, each in counts:
            units = 3
            assert (at_the_end, each) == (units * 6, units * 10), counts


# -- checkpoints ------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """Not one of transformers' models: tied weights and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(128, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 128, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.emb(input_ids).transpose(1, 2)).transpose(1, 2))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def steady() -> nn.Module:
    return gpt2(dropout=0.0)


def others_weights() -> nn.Module:
    model = gpt2()
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)
    return model


SAVING = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}


def saved(folder: str) -> list[dict[str, Any]]:
    results = []
    for stage in STAGES:
        trainer = trainer_of(stage, f"{folder}/{stage}", **SAVING)
        trainer.train()
        trainer.save_model(f"{folder}/{stage}/model")
        results.append(result(trainer))
    return results


PAIRS = [(0, 0), (1, 1), (2, 2), (3, 3), (0, 3), (3, 0)]  # the stage that saved, the stage that resumes
STEPS = (3, 4)  # at the end of an epoch, and in the middle of one


def resumed(folder: str) -> list[dict[str, Any]]:
    results = []
    for there, here in PAIRS:
        for step in STEPS:
            more = SAVING | {"save_strategy": "no"}
            trainer = trainer_of(here, f"{folder}/{there}", others_weights, **more)
            trainer.train(resume_from_checkpoint=f"{folder}/{there}/checkpoint-{step}")
            results.append(result(trainer))
    return results


TORCHRUN = """
import pickle, sys
import torch.distributed as dist
from test_transformers import resumed

results = resumed(sys.argv[1])  # here TrainingArguments comes first, and makes the process group
with open(f"{sys.argv[1]}/results of {dist.get_rank()}", "wb") as file:
    pickle.dump(results, file)
"""


@pytest.mark.slow
def test_resumed_under_torchrun(ranks, tmp_path):
    """In new processes, bit by bit in the same stage."""
    whole = ranks.run(saved, str(tmp_path), ranks=2)
    names = {path.name for path in (tmp_path / "3" / "checkpoint-4").iterdir()}
    assert {"model.safetensors", "zerolab", "rng_state_0.json", "rng_state_1.json", "trainer_state.json"} <= names
    assert {name for name in names if name.endswith((".pt", ".pth", ".bin"))} == {"training_args.bin"}
    for stage in STAGES:
        model = GPT2LMHeadModel.from_pretrained(tmp_path / str(stage) / "model")
        for name, value in model.state_dict().items():
            np.testing.assert_array_equal(value.numpy(), whole[0][stage]["weights"][name])

    (tmp_path / "resume.py").write_text(TORCHRUN)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "resume.py", "."]
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(run, cwd=tmp_path, env=environment, timeout=600, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        results = iter(pickle.loads((tmp_path / f"results of {rank}").read_bytes()))
        for there, here in PAIRS:
            for step in STEPS:
                got, wanted = next(results), whole[rank][there]
                if there != here:
                    compare(got, wanted)
                    continue
                assert got["logs"] == wanted["logs"], (there, step)
                for name, value in wanted["weights"].items():
                    np.testing.assert_array_equal(got["weights"][name], value, err_msg=f"{name} {there} {step}")


def two_then_one(folder: str, resume: bool) -> dict[str, Any]:
    """16 examples: two steps of eight in each epoch, for two ranks as for one that accumulates twice as long."""
    more = SAVING | {"gradient_accumulation_steps": 4 if resume else 2, "eval_strategy": "no"}
    trainer = trainer_of(3, folder, steady, 16, **more)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
    return result(trainer)


def test_resumed_by_fewer_ranks(ranks, tmp_path):
    wanted = ranks.run(two_then_one, str(tmp_path), False, ranks=2)[0]
    got = ranks.run(two_then_one, str(tmp_path), True, ranks=1)[0]
    compare(got, wanted)


def best(folder: str) -> list[tuple[list[str], list[str], str]]:
    """Of several trainings in which the first epoch counts as the better one: which weights differ from its checkpoint,
    what is left on the disk, and what is said where such a training is to be resumed."""
    found = []
    for number, (stage, make, more) in enumerate(
        [(0, gpt2, {}), (3, gpt2, {}), (2, Tied, {}), (3, gpt2, {"save_only_model": True})]
    ):
        here = Path(folder, str(number))
        saving = {"save_strategy": "epoch", "save_total_limit": 1, "load_best_model_at_end": True}
        trainer = trainer_of(stage, here, make, metric_for_best_model="worth", **saving, **more)
        trainer.compute_metrics = Falling()
        trainer.train()
        dist.barrier()
        plain = make()
        zerolab.load_model_weights(here / "checkpoint-3" / "model.safetensors", plain)
        state = trainer.zero.full_state_dict()
        different = [name for name, value in plain.state_dict().items() if not torch.equal(value, state[name])]
        left = sorted(path.name for path in here.glob("checkpoint-*"))
        said = attempt(trainer_of(stage, here, make).train, resume_from_checkpoint=True)
        found.append((different, left, said.text if said else ""))
    return found


def test_best_model(ranks, tmp_path):
    for results in ranks.run(best, str(tmp_path), ranks=2):
        for different, left, _ in results:
            assert (different, left) == ([], ["checkpoint-3"])
        assert [said for *_, said in results[:3]] == [""] * 3
        assert "saved with save_only_model=True" in results[3][2]


# -- what is refused --------------------------------------------------------------------------------------------------


def refused(folder: str) -> dict[str, str]:
    zero = zerolab.Zero3(gpt2(), units=GPT2Block)
    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())][zero.rank]

    def with_argument(name: str) -> None:
        args = arguments(folder)
        setattr(args, name, True)  # later than TrainingArguments would have an opinion of its own
        ZeroTrainer(zero=zero, args=args)

    def milestones() -> None:
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3])
        args = arguments(folder, **SAVING)
        both = (optimizer, schedule)
        data = {"train_dataset": text(0, 18), "eval_dataset": text(0, 2)}
        ZeroTrainer(zero=zero, args=args, optimizers=both, **data).train()

    cases: dict[str, Callable[[], Any]] = {
        "no zero": lambda: ZeroTrainer(zero.model, arguments(folder)),
        "a module": lambda: ZeroTrainer(zero=zero.model, args=arguments(folder)),
        "another model": lambda: ZeroTrainer(gpt2(), arguments(folder), zero=zero),
        "model_init": lambda: ZeroTrainer(zero=zero, args=arguments(folder), model_init=gpt2),
        "group": lambda: ZeroTrainer(zero=zerolab.Zero3(gpt2(), group=alone), args=arguments(folder)),
        "uneven": lambda: trainer_of(3, folder, accelerator_config={"even_batches": False}),
        "adafactor": lambda: trainer_of(3, folder, optim="adafactor").train(),
        "some parameters": lambda: trainer_of(3, folder).accelerator.clip_grad_norm_([zero.units[0].params[0]], 1.0),
        "milestones": milestones,
        "plain Trainer": lambda: Trainer(
            zerolab.shard(gpt2(), 3).model, arguments(folder, eval_strategy="no"), train_dataset=text(0, 4)
        ).train(),
        "first rank": lambda: trainer_of(2, folder).save_model(f"{folder}/file/model"),
        **{name: partial(with_argument, name) for name in REFUSED},
    }
    said = {name: attempt(case) for name, case in cases.items()}
    return {name: f"{error.kind}: {error.text}" if error else "nothing" for name, error in said.items()}


def test_refusals(ranks, tmp_path):
    expected = {
        "no zero": "TypeError: .*'zero'",
        "a module": "TypeError: zero=GPT2LMHeadModel: pass what sharded the model",
        "another model": "ValueError: rank [01]: this GPT2LMHeadModel is not the model that zero has sharded",
        "model_init": "ValueError: .*pass zero=zero instead",
        "group": "ValueError: zero has rank 0 of 1, but the Trainer has rank [01] of 2: start with torchrun",
        "uneven": "ValueError: even_batches=False",
        "adafactor": "RuntimeError: Adafactor is not known to be elementwise",
        "some parameters": "ValueError: .*pass all of model.parameters()",
        "plain Trainer": "RuntimeError: .*take zerolab.integrations.transformers.ZeroTrainer",
        "first rank": "CheckpointError: rank 0: NotADirectoryError",
        "milestones": "CheckpointError: the state of MultiStepLR is not JSON",
    }
    (tmp_path / "file").touch()  # where a folder is wanted
    for said in ranks.run(refused, str(tmp_path), ranks=2):
        assert expected.keys() | REFUSED.keys() == said.keys()
        for name, text in said.items():
            pattern = expected.get(name) or rf"ValueError: TrainingArguments\({name}=True\) does not go with"
            assert re.match(pattern, text), f"{name}: {text}"
