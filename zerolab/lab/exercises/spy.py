"""The ledger of a check: every call of torch.distributed that an answer makes, under whatever name it imported it.

Two things make mistakes visible that would otherwise depend on luck. A call with `async_op=True` sends what its inputs
hold when it starts, and fills its result only when it is waited for, so a forgotten wait is wrong every time. And
before a call, the ranks tell each other what they are about to do: if they differ, they give up, instead of hanging,
aborting, or mixing up bytes. A rank gives up waiting when the other has ended, when every rank has ended or says that
it waits for a call that nobody has made, or when all others that do not wait so stand still; never because it has
waited for long.
"""

from __future__ import annotations

import json
import opcode
import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, repeat
from types import FrameType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from zerolab.comm.collectives import Comm
from zerolab.comm.waiting import finished_within
from zerolab.engine.slices import to_local
from zerolab.lab.ranks.intercept import COLLECTIVES, MESSAGES, PICKLED, Interceptor, Invocation, bytes_in_a_ring, nbytes
from zerolab.lab.standstill import Standstill

PATIENCE = 3.0  # seconds that ranks which do not say that they wait in vain stand still before another gives up
POLL = timedelta(seconds=0.5)  # who asks more often looks like one who computes, where a machine is busy
GLOO = timedelta(minutes=10)  # its limit, once it is known that the other side is there
END = "the end of"  # how a rank that has returned from the answer says where it is
AT_ONCE = 40  # how often a rank asks whether all are there, before it asks for each
SOON, LATER = timedelta(seconds=0.02), timedelta(seconds=0.5)  # between two questions after that: first, and at most
NO_MESSAGE = "it waits for a message that no rank sends, or sends one that no rank receives"

SENDS = ("send", "isend")
# The functional collectives return their result, and wait where it is used. Before torch 2.13 some have other names.
FUNCTIONAL = {
    name + kind: op
    for name, op in {
        "all_reduce": "all_reduce",
        "broadcast": "broadcast",
        "all_gather_single": "all_gather_into_tensor",
        "all_gather_tensor": "all_gather_into_tensor",
        "all_gather_into_tensor": "all_gather_into_tensor",
        "reduce_scatter_single": "reduce_scatter_tensor",
        "reduce_scatter_tensor": "reduce_scatter_tensor",
        "all_to_all_single": "all_to_all_single",
    }.items()
    for kind in ("", "_autograd", "_coalesced")
}
PARTS = {"all_to_all": ("input_tensor_list", "output_tensor_list"), "all_to_all_single": ("input", "output")}
UNEVEN = {"gather", "scatter", *PARTS, *PICKLED}  # where the ranks' sizes may differ
STEPS = {"reduce_scatter", "all_reduce", "all_gather", "all_to_all", "broadcast"}  # methods of zerolab's Comm

StandIn = tuple[Tensor, Tensor, Tensor]  # the answer's tensor, the one that is filled in its place, how it was before


class GaveUp(BaseException):
    """The other ranks do not do what this one does. Not an Exception, so that no answer catches it by accident."""

    likely = ""  # the mistake behind it, where it is known


@dataclass
class Traffic:
    """One call. `payload`: bytes of all ranks' parts together. `to`, `source`: of an exchange."""

    op: str
    payload: int
    world_size: int
    to: int = -1
    source: int = -1
    said: str = ""  # what the caller wrote, if that is another function: "self.comm.all_reduce"
    kept: int | None = None  # bytes that stay here of an uneven all-to-all, whose `payload` is this rank's alone
    asynchronous: bool = False
    used: bool = False  # a line of the answer's does something with what it returns
    waited: bool = False
    touched: bool = False  # its result was changed between the start and the wait, and the change is lost
    meddled: bool = False  # its input was changed between the start and the wait, perhaps before it was sent
    freed: bool = False  # the memory of its input or its result was given back before the wait

    @property
    def in_words(self) -> str:
        return self.said or self.op

    @property
    def sent(self) -> float:
        """Bytes that this rank sends when the call runs as a ring: what the course counts."""
        if self.op in ("exchange", *SENDS):
            return self.payload
        if self.kept is not None:
            return self.payload - self.kept
        return bytes_in_a_ring(self.op, self.payload, self.world_size)


