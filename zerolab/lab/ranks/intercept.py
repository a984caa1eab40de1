"""The public functions of torch.distributed, intercepted: who calls what, with which arguments, on how many bytes.

    interceptor = Interceptor({"all_reduce": answer})
    interceptor.install()     # dist.all_reduce(tensor) now returns answer(call), which may go on with call.proceed()

Two modules build on this: `guard` (live ranks agree on a call before they make it) and the exercises' `spy` (what an
answer calls). `counting` watches torch's dispatcher instead, for a reason that it gives.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerolab.comm.recording import passes

# The collectives, and which of their arguments they fill. Not every torch has every one of them.
COLLECTIVES = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_single": "output_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "reduce_scatter_single": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
    "gather": "gather_list",
    "scatter": "tensor",
    "barrier": "",
}
PICKLED = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")
MESSAGES = ("send", "recv", "isend", "irecv")


class Invocation:
    """A call of one of the functions. `module`, `line`: where it is made."""

    def __init__(
        self, name: str, original: Callable[..., Any], signature: inspect.Signature, args: Any, options: Any
    ) -> None:
        self.name = name
        self._original, self._signature, self._args, self._options = original, signature, args, options
        caller = sys._getframe(2)
        self.module, self.line = str(caller.f_globals.get("__name__", "")), caller.f_lineno

    @functools.cached_property
    def _bound(self) -> inspect.BoundArguments:
        bound = self._signature.bind(*self._args, **self._options)
        bound.apply_defaults()
        return bound

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, with defaults; `start` passes on changes to them. TypeError if they do not fit."""
        return self._bound.arguments

    @property
    def group(self) -> Any:  # a ProcessGroup, which torch's types do not promise
        return self.arguments.get("group") or dist.group.WORLD

    @property
    def asynchronous(self) -> bool:
        return bool(self.arguments.get("async_op"))

    def proceed(self) -> Any:
        """Make the call as it was made."""
        return self._original(*self._args, **self._options)

    def start(self) -> Any:
        """Make the call with `async_op=True`, and return what it returns."""
        self.arguments["async_op"] = True
        return self.with_arguments()

    def with_arguments(self) -> Any:
        """Make the call with the `arguments` as they are now."""
        return self._original(*self._bound.args, **self._bound.kwargs)


Answer = Callable[[Invocation], Any]


class Interceptor:
    """While it is installed, a call of torch.distributed's `name` returns what `answers[name]` makes of it.

    `home`: the module that has the functions. `originals`: torch's own, of those that this torch has.
    """

    def __init__(self, answers: Mapping[str, Answer], home: ModuleType = dist) -> None:
        self.originals: dict[str, Callable[..., Any]] = {}
        self._answers, self._home = answers, home
        self._torchs_p2p = dist.P2POp

    def install(self) -> None:
        for name, answer in self._answers.items():
            if original := getattr(self._home, name, None):
                self.originals[name] = original
                setattr(self._home, name, _intercepted(name, original, answer))
        if "isend" in self.originals:
            setattr(dist, "P2POp", self._p2p())  # noqa: B010 (mypy refuses the assignment)

    def remove(self) -> None:
        for name, original in self.originals.items():
            setattr(self._home, name, original)
        setattr(dist, "P2POp", self._torchs_p2p)  # noqa: B010

    def _p2p(self) -> type[dist.P2POp]:
        """torch's P2POp, which takes only torch's own isend and irecv, for the functions that are in their place."""
        own = {getattr(dist, name): self.originals[name] for name in ("isend", "irecv")}

        class P2POp(dist.P2POp):
            def __new__(cls, op: Callable[..., Any], *args: Any, **options: Any) -> P2POp:
                return super().__new__(cls, own.get(op, op), *args, **options)

            def __init__(self, op: Callable[..., Any], *args: Any, **options: Any) -> None:
                super().__init__(own.get(op, op), *args, **options)

        return P2POp


def _intercepted(name: str, original: Callable[..., Any], answer: Answer) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def intercepted(*args: Any, **options: Any) -> Any:
        return answer(Invocation(name, original, signature, args, options))

    return intercepted


def nbytes(value: Any) -> int:
    """Bytes of a tensor, or of all in a list; of anything else 0."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, (list, tuple)):
        return sum(nbytes(item) for item in value)
    return 0


def bytes_in_a_ring(op: str, payload: int, size: int) -> float:
    """Bytes that each of `size` ranks sends when the call runs as a ring: (N-1)/N of the payload, twice to all-reduce.

    `op`: the function's name, or the dispatcher's, which writes allreduce."""
    return passes("all_reduce" if op == "allreduce" else op) * payload * (size - 1) / size
