"""torch.distributed on live ranks: no collective starts before all ranks agree which one it is.

When not every rank makes the same call, gloo takes one collective for another: it aborts the process, hangs, or returns
a wrong tensor. So on live ranks the public functions of torch.distributed first leave a note in the store that says
what this rank is about to do, and read the notes of the others: half a millisecond at 2 ranks, one at 4 (on two cores).
If they differ, every rank raises, and nothing has started. If a rank does not come, its note is missing, and the
notebook has noted what happened to it.

Waits are in short turns, so that Control-C gets through. Sends and receives have no counterpart to be compared with,
but are waited for in the same way. Calls from inside the engine and torch go straight through: the engine checks its
own, and torch does not.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zerolab.comm.groups import backends_of
from zerolab.comm.waiting import finished_within
from zerolab.lab.ranks import network
from zerolab.lab.ranks.intercept import COLLECTIVES, MESSAGES, PICKLED, Answer, Interceptor, Invocation, nbytes
from zerolab.lab.ranks.report import Misused
from zerolab.world.processes import Patience

TURN = timedelta(seconds=0.2)
GRACE = 1.0  # seconds that a message may still be under way after its sender has gone
LONGEST = 0.4  # seconds: a longer turn counts as this much, since the machine stood still


Splits = dict[str, list[Any]]  # "in", "out": what this rank sends to each rank of the group, and expects from each


class CollectiveError(RuntimeError):
    """The ranks did not call the same collective. Nothing was sent. `consequence`: most ranks did as this one."""

    def __init__(self, message: str, consequence: bool = False) -> None:
        super().__init__(message)
        self.consequence = consequence


class LostRank(RuntimeError):
    """A rank that this one waits for will not come. `consequence`: because that rank failed."""

    def __init__(self, message: str, consequence: bool) -> None:
        super().__init__(message)
        self.consequence = consequence


@dataclass
class _Guard:
    """What a rank knows about the world it is in, and about the cell it runs."""

    store: Any  # of this world
    news: Any  # where the notebook notes what happened to a rank
    timeout: float
    cell: int = 0
    size: int = 1
    counts: Counter[Any] = field(default_factory=Counter)  # collectives in this cell, by group
    broken: str = ""  # why the process group is unusable


_current: _Guard | None = None


def enter(store: Any, news: Any, timeout: float) -> None:
    """Watch over this world from now on."""
    global _current
    _current = _Guard(store, news, timeout)
    if not _interceptor.originals:
        _interceptor.install()


def leave() -> None:
    global _current
    _current = None


def begin(cell: int, size: int) -> None:
    """A cell begins, on every rank that takes part in it: collectives are counted from 0 again."""
    if _current is not None:
        _current.cell, _current.size = cell, size
        _current.counts.clear()


def _guard() -> _Guard:
    if _current is None:
        raise RuntimeError("this rank has left its world")
    return _current


# -- agreement ---------------------------------------------------------------------------------------------------------


def agree(call: dict[str, Any], group: Any) -> None:
    """Return when every rank of the group is about to make this call; raise if they are not."""
    guard, me = _guard(), dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    if ranks == [me] and not guard.broken:
        return
    number = guard.counts[group.group_name]
    guard.counts[group.group_name] += 1
    key = f"{guard.cell}/{group.group_name}"
    keys = {rank: f"{key}/{number}/{rank}" for rank in ranks}
    guard.store.set(keys[me], json.dumps(call | {"broken": guard.broken}))
    _await(keys, f"{_say(call)}")
    calls = {rank: json.loads(row) for rank, row in zip(ranks, guard.store.multi_get(list(keys.values())))}
    if number:  # every rank has read the call before, or it would not be here
        guard.store.delete_key(f"{key}/{number - 1}/{me}")
    for rank, other in calls.items():
        if other["broken"]:
            raise LostRank(f"the process group is unusable since rank {rank} {other['broken']}: lab.reset()", False)
    _compare(calls)


def _await(keys: dict[int, str], what: str) -> None:
    """Until all keys are there, or it is clear that one never will be."""
    guard = _guard()
    patience = Patience(guard.timeout, longest=LONGEST)
    while True:
        try:
            guard.store.wait(list(keys.values()), TURN)
            return
        except dist.DistStoreError:
            late = [rank for rank in keys if not guard.store.check([keys[rank]])]
            _check_news(late, keys, f"{what} needs every rank, but ")
            if patience.turn() < 0 and late:
                others = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                raise LostRank(f"{what} waited {guard.timeout:g} s for {others}, still busy elsewhere", True) from None


def _check_news(late: list[int], keys: dict[int, str], what: str) -> None:
    for rank in late:
        news = _news(rank)
        if news and not _guard().store.check([keys[rank]]):  # it did not come just before its end
            without = " without it" if news.startswith("finished") else ""
            raise LostRank(f"{what}rank {rank} {news}{without}", _is_failure(news)) from None


def _news(rank: int) -> str:
    """How a rank left this cell; empty while it runs."""
    guard = _guard()
    key = f"over/{guard.cell}/{rank}"
    return guard.news.get(key).decode() if guard.news.check([key]) else ""


def _is_failure(news: str) -> bool:
    return bool(news) and not news.startswith(("finished", "takes"))


def _compare(calls: dict[int, dict[str, Any]]) -> None:
    groups: dict[str, list[int]] = {}
    for rank, call in calls.items():
        same = {name: value for name, value in call.items() if name not in ("line", "splits")}
        groups.setdefault(json.dumps(same), []).append(rank)
    if len(groups) > 1:
        parts = []
        ordered = sorted(groups.values(), key=lambda ranks: (len(ranks), -ranks[0]))  # the odd one first
        for ranks in ordered:
            call = calls[ranks[0]]
            parts.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} called {_say(call)}{call['line']}")
        raise CollectiveError(" while ".join(parts), dist.get_rank() not in ordered[0])
    splits = {rank: call["splits"] for rank, call in calls.items() if call["splits"]}
    order = list(calls)
    for i, sender in enumerate(order):
        for j, receiver in enumerate(order):
            if splits and splits[sender]["in"][j] != splits[receiver]["out"][i]:
                sizes = f"{splits[sender]['in'][j]} for rank {receiver}, which expects {splits[receiver]['out'][i]}"
                raise CollectiveError(f"{_say(calls[sender])}: rank {sender} has {sizes}")


def _say(call: dict[str, Any]) -> str:
    return f"{call['op']}{call['what']}"


# -- waiting -----------------------------------------------------------------------------------------------------------


class Flight:
    """A collective or message under way: torch's Work, with a wait that Control-C and bad news can interrupt."""

    def __init__(self, work: Any, what: str, peers: list[int], ready: float = 0.0, p2p: bool = False) -> None:
        self._work, self._what, self._peers, self._ready, self._p2p = work, what, peers, ready, p2p
        self._arrived: Callable[[], float] = lambda: self._ready
        self._waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def arrives(self, moment: Callable[[], float]) -> None:
        """The wait ends no sooner than the moment that this function gives when it is called then."""
        self._arrived = moment

    def source(self) -> int:
        """For a message that has come: which rank of the group sent it; -1 where the backend does not say."""
        return self._work._source_rank() if "from rank None" in self._what else -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._waited:
            return True
        try:
            (self._wait_for_message if self._p2p else self._wait_in_turns)(timeout)
        except BaseException as error:
            if _current is not None and not _current.broken:
                verb = "was interrupted in" if isinstance(error, KeyboardInterrupt) else "failed in"
                _current.broken = f"{verb} {self._what}"
            raise
        network.sleep_until(self._arrived())
        self._waited = True
        return True

    def _wait_in_turns(self, timeout: timedelta | None) -> None:
        limit = Patience(timeout.total_seconds(), longest=LONGEST) if timeout else None
        grace = Patience(GRACE, longest=LONGEST)
        while True:
            try:
                if finished_within(TURN, self._work):
                    return
            except RuntimeError as error:
                raise LostRank(f"{self._what} failed: {error}", True) from None
            if timeout and limit and limit.turn() < 0:
                raise LostRank(f"{self._what} failed: not finished after {timeout.total_seconds():g} s", True)
            if grace.turn() < 0:
                self._look(failed_only=True)

    def _wait_for_message(self, timeout: timedelta | None) -> None:
        """Wait in another thread: gloo closes all connections when the wait for a message times out."""
        grace = Patience(GRACE, longest=LONGEST)
        errors: list[Exception] = []
        thread = threading.Thread(target=self._block, args=(timeout, errors), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(TURN.total_seconds())
            if thread.is_alive() and grace.turn() < 0:
                self._look(failed_only=False)
        if errors:
            raise LostRank(f"{self._what} failed: {errors[0]}", True)

    def _block(self, timeout: timedelta | None, errors: list[Exception]) -> None:
        try:
            self._work.wait(timeout) if timeout else self._work.wait()
        except Exception as error:
            errors.append(error)

    def _look(self, failed_only: bool) -> None:
        for rank in self._peers:
            news = _news(rank)
            if _is_failure(news) or (news and not failed_only):
                raise LostRank(f"{self._what} waits for rank {rank}, which {news}", _is_failure(news))


# -- what a call says --------------------------------------------------------------------------------------------------


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {_dtype(tensor)}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _root(call: dict[str, Any], name: str, group: Any) -> str:
    root = call.get(name)
    if root is None and call.get(f"group_{name}") is not None:
        root = dist.get_global_rank(group, call[f"group_{name}"])
    return f"{'from' if name == 'src' else 'to'} rank {0 if root is None else root}"


def _reduction(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _describe(name: str, call: dict[str, Any], group: Any) -> tuple[str, Splits | None, int]:
    """What the ranks must agree on, in words; what each pair must agree on; bytes, all parts together."""
    size = dist.get_world_size(group)
    words: list[str] = []
    splits: Splits | None = None
    payload = 0
    if name in ("all_reduce", "broadcast", "reduce"):
        payload = nbytes(call["tensor"])
        words.append(_shape(call["tensor"]))
    elif name in ("gather", "scatter", "all_gather"):
        payload = size * nbytes(call["tensor"])
        words.append(_shape(call["tensor"]))
        outputs = [_shape(tensor) for tensor in call.get("tensor_list") or []]
        if name == "all_gather" and outputs != size * words:
            words.append(f"into {len(outputs)} tensors, {', '.join(dict.fromkeys(outputs))}")
    elif "input_tensor" in call or (name.startswith("reduce_scatter_") and "input" in call):
        input = call["input_tensor"] if "input_tensor" in call else call["input"]
        output = call["output_tensor"] if "output_tensor" in call else call["output"]
        payload = max(nbytes(input), nbytes(output))
        words += [_shape(input), f"into {_shape(output)}"]
    elif name == "reduce_scatter":
        payload = nbytes(call["input_list"])
        words += [", ".join(map(_shape, call["input_list"])), f"into {_shape(call['output'])}"]
    elif name == "all_to_all_single":
        payload = nbytes(call["input"])
        input, output = call["input"], call["output"]
        words.append(f"rows of {tuple(input.shape[1:])} {_dtype(input)}")
        splits = {
            "in": list(call.get("input_split_sizes") or size * [len(input) // size]),
            "out": list(call.get("output_split_sizes") or size * [len(output) // size]),
        }
    elif name == "all_to_all":
        payload = nbytes(call["input_tensor_list"])
        splits = {
            "in": [_shape(tensor) for tensor in call["input_tensor_list"]],
            "out": [_shape(tensor) for tensor in call["output_tensor_list"]],
        }
    if "op" in call and payload:
        words.append(_reduction(call["op"]))
    what = " of " + ", ".join(words) if words else ""
    if "src" in call or "dst" in call:
        what += " " + _root(call, "src" if "src" in call else "dst", group)
    return what, splits, payload


# -- in place of torch's functions -------------------------------------------------------------------------------------


def _direct(call: Invocation) -> bool:
    """Whether a call is not ours to check: it comes from the engine or torch, or from outside a guarded world."""
    own = call.module.startswith("zerolab.lab") or not call.module.startswith(("zerolab.", "torch."))
    return _current is None or not own or not dist.is_initialized()


def _line(call: Invocation) -> str:
    """Where the call is made: of interest if the others call something else."""
    return f" (line {call.line})"


def _collective(call: Invocation) -> Any:
    if _direct(call):
        return call.proceed()
    name, group = call.name, call.group
    if dist.get_rank(group) < 0:
        return call.proceed()
    what, splits, payload = _describe(name, call.arguments, group)
    agree({"op": name, "what": what, "splits": splits, "line": _line(call)}, group)
    if "async_op" not in call.arguments or not _through_gloo(group, call.arguments):
        return call.proceed()
    ready = network.delay.before(name, payload, dist.get_world_size(group))
    asynchronous, work = call.asynchronous, call.start()
    peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    flight = Flight(work, f"{name}{what}", peers, ready)
    if asynchronous:
        return flight
    flight.wait()
    return None


def _through_gloo(group: Any, arguments: Any) -> bool:
    """Whether gloo carries these tensors. What is on a GPU of the rank's own, NCCL carries, and nobody can delay it."""
    backends = backends_of(group)
    kinds = {leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
    if all(backends.get(kind) == "gloo" for kind in kinds or backends):  # a barrier goes by either, where there are two
        return True
    if kinds and network.on():
        raise Misused("a link is emulated for what is on the CPU, and this is on a GPU: .cpu(), or lab.link(None)")
    return False


def _new_group(call: Invocation) -> Any:
    if not _direct(call) and not call.arguments.get("use_local_synchronization"):
        ranks = call.arguments.get("ranks")
        what = f" of ranks {list(ranks)}" if ranks is not None else ""
        agree({"op": "new_group", "what": what, "splits": None, "line": _line(call)}, dist.group.WORLD)
    return call.proceed()


def _message(call: Invocation) -> Any:
    """isend, irecv, and what waits for them at once: send, recv."""
    if _direct(call):
        return call.proceed()
    arguments, group = call.arguments, call.group
    if not _through_gloo(group, arguments):
        return call.proceed()
    sends, peer = "send" in call.name, _peer(arguments, group)
    flight = _fly(sends, arguments["tensor"], peer, group, arguments["tag"])
    if call.name.startswith("i") or flight is None:
        return flight
    flight.wait()
    if sends:
        return None
    source = flight.source()
    return dist.get_global_rank(group, source) if source >= 0 else peer


def _peer(call: dict[str, Any], group: Any) -> int | None:
    """The global rank that a message goes to or comes from; None: from any."""
    side = "dst" if "dst" in call else "src"
    if call[f"group_{side}"] is not None:
        return dist.get_global_rank(group, call[f"group_{side}"])
    return call[side]


def _fly(sends: bool, tensor: Tensor, peer: int | None, group: Any, tag: int) -> Flight | None:
    """Start a message. On an emulated link the sender notes when it was sent, for the receiver."""
    guard, me, size = _guard(), dist.get_rank(), nbytes(tensor)
    what = f"{'send' if sends else 'recv'} of {_shape(tensor)} {'to' if sends else 'from'} rank {peer}"
    peers = [peer] if peer is not None else [rank for rank in dist.get_process_group_ranks(group) if rank != me]
    moment, key = 0.0, ""
    if network.on() and peer is not None:
        pair = (me, peer) if sends else (peer, me)
        key = f"link/{guard.cell}/{group.group_name}/{pair}/{tag}/{_count(group, pair, tag)}"
        if sends:
            begin, moment = network.send(size)
            guard.store.set(key, repr(begin))
    work = _interceptor.originals["isend" if sends else "irecv"](tensor, peer, group, tag)
    if work is None:
        return None
    flight = Flight(work, what, peers, moment, p2p=True)
    if key and not sends:
        flight.arrives(lambda: network.receive(float(guard.store.get(key)), size))
    return flight


def _count(group: Any, pair: tuple[int, int], tag: int) -> int:
    """The number of this message in the cell: between two ranks, messages arrive in the order they were sent in."""
    guard, name = _guard(), (group.group_name, pair, tag)
    guard.counts[name] += 1
    return guard.counts[name]


def _batch(call: Invocation) -> Any:
    ops = call.arguments["p2p_op_list"]
    groups = [op.group or dist.group.WORLD for op in ops]
    if _direct(call) or not all(_through_gloo(group, op.tensor) for group, op in zip(groups, ops)):
        return call.proceed()
    isend = _interceptor.originals["isend"]
    flights = [_fly(op.op is isend, op.tensor, op.peer, group, op.tag) for op, group in zip(ops, groups)]
    return [flight for flight in flights if flight is not None]


_answers: dict[str, Answer] = dict.fromkeys((*COLLECTIVES, "monitored_barrier", *PICKLED), _collective)
_answers |= dict.fromkeys(MESSAGES, _message)
_interceptor = Interceptor(_answers | {"batch_isend_irecv": _batch, "new_group": _new_group})