class Started:
    """What an asynchronous call returns. `wait` fills in the result, nothing does before."""

    def __init__(
        self,
        spy: Spy,
        call: Traffic,
        work: Any,
        copies: list[StandIn],
        inputs: list[Tensor] | None = None,
        other_side: tuple[int | None, list[str]] = (None, []),
    ) -> None:
        self._spy, self._call, self._work, self._copies, self._other_side = spy, call, work, copies, other_side
        self._inputs = [(tensor, tensor._version) for tensor in inputs or []]
        self._results = [target for target, _, _ in copies]
        self._future: Later | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._call.op in MESSAGES:  # a wait of gloo's that gives up breaks the connection, so not in short turns
            self._spy.meet(self._call.op, *self._other_side)
            self._work.wait(GLOO)
        else:
            self._spy.wait(self._work, self._call.op)
        self._call.waited = True
        for tensor, version in self._inputs:
            self._call.meddled |= tensor._version != version
            self._call.freed |= _is_freed(tensor)
        with torch.no_grad():
            for target, filled, before in self._copies:
                if _is_freed(target):
                    self._call.freed = True
                    continue
                # NaN is what fresh memory holds, and differs from itself
                self._call.touched |= not torch.equal(target.nan_to_num(), before.nan_to_num())
                target.data.copy_(filled)  # as in torch, where autograd does not see a collective write
        self._copies, self._inputs = [], []
        if self._future is not None:
            self._future.fulfil()
        return True

    def __getattr__(self, name: str) -> Any:  # is_completed() and the rest of Work
        return getattr(self._work, name)

    def result(self) -> list[Tensor]:
        self.wait()
        return self._results

    def get_future(self) -> torch.futures.Future:
        if self._future is None:
            self._future = Later(self.result)
        return self._future


class Later(torch.futures.Future):
    """torch's Future of a call that finishes when it is waited for, and `then` what follows from it."""

    def __init__(self, value: Callable[[], Any]) -> None:
        super().__init__()
        self._value, self._begun = value, False

    def fulfil(self) -> None:
        if not self._begun:
            self._begun = True
            self.set_result(self._value())

    def wait(self) -> Any:
        self.fulfil()
        return super().wait()

    def value(self) -> Any:
        return self.wait()

    def done(self) -> bool:
        self.fulfil()  # or a loop that asks would never end
        return True

    def then(self, callback: Callable[[Any], Any]) -> Later:
        def after() -> Any:
            self.fulfil()
            return callback(self)

        return Later(after)


def _collected(futures: list[torch.futures.Future]) -> Later:
    """torch.futures.collect_all for futures that finish when they are waited for."""

    def value() -> list[torch.futures.Future]:
        for future in futures:
            future.wait()
        return futures

    return Later(value)


def _waited(futures: list[torch.futures.Future]) -> list[Any]:
    return [future.wait() for future in futures]


