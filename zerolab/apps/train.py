"""`zerolab train`, the training script: what a real run needs around the loop in the README.

    torchrun --nproc-per-node 4 -m zerolab.train --task text --stage 2 --steps 200 --checkpoint run
    srun --nodes 2 --ntasks-per-node 4 python -m zerolab.train --task images --stage 3 --checkpoint run
    zerolab train --ranks 4 --task pairs --metrics run.jsonl           # without torchrun, on this machine

Run the same command again and it resumes from the newest checkpoint; so do torchrun's restarts. The samples of a step
depend only on the seed and the step. A run that resumes on another number of ranks therefore sees the same samples, and
on the same number it ends with the same parameters (on the CPU bit for bit) as if it had never stopped. The number
need not divide the batch: the last ranks then take a sample less, and each sample counts the same.

Read from the top: arguments, task (data and model), run_rank (lock, shard, loop), validation, checkpoints, metrics,
stop.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import io
import json
import math
import multiprocessing
import os
import re
import resource
import secrets
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr, suppress
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import zerolab
from zerolab.apps.arguments import MOST, NoOutput, Parser, give_up, guarded, positive, whole
from zerolab.checkpoint import MANIFEST
from zerolab.tasks import data
from zerolab.tasks.models import CNN, GPT, Block, ConvBlock, PairEncoder

DEFAULTS = {  # layers, width, samples per step, learning rate
    "text": (4, 128, 32, 3e-3),
    "images": (2, 16, 64, 1e-2),
    "pairs": (1, 64, 64, 3e-3),
}
HEADS, PAIR_WORDS, VALIDATION_BATCH = 4, 40, 64
SAY_EVERY = 10.0  # seconds between lines where there is no terminal for a bar
PRECISIONS = {
    "fp32": None,
    "bf16": zerolab.Precision(torch.bfloat16),
    "fp16": zerolab.Precision(torch.float16),
}


class Refused(Exception):
    """This run cannot begin, resume or go on. The message says why, in one line."""


# -- arguments -------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    say = parser.add_argument
    say("--task", choices=list(DEFAULTS), default="text", help="a GPT on text, a CNN on images, an encoder on pairs")
    say(
        "--data",
        metavar="PATH",
        help="a text file; the folder of CIFAR-10's binary version, or of GLUE's MRPC (default: built in)",
    )
    say("--stage", type=int, choices=range(4), default=2, help="0: DDP, 1 to 3: ZeRO (default 2)")
    say("--steps", type=whole(1), default=200, help="optimizer steps of the whole run (default 200)")
    say(
        "--global-batch",
        type=whole(1),
        metavar="N",
        help="samples per step, at least one for each rank and micro-batch (default: the task's)",
    )
    say(
        "--accumulate",
        type=whole(1),
        default=1,
        metavar="N",
        help="micro-batches that a rank splits its share into (default 1)",
    )
    say("--lr", type=positive, help="highest learning rate: 10 steps of warm-up, then a cosine (default: the task's)")
    say("--clip", type=positive, metavar="NORM", help="clip the gradient to this norm (default: no clipping)")
    say("--precision", choices=list(PRECISIONS), default="fp32", help="of forward and backward; masters are fp32")
    say("--offload", choices=["optimizer"], help="keep what the optimizer works with on the host (stages 1 to 3)")
    say("--layers", type=whole(1), help="the model's layers (default: the task's)")
    say("--width", type=whole(1), help="the model's width (default: the task's)")
    say("--context", type=whole(1), default=64, help="bytes of text that the GPT sees (default 64)")
    say("--seed", type=whole(-MOST), default=0, help="for weights, order of samples and dropout (default 0)")
    say(
        "--validate-every",
        type=whole(1),
        default=50,
        metavar="N",
        help="validate every N steps and at the end (default 50)",
    )
    say("--checkpoint", metavar="DIR", help="save to DIR/step-NNNNNN at the end, on SIGTERM and SIGINT, and ...")
    say("--save-every", type=whole(1), default=50, metavar="N", help="... every N steps (default 50)")
    say("--keep", type=whole(1), default=2, metavar="N", help="checkpoints to keep (default 2)")
    say(
        "--resume",
        default="auto",
        metavar="auto|never|PATH",
        help="auto: from the newest complete checkpoint in DIR; never: DIR must be empty; PATH: from that checkpoint",
    )
    say("--metrics", metavar="FILE", help="write a line of JSON for each step and each validation")


def check(args: argparse.Namespace, ranks: int) -> None:
    """Fill in the task's defaults. Raises Refused for arguments that make no sense."""
    if find_spec("tqdm") is None:
        raise Refused("this needs tqdm: pip install 'zerolab[lab]'")
    layers, width, batch, lr = DEFAULTS[args.task]
    least = ranks * args.accumulate
    defaults = {"layers": layers, "width": width, "global_batch": max(batch, least), "lr": lr}
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.global_batch < least:
        raise Refused(
            f"--global-batch {args.global_batch} is enough for at most {args.global_batch // args.accumulate} ranks "
            f"with {args.accumulate} micro-batch{'es' * (args.accumulate > 1)} each, not for {ranks}"
        )
    if args.width % HEADS:
        raise Refused(f"--width must be a multiple of {HEADS}, not {args.width}")
    if args.offload and args.stage == 0:
        raise Refused("--offload needs stage 1, 2 or 3: stage 0 shards nothing that could be kept on the host")


