"""What a case is, and what an engine must offer to be put on trial.

class Mine(Adapter):
    def wrap(self, model, units, optimizer, **asked):
        self.model = MyEngine(model)
        self.optimizer = optimizer(self.model)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[nn.Module], Optimizer]
FEATURES = {
    "accumulate": "gradients of several micro-batches, reduced once",
    "clip": "clipping by the norm of all gradients",
    "full_state": "the full model's state dict",
    "save": "a checkpoint that other numbers of ranks can load",
    "parts": "modules of the model called without the model",
    "some": "parameters that take no part in a step, or only on some ranks",
    "several": "several forwards before a backward, and several backwards",
    "precision": "bf16 in forward and backward, float32 for masters and reductions",
    "scaler": "loss scaling for float16",
    "group": "a process group that is not the world",
    "mesh": "hybrid sharding",
    "whole": "optimizers that look at whole matrices",
    "broadcast": "the first rank's values for everybody",
    "bytes": "a stage's memory and traffic",
}


REFUSAL = "an error: "  # so begins what a rank has seen where an error keeps the promise: all ranks must have one


class Unsupported(Exception):
    """The engine does not offer what the case asks for."""


class Broken(Exception):
    """A promise is broken. The message says by how much, on which rank, in which step."""


class Adapter:
    """An engine on trial. A fresh one is made for each model, on every rank.

    wrap sets two attributes. model: what the loop calls. optimizer: what the loop steps.
    supports: names from FEATURES. A case that needs another one is not run.
    stage: whose bytes the engine promises, 0 to 3; None: nobody's.
    otherwise: {case: what the engine promises instead, and where that is written}. Such a case may fail.
    packages: what must be installed.
    tolerance: how far losses and parameters may be off. The cases are in float64; what computes in float32 needs more.
    """

    supports: frozenset[str] = frozenset()
    stage: int | None = None
    otherwise: dict[str, str] = {}
    packages: tuple[str, ...] = ()
    tolerance = 1e-7
    model: nn.Module
    optimizer: Optimizer
    scaler: Any = None  # with "scaler": like torch.amp.GradScaler

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        """Shard `model`, and let `optimizer(model)` make the optimizer of what it has become.

        units: module classes, each instance a unit; None: what the engine likes.
        asked: precision, scaler, whole, some: True if the case needs it. group: a process group.
            mesh: (replicas, ranks that share one).
        """
        raise NotImplementedError

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def recover(self) -> None:
        """What the engine asks for after an error in forward or backward, beside zero_grad()."""

    def accumulate(self) -> AbstractContextManager[Any]:
        """Inside, backward only adds to this rank's gradients."""
        raise Unsupported("accumulate")

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Clip the gradients of all ranks together; their norm before."""
        raise Unsupported("clip")

    def full_state(self) -> dict[str, Tensor]:
        """The state dict of the model before it was sharded: its names, full tensors. On all ranks."""
        raise Unsupported("full_state")

    def save(self, folder: Path) -> None:
        """Write model and optimizer. All ranks call it."""
        raise Unsupported("save")

    def load(self, folder: Path) -> None:
        """Read what `save` wrote, on whatever number of ranks."""
        raise Unsupported("save")


class Case:
    """One promise. A class's docstring is the promise in a sentence.

    source: where it is written. broke: issues of libraries that once broke it.
    needs: features of the adapter. least: ranks without which it shows nothing. limit: seconds until it hangs.
    family: what it is about, for reports.
    """

    family = "models, and ways to use them"

    source = ""
    broke = ""
    needs: frozenset[str] = frozenset()
    least = 1
    limit = 60.0

    @property
    def promise(self) -> str:
        return " ".join((type(self).__doc__ or "").split())

    def sizes(self, ranks: int) -> list[int]:
        """Numbers of ranks of its parts, which run one after the other."""
        return [ranks]

    def run(self, make: Callable[[], Adapter], part: int, folder: Path) -> str:
        """On every rank. Returns what was seen. Raises Broken. folder: the same for all parts and ranks."""
        raise NotImplementedError


def right_or_refused(run: Callable[..., str], *args: Any) -> str:
    """What `run` says. An error that it raises keeps the promise, too."""
    try:
        return run(*args)
    except (Broken, Unsupported):
        raise
    except Exception as error:
        return REFUSAL + in_one_line(error)


def in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"