class Spy:
    """`with spy:` writes down every call of torch.distributed's functions."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, patience: float = PATIENCE) -> None:
        self.store, self.rank, self.world_size, self.patience = store, rank, world_size, patience
        self.calls: list[Traffic] = []
        self.blocks = 0  # how many times something was recorded: how far the check has come
        self.asked: set[str] = set()  # dist.get_rank, dist.get_world_size: those that the answer called for the world
        self._numbers: Counter[str] = Counter()  # of calls, by whom they concern
        self._callers: set[int] = set()  # the threads
        self._one_at_a_time = threading.Lock()  # of them says that this rank waits, or that it no longer does
        store.set(f"waits/{rank}", "")
        store.set(f"process/{rank}", str(os.getpid()))
        answers = dict.fromkeys(COLLECTIVES, self._collective) | dict.fromkeys(PICKLED, self._pickled)
        answers |= dict.fromkeys(MESSAGES, self._message)
        answers |= dict.fromkeys(("get_rank", "get_world_size"), self._number)
        answers["batch_isend_irecv"] = self._batch
        self._interceptor = Interceptor(answers)
        self._functionals = Interceptor(dict.fromkeys(FUNCTIONAL, self._functional), functional)
        self._torchs = torch.futures.collect_all, torch.futures.wait_all

    def __enter__(self) -> Spy:
        self._interceptor.install()
        self._functionals.install()
        torch.futures.collect_all, torch.futures.wait_all = _collected, _waited
        return self

    def __exit__(self, *exception: object) -> None:
        torch.futures.collect_all, torch.futures.wait_all = self._torchs
        self._functionals.remove()
        self._interceptor.remove()

    @contextmanager
    def record(self) -> Iterator[list[Traffic]]:
        """The calls of a block."""
        self.blocks += 1
        before, self.calls = self.calls, []
        calls = self.calls
        try:
            yield calls
        finally:
            self.calls = [*before, *calls]

    def exchange(self, tensor: Tensor, to: int, source: int) -> Tensor:
        """Send `tensor` to rank `to`, return what rank `source` sends to this one: both at once, so neither blocks."""
        for name, rank in (("to", to), ("source", source)):
            if not isinstance(rank, int) or not 0 <= rank < self.world_size:
                raise ValueError(
                    f"exchange({name}={rank!r}): ranks go from 0 to {self.world_size - 1}; did you take % N?"
                )
        if not isinstance(tensor, Tensor):
            raise TypeError(f"exchange() sends one tensor, not a {type(tensor).__name__}")
        call = Traffic("exchange", nbytes(tensor), self.world_size, to, source)
        self.calls.append(call)
        if to == source == self.rank:
            call.waited = True
            return tensor.clone()
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        doing = f"exchange(to={to}, source={source})"
        self.store.set(self._next(f"{self.rank} to {to}"), str(call.payload))
        self.store.set(self._next(f"{self.rank} from {source}"), "")
        coming = self._ask(self._next(f"{source} to {self.rank}"), source, doing)
        if int(coming) != call.payload:
            raise ValueError(
                f"rank {source} sends {coming} bytes to this rank, which sends {call.payload}: "
                "all chunks have the same length"
            )
        self._ask(self._next(f"{to} from {self.rank}"), to, doing)
        torchs = self._interceptor.originals
        works = [torchs["isend"](tensor.detach().contiguous(), to), torchs["irecv"](out, source)]
        for work in works:
            if work is not None:
                work.wait(GLOO)
        call.waited = True
        return out

    def _next(self, concerns: str) -> str:
        """A name for the next call that `concerns` these ranks, the same on all of them."""
        self._numbers[concerns] += 1
        return f"{concerns}, call {self._numbers[concerns]}"

    def _ask(self, name: str, rank: int | None, doing: str, *instead: str) -> str:
        """What `rank`, or any other if it is None, says about the call `name`. "" if it says one of `instead`."""
        self._calls_from_here()
        ranks = range(self.world_size) if rank is None else [rank]
        others, names = [other for other in ranks if other != self.rank], [name, *instead]
        who = f"rank {rank}" if rank is not None else "another rank"
        still: Standstill | None = None
        try:
            for turn in count():
                is_over = self.store.check([f"over/{other}" for other in others])  # first: its last word comes before
                if any(self.store.check([name]) for name in names):
                    break
                if is_over:
                    gave_up = any(self.store.check([f"gave up/{other}"]) for other in others)
                    self._give_up(f"{doing}: {who} {'does not make this call' if gave_up else 'did not take part'}")
                if turn < AT_ONCE:
                    time.sleep(0.0005)
                    continue
                if still is None:
                    still = self._standstill(self._may_come_on)
                    self._say_that_it_waits(names, others)
                if self._all_wait_in_vain() or still.lasts():
                    self._give_up(f"{doing}: {who} does not make this call")
                with suppress(dist.DistStoreError):  # it asks no more often, or it would look like one who computes
                    self.store.wait([name], min(SOON * 2 ** min(turn - AT_ONCE, 10), LATER))
        finally:
            if still is not None:
                self._say_that_it_waits()
        return self.store.get(name).decode() if self.store.check([name]) else ""

    def _give_up(self, words: str) -> NoReturn:
        self.store.set(f"gave up/{self.rank}", "")
        raise GaveUp(words) from None

    def _standstill(self, counts: Callable[[int], bool]) -> Standstill:
        """Of the ranks that count. One that has not begun is no process of which that could be said."""
        pids = {rank: int(self.store.get(f"process/{rank}")) for rank in range(self.world_size)}
        return Standstill(lambda: [pid for rank, pid in pids.items() if counts(rank)], self.patience)

    def _may_come_on(self, rank: int) -> bool:
        """This one too, if one of its threads waits while another computes."""
        return self._several_call if rank == self.rank else not self._waits_in_vain(rank)

    @property
    def _several_call(self) -> bool:
        """Where others than the main thread call, one may wait while another goes on."""
        return self._callers != {threading.main_thread().ident}

    def _calls_from_here(self) -> None:
        """A rank with several threads that call never says that it waits."""
        with self._one_at_a_time:
            self._callers.add(threading.get_ident())
            if self._several_call:
                self.store.set(f"waits/{self.rank}", "")

    def _say_that_it_waits(self, names: Sequence[str] = (), others: Sequence[int] = ()) -> None:
        """For any of these calls of these ranks, or, if there are none, no longer."""
        comes_on = [*([name] for name in names), [f"over/{other}" for other in others]]
        with self._one_at_a_time:
            if not self._several_call:
                self.store.set(f"waits/{self.rank}", json.dumps(comes_on) if names else "")

    def _waits_in_vain(self, rank: int) -> str:
        """What `rank` says that it waits for, if nothing of it has come: what it computes is no matter. The end of
        all who could call counts as well: a rank that sees it is told so, may catch that, and come on."""
        waits = self.store.get(f"waits/{rank}").decode()
        return "" if waits and any(map(self.store.check, json.loads(waits))) else waits

    def _all_wait_in_vain(self) -> bool:
        """Whether no rank will ever come on (but for a thread that has not called yet: of that nobody knows). All are
        seen to wait in vain, or to have ended, twice, and the second time for the same calls: so between the two looks
        all did so at once."""
        before: list[str] = []
        for _ in range(2):
            waits: list[str] = []
            for rank in range(self.world_size):
                waits.append("its end" if self.store.check([f"over/{rank}"]) else self._waits_in_vain(rank))
                if not waits[-1]:
                    return False
            before, waits = waits, before
        return before == waits

    def _agree(self, call: Traffic, group: Any) -> None:
        """Make sure that every rank of the group makes this call now."""
        self.agree(call.op if call.op in UNEVEN else f"{call.op} of {call.payload} bytes", group)

    def everyone(self, value: Any, ranks: Iterable[int]) -> list[Any]:
        """`value`, which must be JSON, of each of `ranks`: this meeting is none of the answer's calls."""
        ranks = list(ranks)
        name = self._next(f"said among {ranks}")
        self.store.set(f"{name} by {self.rank}", json.dumps(value))
        return [json.loads(self._ask(f"{name} by {rank}", rank, "the end of a call")) for rank in ranks]

    def agree(self, what: str, group: Any = None) -> None:
        """Make sure that every rank, or every one of `group`, has come to `what`: a call, or the end of the answer."""
        self._calls_from_here()
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        name = self._next("all" if group in (None, dist.group.WORLD) else f"all of {group.group_name}")
        names = {rank: f"{name} by {rank}" for rank in ranks}
        self.store.set(names[self.rank], what)
        answers: Iterable[str] = map(self._ask, names.values(), ranks, repeat(what))
        for _ in range(AT_ONCE):  # a question about all ranks takes as long as one about a single rank
            if self.store.check([*names.values()]):
                answers = [answer.decode() for answer in self.store.multi_get([*names.values()])]
                break
            time.sleep(0.0005)
        for rank, theirs in zip(ranks, answers, strict=True):
            if theirs != what:
                does = "is at" if theirs.startswith(END) else "calls"
                self._give_up(f"{what}: rank {rank} {does} {theirs}{' instead' * (does == 'calls')}")

    def _collective(self, call: Invocation) -> Any:
        if call.group == dist.GroupMember.NON_GROUP_MEMBER:
            return call.proceed()  # torch warns, and does nothing
        arguments, asynchronous = call.arguments, call.asynchronous
        rank, size = dist.get_rank(call.group), dist.get_world_size(call.group)
        _refuse_uneven(call)
        traffic = Traffic(call.name, max(map(nbytes, arguments.values()), default=0), size)
        traffic.said, traffic.asynchronous, traffic.used = _in_words(call), asynchronous, _is_used()
        if splits := arguments.get("input_split_sizes"):
            traffic.payload = nbytes(arguments["input"])
            traffic.kept = traffic.payload * splits[rank] // max(1, sum(splits))
        if call.name in ("gather", "scatter"):  # one rank receives, or sends, all of it
            pieces = arguments[f"{call.name}_list"]
            traffic.payload = nbytes(arguments["tensor"] if call.name == "gather" else pieces)
            stays = call.name == "gather" and pieces
            traffic.kept = traffic.payload if stays else traffic.payload // size * (call.name == "scatter")
        self.calls.append(traffic)
        self._agree(traffic, call.group)
        if call.name in PARTS:
            goes, comes = (arguments[name] for name in PARTS[call.name])
            self._compare_parts(call, goes, comes, call.group)
        filled = COLLECTIVES[call.name]
        copies: list[StandIn] = []
        if asynchronous and arguments.get(filled) is not None:
            arguments[filled], copies = _stand_ins(arguments[filled])
        inputs = {name: value for name, value in arguments.items() if name != filled} if asynchronous else {}
        arguments.update({name: _as_now(value) for name, value in inputs.items()})
        started = Started(self, traffic, call.start(), copies, _tensors(list(inputs.values())))
        if asynchronous:
            return started
        started.wait()
        return None

    def _compare_parts(self, call: Invocation, goes: Any, comes: Any, group: Any) -> None:
        """gloo ends the process that gets more than it expects, and says nothing to one that gets less."""
        ranks = dist.get_process_group_ranks(group)
        mine, refused = None, ""
        try:
            mine = [
                _parts(given, call.arguments.get(f"{side}_split_sizes"), f"{side}_split_sizes", len(ranks))
                for given, side in ((goes, "input"), (comes, "output"))
            ]
        except ValueError as error:
            refused = f"{call.name}: {error}"
        every = self.everyone(mine, ranks)
        if refused:
            raise ValueError(refused)
        for rank, parts in zip(ranks, every, strict=True):
            if parts is None:
                self._give_up(f"{call.name}: rank {rank} cannot make this call")
        for to in range(len(ranks)):
            for source in range(len(ranks)):
                sent, expected = every[source][0][to], every[to][1][source]
                if sent != expected:
                    raise ValueError(
                        f"{call.name}: rank {source} of the group sends {sent} elements to rank {to}, which "
                        f"expects {expected}"
                    )

    def _functional(self, call: Invocation) -> Any:
        if call.module != functional.__name__:  # else it is a step of another one
            tensors, group = call.arguments["self"], call.arguments["group"]
            if not isinstance(group, str):
                group = functional._resolve_group_name(group, call.arguments.get("tag", ""))
            group = dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]
            ranks = dist.get_process_group_ranks(group)
            size = len(ranks)
            traffic = Traffic(FUNCTIONAL[call.name], nbytes(tensors), size, waited=True)
            if traffic.op == "all_gather_into_tensor":
                traffic.payload *= size
            if splits := call.arguments.get("input_split_sizes"):
                traffic.kept = traffic.payload * splits[ranks.index(self.rank) % size] // max(1, sum(splits))
            self.calls.append(traffic)
            self._agree(traffic, group)
            if traffic.op in PARTS:
                rows = sum(call.arguments["output_split_sizes"] or [len(tensors)])
                comes = torch.empty(rows, *tensors.shape[1:], device="meta")
                self._compare_parts(call, tensors, comes, group)
        return call.proceed()

    def _number(self, call: Invocation) -> Any:
        if call.module.startswith("ex_") and call.group is dist.group.WORLD:
            self.asked.add(f"dist.{call.name}()")
        return call.proceed()

    def _pickled(self, call: Invocation) -> Any:
        if call.group == dist.GroupMember.NON_GROUP_MEMBER:
            return call.proceed()
        largest = max(map(_pickled_bytes, call.arguments.values()), default=0)
        size = dist.get_world_size(call.group)
        traffic = Traffic(call.name, largest * size, size, waited=True)
        self.calls.append(traffic)
        self._agree(traffic, call.group)
        return call.proceed()

    def _message(self, call: Invocation) -> Any:
        """A send counts; what an irecv receives is there after the wait, and not before."""
        arguments, group = call.arguments, call.group
        tensor, sends = arguments["tensor"], call.name in SENDS
        side = "dst" if sends else "src"
        peer = arguments[side]
        if arguments[f"group_{side}"] is not None:
            peer = dist.get_global_rank(group, arguments[f"group_{side}"])
        other_side = peer, self._announce(sends, peer, group, arguments["tag"])
        if call.name == "recv":
            self.meet(call.name, *other_side)
            return call.proceed()
        if call.name == "irecv":
            arguments["tensor"], copies = _stand_ins(tensor)
            traffic = Traffic("irecv", 0, self.world_size)
            self.calls.append(traffic)
            return Started(self, traffic, call.with_arguments(), copies, other_side=other_side)
        traffic = Traffic(call.name, nbytes(tensor), self.world_size, waited=True)
        self.calls.append(traffic)
        if call.name == "send":
            self.meet(call.name, *other_side)
            return call.proceed()
        arguments["tensor"] = _as_now(tensor)
        return Started(self, traffic, call.with_arguments(), [], [tensor], other_side)

    def _announce(self, sends: bool, peer: int | None, group: Any, tag: int) -> list[str]:
        """Say that a message is sent, or expected; return what its other side says: one of these, if there are any."""
        about = f"in {group.group_name}, tag {tag}"
        if sends:
            self.store.set(f"{self.store.add(f'messages to {peer} {about}', 1)} to {peer} {about}", "")
            self.store.set(self._next(f"{self.rank} to {peer} {about}"), "")
            return [self._next(f"{peer} from {self.rank} {about}"), f"{peer} from anybody"]
        number = self._next(f"here {about}").rpartition(" ")[2]
        if peer is None:
            self.store.set(f"{self.rank} from anybody", "")
            return [f"{number} to {self.rank} {about}"]
        self.store.set(self._next(f"{self.rank} from {peer} {about}"), "")
        return [self._next(f"{peer} to {self.rank} {about}")]

    def meet(self, op: str, peer: int | None, other_side: list[str]) -> None:
        """Wait until the other side of a message is there: gloo's own wait could not be ended."""
        if not other_side or peer == self.rank:
            return
        try:
            self._ask(other_side[0], peer, f"dist.{op}()", *other_side[1:])
        except GaveUp as error:
            error.likely = NO_MESSAGE
            raise

    def _batch(self, call: Invocation) -> Any:
        messages: list[dist.P2POp] = []
        started: list[tuple[Traffic, list[StandIn], list[Tensor]]] = []  # with what is sent
        other_sides: list[tuple[int | None, list[str]]] = []
        for message in call.arguments["p2p_op_list"]:
            sends = message.op.__name__ != "irecv"
            group = message.group or dist.group.WORLD
            other_sides.append((message.peer, self._announce(sends, message.peer, group, message.tag)))
            if sends:
                tensor = _as_now(message.tensor)
                copies: list[StandIn] = []
                traffic = Traffic("isend", nbytes(tensor), self.world_size, waited=True)
            else:
                tensor, copies = _stand_ins(message.tensor)
                traffic = Traffic("irecv", 0, self.world_size)
            messages.append(dist.P2POp(message.op, tensor, message.peer, message.group, message.tag))
            started.append((traffic, copies, [message.tensor] if sends else []))
        self.calls += [traffic for traffic, _, _ in started]
        call.arguments["p2p_op_list"] = messages
        works = call.with_arguments()
        return [
            Started(self, traffic, work, copies, inputs, other_side)
            for work, (traffic, copies, inputs), other_side in zip(works, started, other_sides, strict=True)
        ]

    def wait(self, work: Any, op: str) -> None:
        """Wait for `work` in short turns, so that an interrupt gets through."""
        still: Standstill | None = None
        try:
            while work is not None and not finished_within(POLL, work):
                still = still or self._standstill(lambda rank: rank != self.rank)
                if still.lasts():
                    self._give_up(f"{op}: not finished")
        except RuntimeError as error:
            self._give_up(f"{op}: {error}")