# -- the task: data and model ----------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What to learn: the data, a function that makes the model, its units, and what the loss averages over."""

    data: data.Split
    model: Callable[[], nn.Module]
    units: list[type[nn.Module]]
    counted: str
    fingerprint: str


def make_task(args: argparse.Namespace) -> Task:
    try:
        return read_task(args)
    except data.DataError as why:
        raise Refused(f"--data: {why}" if args.data else str(why)) from None


def read_task(args: argparse.Namespace) -> Task:
    make: Callable[[], nn.Module]
    units: list[type[nn.Module]] = [ConvBlock if args.task == "images" else Block]
    if args.task == "text":
        split = data.windows(args.data, args.context)
        make = partial(GPT, args.layers, args.width, HEADS, args.context)
    elif args.task == "images":
        split = data.digits() if args.data is None else data.cifar10(args.data)
        make = partial(CNN, args.layers, args.width, channels=split.inputs.shape[1])
    else:
        split = data.pairs(args.data, PAIR_WORDS)
        make = partial(PairEncoder, args.layers, args.width, HEADS, PAIR_WORDS)
    digest = hashlib.blake2b(digest_size=8)
    for tensor in split:
        digest.update(tensor.contiguous().numpy().data)
    return Task(split, make, units, "tokens" if args.task == "text" else "samples", digest.hexdigest())


def agree_on_task(args: argparse.Namespace, comm: zerolab.Comm) -> Task:
    """Make the task. Raises Refused on every rank if one of them cannot, or has different data."""
    together(comm, "look at the arguments", lambda: check(args, comm.world_size))
    task = together(comm, "reading of the data", lambda: make_task(args))
    fingerprints = comm.exchange(task.fingerprint, "comparison of the data")
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise Refused(f"rank {rank} has different data from rank 0: all ranks must read the same files")
    return task


def together(comm: zerolab.Comm, what: str, work: Callable[[], Any]) -> Any:
    """Return `work()`. If one rank refuses, all raise Refused, so that nobody is left waiting."""
    result = problem = None
    try:
        result = work()
    except (Refused, data.DataError, OSError) as why:
        problem = str(why)
    for rank, reason in enumerate(comm.exchange(problem, what)):
        if reason is not None:
            raise Refused(reason if rank == 0 else f"rank {rank}: {reason}")
    return result