def _parts(given: Any, splits: list[int] | None, name: str, size: int) -> list[int]:
    """Elements by rank of what an all-to-all is given, divided by `splits`, its argument `name`. ValueError if it
    cannot be: gloo itself divides by bytes, and sends halves of numbers."""
    if isinstance(given, (list, tuple)):
        if len(given) != size:
            raise ValueError(f"a list of {len(given)} tensors, where each of {size} ranks needs one")
        return [part.numel() for part in given]
    rows = given.shape[0] if given.dim() else 1
    if not splits:
        if rows % size:
            raise ValueError(f"{rows} rows cannot be divided evenly among {size} ranks")
        return [given.numel() // size] * size
    if len(splits) != size:
        raise ValueError(f"{name} has {len(splits)} numbers, where each of {size} ranks needs one")
    if sum(splits) != rows or min(splits) < 0:
        raise ValueError(f"{name} {list(splits)} does not add up to the {rows} rows")
    return [split * (given.numel() // max(1, rows)) for split in splits]


def _refuse_uneven(call: Invocation) -> None:
    """gloo takes the parts of a list as they are, and ends the process where another rank's are longer."""
    one, many = {"reduce_scatter": ("output", "input_list"), "all_gather": ("tensor", "tensor_list")}.get(
        call.name, ("", "")
    )
    if not one:
        return
    wanted, parts = call.arguments[one], call.arguments[many]
    if not isinstance(wanted, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        return
    if sizes := [part.numel() for part in parts if part.numel() != wanted.numel()]:
        raise ValueError(f"{call.name}: `{one}` has {wanted.numel()} elements, and a part of `{many}` {sizes[0]}")


def _in_words(call: Invocation) -> str:
    """ "self.comm.all_reduce", if that is what makes the call; "" for a call of torch.distributed's own."""
    frame, said = sys._getframe(1) if call.module == Comm.__module__ else None, ""
    while frame is not None:  # the outermost one is what was called; the others are its steps
        name = frame.f_code.co_name
        name = name.removesuffix("_steps").removeprefix("_")
        if _module(frame) == Comm.__module__ and name in STEPS:
            said = f"self.comm.{name}"
        frame = frame.f_back
    return said


def _is_used() -> bool:
    """Whether who makes the call does something with what it returns, and is not zerolab or torch."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and (module := _module(frame)).startswith("zerolab.lab."):
        frame = frame.f_back
    if frame is None or module.partition(".")[0] in ("zerolab", "torch"):
        return False
    following = (code for code in frame.f_code.co_code[frame.f_lasti + 2 :: 2] if code != opcode.opmap.get("CACHE"))
    return next(following, None) != opcode.opmap["POP_TOP"]


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _pickled_bytes(value: Any) -> int:
    try:
        return len(pickle.dumps(value))
    except (TypeError, AttributeError, pickle.PicklingError):  # a process group
        return 0


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in `value`, a list of tensors, lists of them and anything else."""
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _as_now(value: Any) -> Any:
    """`value` with copies of its tensors, as the network would read them if it read them at once."""
    if isinstance(value, (list, tuple)):
        return [_as_now(item) for item in value]
    return _copy(to_local(value)) if isinstance(value, Tensor) else value


def _copy(own: Tensor) -> Tensor:
    """A copy, or `own` where a copy would be packed more densely: what torch refuses to send, it must see."""
    copy = own.detach().clone()
    return copy if copy.stride() == own.stride() else own


def _is_freed(tensor: Tensor) -> bool:
    end = (int(tensor.storage_offset()) + tensor.numel()) * tensor.element_size()
    return tensor.numel() > 0 and tensor.is_contiguous() and tensor.untyped_storage().nbytes() < end


def _stand_ins(value: Any) -> tuple[Any, list[StandIn]]:
    """Copies to fill in place of `value`, a tensor or a list of them, and which copy belongs to which tensor."""
    tensors = [value] if isinstance(value, Tensor) else value
    found = [(own, _copy(own), own.detach().clone()) for own in map(to_local, tensors)]
    copies = [copy for _, copy, _ in found]
    found = [stands_in for stands_in in found if stands_in[1] is not stands_in[0]]
    return copies[0] if isinstance(value, Tensor) else copies, found