def samples(seed: int, step: int, batch: int, count: int) -> Tensor:
    """The numbers of the samples that all ranks together see in `step`: (batch,). Each epoch has its own order."""
    numbers = torch.arange(step * batch, (step + 1) * batch)
    epochs = numbers // count
    return torch.cat([shuffled(seed, int(epoch), count)[numbers[epochs == epoch] % count] for epoch in epochs.unique()])


@lru_cache(maxsize=2)
def shuffled(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed_of(seed, "order", epoch)))


def seed_of(*what: Any) -> int:
    """A seed for a random number generator; different arguments give different seeds."""
    return int.from_bytes(hashlib.blake2b(repr(what).encode(), digest_size=8).digest())


def losses(model: nn.Module, inputs: Tensor, targets: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """The loss of every target, flat, and whether the model's first choice for it was right."""
    inputs, targets = inputs.to(device), targets.to(device).long().flatten()
    logits = model(inputs.float() / 255 if inputs.dim() == 4 else inputs.long()).flatten(0, -2).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(1) == targets


# -- training --------------------------------------------------------------------------------------------------------


def run_rank(args: argparse.Namespace) -> int:
    """Train as the arguments say, on the ranks of the default process group. Returns the number of steps completed.

    Raises `Refused` on every rank if the run cannot begin.
    """
    device = zerolab.init()
    comm = zerolab.Comm(None, device)
    first = comm.rank == 0  # only this one locks, and tells the others
    with stop_signals() as came:  # before anything is locked or made, so that it is not left behind
        task = agree_on_task(args, comm)
        with together(comm, "lock of the checkpoints", lambda: Lock(args.checkpoint if first else None)):
            together(comm, "look for the checkpoints' folder", lambda: see(args.checkpoint))
            return train_task(args, task, comm, came)


def train_task(args: argparse.Namespace, task: Task, comm: zerolab.Comm, came: list[int]) -> int:
    """came: the signals to stop that came so far. The step under way, or the first one, is finished and saved."""
    device = comm.device
    torch.manual_seed(args.seed)
    model = task.model().to(device)
    parameters = sum(param.numel() for param in model.parameters())
    options = {"offload": args.offload} if args.offload else {}
    zero = zerolab.shard(model, args.stage, units=task.units, precision=PRECISIONS[args.precision], **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = zerolab.LossScaler(zero, enabled=args.precision == "fp16")

    run = Run(args, task, zero, optimizer, scaler)
    begin = run.resume()
    metrics = together(comm, "start of metrics", lambda: Metrics(args.metrics if zero.rank == 0 else None, begin))
    if begin < args.steps:
        run.say(
            f"{args.task}: a model of {parameters:,} parameters, stage {zero.stage} ({type(zero).__name__}) on "
            f"{zero.world_size} rank{'s' * (zero.world_size > 1)}, {args.precision}, {batch_of(args)}, "
            f"steps {begin + 1} to {args.steps}"
        )
    with progress(zero, begin, args.steps) as bar, metrics:
        step, stop = begin, False
        said = (step, time.monotonic())
        while step < args.steps and not stop:
            started = time.perf_counter()
            loss, norm = train_step(args, task, zero, optimizer, scaler, step)
            # One message carries each rank's loss and whether it was asked to stop, so that all ranks stop or none.
            message = struct.pack("<d?", loss, bool(came or run.lost))
            rows = [struct.unpack("<d?", row) for row in comm.exchange_bytes(message, "end of a step")]
            loss, stop = sum(row[0] for row in rows) / len(rows), any(row[1] for row in rows)
            seconds = time.perf_counter() - started
            step += 1
            counted = args.global_batch * task.data.targets[0].numel()
            with run.output(metrics.name):
                metrics.write(
                    step=step,
                    loss=loss,
                    lr=learning_rate(args, step - 1),
                    grad_norm=norm,
                    seconds=seconds,
                    **{f"{task.counted}_per_second": counted / seconds, "peak_bytes": peak_bytes(device)},
                )
            bar.set_postfix(loss=f"{loss:.3f}", refresh=False)
            bar.update()
            waited = time.monotonic() - said[1]
            if step % args.validate_every == 0 or step == args.steps:
                found = validate(zero, task)
                with run.output(metrics.name):
                    metrics.write(step=step, **found)
                run.say(f"step {step}: loss {loss:.4f}, " + ", ".join(f"{key} {found[key]:.4f}" for key in found))
                said = (step, time.monotonic())
            elif bar.disable and waited >= SAY_EVERY:
                speed = (step - said[0]) / waited
                run.say(f"step {step} of {args.steps}: loss {loss:.4f}, {speed:.3g} steps per second")
                said = (step, time.monotonic())
            if step % args.save_every == 0 or step == args.steps or stop:
                run.save(step)
    if step < args.steps:
        saved = f"saved {run.path(step)}; the same command resumes there" if args.checkpoint else "nothing saved"
        run.say(f"stopped after step {step} of {args.steps}; {saved}")
        if run.lost:
            raise Refused(f"{run.lost}: stopped after step {step} of {args.steps}; {saved}")
    elif begin >= args.steps:
        run.say(f"nothing to do: the run has completed {begin} steps, and --steps is {args.steps}")
    if run.lost:
        raise Refused(f"{run.lost}; the run is complete")
    return step


def batch_of(args: argparse.Namespace) -> str:
    """Samples per step, and why it is another number than the task's."""
    usual = DEFAULTS[args.task][2]
    return f"{args.global_batch} samples per step" + (f" (usually {usual})" if args.global_batch != usual else "")


def train_step(
    args: argparse.Namespace,
    task: Task,
    zero: zerolab.Engine,
    optimizer: Optimizer,
    scaler: zerolab.LossScaler,
    step: int,
) -> tuple[float, float]:
    """This rank's share of a step. Returns a loss whose mean over the ranks is that over all samples, and the norm of
    the full gradient."""
    zero.model.train()
    torch.manual_seed(seed_of(args.seed, "dropout", step, zero.rank))
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    everyone = samples(args.seed, step, args.global_batch, len(task.data.inputs))
    parts = everyone.tensor_split(zero.world_size)[zero.rank].tensor_split(args.accumulate)
    total = torch.zeros((), device=zero.comm.device)
    for number, part in enumerate(parts, 1):
        with nullcontext() if number == len(parts) else zero.no_sync():
            found, _ = losses(zero.model, task.data.inputs[part], task.data.targets[part], zero.comm.device)
            # The ranks' gradients are averaged as if all had equally many samples, so a share counts by its size.
            # Where all are of one size, this is the number of micro-batches.
            loss = found.mean() / (args.global_batch / (zero.world_size * len(part)))
            scaler.scale(loss).backward()
        total += loss.detach()
    scaler.unscale_(optimizer)
    norm: Any = zero.clip_grad_norm_(math.inf if args.clip is None else args.clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    loss, norm = torch.stack([total.double(), norm.double()]).tolist()  # the host waits for the device once
    return loss, norm


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Rises for ten steps, then falls along half a cosine to a tenth. It depends only on the step: nothing to save."""
    return args.lr * min(1.0, (step + 1) / 10) * (0.55 + 0.45 * math.cos(math.pi * step / args.steps))


@torch.no_grad()
def validate(zero: zerolab.Engine, task: Task) -> dict[str, float]:
    """Mean loss and accuracy over all held-out targets, which the ranks share.

    It uses the model that would be saved, with the first rank's buffers (each rank's batch norm saw different samples).
    """
    zero.broadcast_buffers()
    zero.model.eval()
    inputs, targets = task.data.validation_inputs, task.data.validation_targets
    loss, right, count = 0.0, 0.0, 0.0
    for start in range(0, len(inputs), zero.world_size * VALIDATION_BATCH):
        # In stage 3 a forward is a collective, so all ranks run equally many. A rank out of samples takes the last one.
        first = start + zero.rank * VALIDATION_BATCH
        part = slice(min(first, len(inputs) - 1), first + VALIDATION_BATCH)
        found, hits = losses(zero.model, inputs[part], targets[part], zero.comm.device)
        if first < len(inputs):
            loss, right, count = loss + found.sum().item(), right + hits.sum().item(), count + len(found)
    rows = zero.comm.exchange([loss, right, count], "end of a validation")
    loss, right, count = (sum(column) for column in zip(*rows, strict=True))
    return {"validation_loss": loss / count, "validation_accuracy": right / count}


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Lock:
    """Holds a folder of checkpoints for one run, and makes it: two runs would delete each other's. None: holds nothing.

    A process that is killed loses the lock, on NFS too; only the file remains.
    """

    def __init__(self, path: str | None) -> None:
        self.file: Any = None
        self.made: list[Path] = []
        if path is None:
            return
        folder = Path(path)
        try:
            self.made = [each for each in (folder, *folder.parents) if not each.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            while self.file is None:
                self.file = self._take(folder / ".lock", path)
        except OSError as why:
            self.__exit__()
            raise Refused(f"--checkpoint {path}: cannot write there: {why.strerror}") from None

    def _take(self, path: Path, folder: str) -> Any:
        """The locked file; None if it was removed meanwhile, by a run that ended."""
        file = open(path, "a+")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read()
            file.close()
            raise Refused(f"--checkpoint {folder}: another run saves there ({other}): use another folder") from None
        except OSError:  # a file system without locks
            return file
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}")
                file.flush()
                return file
        file.close()
        return None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *exception: object) -> None:
        """Remove what this run has made and not used."""
        if self.file is not None:
            with suppress(OSError):
                os.unlink(self.file.name)  # before another run can take it
            self.file.close()
        for folder in self.made:
            with suppress(OSError):
                folder.rmdir()  # if it is empty


def see(checkpoint: str | None) -> None:
    if checkpoint and not Path(checkpoint).is_dir():
        raise Refused(f"--checkpoint {checkpoint}: rank 0 has this folder, and all must see the same file system")


class Run:
    """A run's checkpoints, which it saves and resumes from, and its lines of output."""

    def __init__(
        self,
        args: argparse.Namespace,
        task: Task,
        zero: zerolab.Engine,
        optimizer: Optimizer,
        scaler: zerolab.LossScaler,
    ) -> None:
        self.args, self.zero, self.optimizer, self.scaler = args, zero, optimizer, scaler
        self.lost = ""  # what can no longer be written, and why
        # The order of samples follows from these. A run resumed with other values would see other samples.
        names = ("task", "seed", "global_batch", "context")
        self.settings = {name: getattr(args, name) for name in names} | {"data": task.fingerprint}

    def say(self, line: str) -> None:
        """Print on the first rank, above the progress bar."""
        if self.zero.rank == 0 and sys.stdout is not None:
            from tqdm import tqdm

            with self.output("standard output", sys.stdout):
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()

    @contextmanager
    def output(self, name: str, stream: Any = None) -> Iterator[None]:
        """If what is written inside cannot be, the run ends as after a signal: all ranks stop, and nothing is lost."""
        try:
            yield
        except (OSError, NoOutput) as why:
            self.lost = self.lost or f"{name}: {why.strerror}"
            if stream is not None:
                give_up(stream)

    def path(self, step: int) -> Path:
        return Path(self.args.checkpoint) / f"step-{step:06}"

    def save(self, step: int) -> None:
        if self.args.checkpoint:
            extra: dict[str, Any] = {"run": self.settings, "step": step, "scaler": self.scaler.state_dict()}
            zerolab.save(self.path(step), self.zero, self.optimizer, keep=self.args.keep, **extra)

    def resume(self) -> int:
        """Load the checkpoint that the arguments ask for. Returns the number of steps that it had completed."""
        # A restart by torchrun is the same run: it resumes from its own checkpoints, wherever the first start began.
        restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
        steps, restarted = self.zero.comm.exchange([self.saved(), restarted], "look for checkpoints")[0]
        resume = "auto" if restarted and steps else self.args.resume
        if resume == "auto":
            return self.load_newest(steps)
        if resume == "never":
            if steps:
                where = f"{self.path(steps[0])} is there already"
                raise Refused(f"--resume never, but {where}: use another folder, or empty this one")
            return 0
        try:
            step = self.load(Path(resume))
        except zerolab.CheckpointError as why:
            raise Refused(f"--resume {resume}: {why}") from why
        if steps and steps[0] > step:
            raise Refused(f"{self.path(steps[0])} is later than --resume {resume}: save to another folder")
        return step

    def saved(self) -> list[int]:
        """The steps of the checkpoints in the folder, newest first."""
        folder = Path(self.args.checkpoint or "")
        if not self.args.checkpoint or not folder.is_dir():
            return []
        # .old is the previous checkpoint, left by a save that was killed between its two renames; `load` handles it.
        found = [re.fullmatch(r"step-(\d+)(?:\.old)?", path.name) for path in folder.iterdir() if path.is_dir()]
        return sorted({int(match[1]) for match in found if match}, reverse=True)

    def load_newest(self, steps: list[int]) -> int:
        for step in steps:
            try:
                return self.load(self.path(step))
            except zerolab.CheckpointError as why:
                self.say(f"skipping {self.path(step)}: {why}")
                self.put_aside(self.path(step))
        if steps:
            raise Refused(f"no checkpoint in {self.args.checkpoint} can be loaded; to start over, move them away")
        return 0

    def put_aside(self, path: Path) -> None:
        """Rename a folder without a manifest: it is not a checkpoint, so `save` would refuse to replace it."""
        if self.zero.rank == 0 and path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).exists():
            path.rename(path.with_name(f"{path.name}.damaged-{secrets.token_hex(4)}"))

    def load(self, path: Path) -> int:
        extra = zerolab.load(path, self.zero, self.optimizer)
        there = extra.get("run")
        if not isinstance(there, dict):
            raise Refused(f"{path} was not written by zerolab train: it does not say which samples come next")
        for name, here in self.settings.items():
            if there.get(name) != here:
                option = "--" + name.replace("_", "-")
                what = "different data" if name == "data" else f"{option} {there.get(name)}, not {here}"
                raise Refused(f"{path} was trained with {what}: the run would see different samples")
        if extra["scaler"]:
            self.scaler.load_state_dict(extra["scaler"])
        self.say(f"resuming from {path}")
        return extra["step"]


# -- metrics ---------------------------------------------------------------------------------------------------------


class Metrics:
    """Writes lines of JSON, each flushed at once. Without a path it writes nothing.

    begin: the step that the run resumes from. Lines of later steps, from before a crash, are dropped: they come again.
    """

    def __init__(self, path: str | None, begin: int) -> None:
        self.file, self.name = None, f"--metrics {path}"
        if path is not None:
            try:
                if Path(path).is_file() or not Path(path).exists():  # a terminal, a pipe and /dev/null are left alone
                    self._drop_later(path, begin)
                self.file = open(path, "a", buffering=1)  # noqa: SIM115
            except OSError as why:
                raise Refused(f"--metrics {path}: cannot write there: {why.strerror}") from None

    def _drop_later(self, path: str, begin: int) -> None:
        kept = "".join(f"{line}\n" for step, line in self._read(Path(path)) if step <= begin)
        path = os.path.realpath(path)  # a link stays one
        if Path(path).exists() and Path(path).read_text(errors="replace") == kept:
            return  # nor is a file replaced that is somebody's output, such as /dev/stdout
        new = Path(f"{path}.tmp-{secrets.token_hex(4)}")
        try:
            new.write_text(kept)
            new.replace(path)  # a process killed here leaves the old lines or the new ones, never a mix
        finally:
            new.unlink(missing_ok=True)

    @staticmethod
    def _read(path: Path) -> list[tuple[int, str]]:
        *lines, rest = path.read_text(errors="replace").split("\n") if path.exists() else [""]
        try:
            found = [(int(json.loads(line)["step"]), line) for line in lines]
        except (ValueError, KeyError, TypeError):
            found = None
        if found is None or not (rest == "" or rest.startswith("{")):  # a last line that a crash cut off is dropped
            raise Refused(f"--metrics {path}: the file has lines that are not metrics, so it is left alone")
        return found

    def write(self, **values: Any) -> None:
        if self.file is not None:
            finite = {name: value if math.isfinite(value) else None for name, value in values.items()}
            self.file.write(json.dumps(finite) + "\n")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.file is not None:
            with suppress(OSError):  # of a line that could not be written before
                self.file.close()


# -- stop, progress, memory ------------------------------------------------------------------------------------------


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT instead of dying from them. (A launcher that loses patience sends SIGKILL.)"""
    came: list[int] = []
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda number, frame: came.append(number)) for number in numbers]
    try:
        yield came
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def progress(zero: zerolab.Engine, begin: int, steps: int) -> Any:
    """A progress bar on the first rank, if the output is a terminal."""
    from tqdm import tqdm

    hidden = None if zero.rank == 0 else True  # None: hidden unless the output is a terminal
    return tqdm(total=steps, initial=begin, desc=f"stage {zero.stage}", unit="step", dynamic_ncols=True, disable=hidden)


def peak_bytes(device: torch.device) -> int:
    """The peak of allocated memory on a GPU; on the CPU, the peak of this process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024  # macOS counts bytes


# -- how it is started -----------------------------------------------------------------------------------------------


def attempt(args: argparse.Namespace) -> str | None:
    """Train. Returns None, or why it was refused, in one line."""
    try:
        run_rank(args)
    except (Refused, zerolab.CheckpointError) as why:
        return str(why)
    return None


def launch(args: argparse.Namespace, ranks: int) -> str | None:
    """Train on fresh processes on this machine, as `attempt` does. SIGTERM and SIGINT are passed on to them."""
    came: list[int] = []

    def pass_on(number: int, frame: Any) -> None:
        came.append(number)
        if not (children := multiprocessing.active_children()):
            stopped()
        for child in children:
            child.terminate()

    def stopped() -> NoReturn:
        print(f"zerolab train: ended by {signal.Signals(came[0]).name}", file=sys.stderr)
        raise SystemExit(128 + came[0])  # as shells report it

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        return zerolab.launch(attempt, ranks, args, timeout=math.inf, group_timeout=300.0)[0]
    except zerolab.RankError as why:
        if came and "killed by SIGTERM" in str(why):  # a rank that did not take note of it yet, or no longer
            stopped()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(arguments: list[str] | None = None) -> int:
    """One rank under torchrun or srun, or a world of one. Exit status: 0 good, 2 refused."""
    return guarded("zerolab.train", lambda: run_alone(arguments))


def run_alone(arguments: list[str] | None) -> int:
    parser = Parser(prog="zerolab.train", description="Train at any stage of ZeRO; under torchrun or srun.")
    add_arguments(parser)
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    with nullcontext() if first else redirect_stderr(io.StringIO()):  # only one rank complains about them
        args = parser.parse_args(arguments)
    zerolab.init()
    problem = attempt(args)
    if problem and dist.get_rank() == 0:
        print(f"{parser.prog}: {problem}", file=sys.stderr)
    dist.destroy_process_group()  # not after an error: on NCCL it waits for ranks that wait for this one
    return 2 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
