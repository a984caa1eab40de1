"""torch.distributed on live ranks: nobody starts a collective before all agree which one it is.

gloo takes a collective that not all ranks call alike for what it is not: it aborts the process, hangs, or hands over a
wrong tensor. So on live ranks the public functions of torch.distributed first leave a note in the store that says what
this rank is about to do, and read the others': half a millisecond at 2 ranks, one at 4 (on two cores). If they differ,
every rank raises, and nothing was started. If a rank does not come, its note is missing, and the notebook has noted
what became of it.

Waits are in short turns, so that Control-C gets through. Sends and receives cannot be compared with anything, but are
waited for in the same way. Calls from inside the engine and torch go straight through: they check themselves, or not.
"""

from __future__ import annotations

import inspect
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch import Tensor

from zerolab.comm.collectives import is_through
from zerolab.lab.ranks import network

TURN = timedelta(seconds=0.2)
GRACE = 1.0  # seconds that a message may still be under way after its sender has gone


class CollectiveError(RuntimeError):
    """The ranks did not call the same collective. Nothing was sent. `consequence`: most ranks did as this one."""

    def __init__(self, message: str, consequence: bool = False) -> None:
        super().__init__(message)
        self.consequence = consequence


class LostRank(RuntimeError):
    """A rank that this one waits for will not come. `consequence`: because it failed itself."""

    def __init__(self, message: str, consequence: bool) -> None:
        super().__init__(message)
        self.consequence = consequence


@dataclass
class _Guard:
    """What a rank knows about the world that it is in, and the cell that it runs."""

    store: Any  # of this world
    news: Any  # where the notebook notes what became of a rank
    timeout: float
    cell: int = 0
    size: int = 1
    counts: Counter = field(default_factory=Counter)  # collectives in this cell, by group
    broken: str = ""  # why the process group is of no use any more


_guard: _Guard | None = None


def enter(store: Any, news: Any, timeout: float) -> None:
    """Watch over this world from now on."""
    global _guard
    _guard = _Guard(store, news, timeout)
    _install()


def leave() -> None:
    global _guard
    _guard = None


def begin(cell: int, size: int) -> None:
    """A cell begins, on every rank that takes part in it: collectives are counted anew."""
    if _guard is not None:
        _guard.cell, _guard.size = cell, size
        _guard.counts.clear()


# -- agreement ---------------------------------------------------------------------------------------------------------


def agree(call: dict[str, Any], group: Any) -> None:
    """Return when every rank of the group is about to make this call; raise if they are not."""
    guard, me = _guard, dist.get_rank()
    ranks = dist.get_process_group_ranks(group)
    number = guard.counts[group.group_name]
    guard.counts[group.group_name] += 1
    key = f"{guard.cell}/{group.group_name}"
    keys = {rank: f"{key}/{number}/{rank}" for rank in ranks}
    guard.store.set(keys[me], json.dumps(call | {"broken": guard.broken}))
    _await(keys, f"{_say(call)}")
    calls = {rank: json.loads(row) for rank, row in zip(ranks, guard.store.multi_get(list(keys.values())))}
    if number:  # all have read the call before, or they would not be here
        guard.store.delete_key(f"{key}/{number - 1}/{me}")
    for rank, other in calls.items():
        if other["broken"]:
            raise LostRank(f"the process group is of no use since rank {rank} {other['broken']}: lab.reset()", False)
    _compare(calls)


def _await(keys: dict[int, str], what: str) -> None:
    """Until all keys are there, or it is clear that one will never be."""
    guard, begin = _guard, time.monotonic()
    while True:
        try:
            guard.store.wait(list(keys.values()), TURN)
            return
        except dist.DistStoreError:
            late = [rank for rank in keys if not guard.store.check([keys[rank]])]
            _check_news(late, keys, f"{what} needs every rank, but ")
            if late and time.monotonic() > begin + guard.timeout:
                others = f"rank{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                raise LostRank(f"{what} waited {guard.timeout:g} s for {others}, still busy elsewhere", True) from None


def _check_news(late: list[int], keys: dict[int, str], what: str) -> None:
    for rank in late:
        news = _news(rank)
        if news and not _guard.store.check([keys[rank]]):  # it did not come just before its end
            failed = not news.startswith(("finished", "takes"))
            without = "" if failed else " without it"
            raise LostRank(f"{what}rank {rank} {news}{without}", failed) from None


def _news(rank: int) -> str:
    """What became of a rank in this cell; empty while it runs."""
    key = f"over/{_guard.cell}/{rank}"
    return _guard.news.get(key).decode() if _guard.news.check([key]) else ""


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
    """A collective or message under way: torch's Work, with a wait that Control-C and bad news interrupt."""

    def __init__(self, work: Any, what: str, peers: list[int], ready: float = 0.0, p2p: bool = False) -> None:
        self._work, self._what, self._peers, self._ready, self._p2p = work, what, peers, ready, p2p
        self._arrived: Callable[[], float] = lambda: self._ready
        self._waited = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def arrives(self, moment: Callable[[], float]) -> None:
        """The wait ends no sooner than at the moment that this function will tell then."""
        self._arrived = moment

    def source(self) -> int:
        """Of a message that has come: from which rank of the group; -1 where the backend does not tell."""
        return self._work._source_rank() if "from rank None" in self._what else -1

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._waited:
            return True
        try:
            (self._wait_for_message if self._p2p else self._wait_in_turns)(timeout)
        except BaseException as error:
            if _guard is not None and not _guard.broken:
                verb = "was interrupted in" if isinstance(error, KeyboardInterrupt) else "failed in"
                _guard.broken = f"{verb} {self._what}"
            raise
        network.sleep_until(self._arrived())
        self._waited = True
        return True

    def _wait_in_turns(self, timeout: timedelta | None) -> None:
        begin = time.monotonic()
        while True:
            try:
                if is_through(self._work, TURN):
                    return
            except RuntimeError as error:
                raise LostRank(f"{self._what} failed: {error}", True) from None
            now = time.monotonic()
            if timeout and now > begin + timeout.total_seconds():
                raise LostRank(f"{self._what} failed: not through after {timeout.total_seconds():g} s", True)
            if now > begin + GRACE:
                self._look(failed_only=True)

    def _wait_for_message(self, timeout: timedelta | None) -> None:
        """gloo closes all connections when the wait for a message times out, so it is another thread that waits."""
        begin, errors = time.monotonic(), []
        thread = threading.Thread(target=self._block, args=(timeout, errors), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(TURN.total_seconds())
            if thread.is_alive() and time.monotonic() > begin + GRACE:
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
            failed = bool(news) and not news.startswith(("finished", "takes"))
            if failed or (news and not failed_only):
                raise LostRank(f"{self._what} waits for rank {rank}, which {news}", failed)


def _finish(result: Any, asynchronous: bool) -> Any:
    """A flight for who wants to wait later, else nothing, when it is through."""
    if asynchronous or result is None:
        return result
    result.wait()
    return None


# -- the functions of torch.distributed --------------------------------------------------------------------------------


def _shape(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _root(call: dict[str, Any], name: str, group: Any) -> str:
    root = call.get(name)
    if root is None and call.get(f"group_{name}") is not None:
        root = dist.get_global_rank(group, call[f"group_{name}"])
    return f"{'from' if name == 'src' else 'to'} rank {0 if root is None else root}"


def _reduction(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _describe(name: str, call: dict[str, Any], group: Any) -> tuple[str, dict[str, list] | None, int]:
    """What the ranks must agree on, in words; what each pair must agree on; bytes of the whole, all parts together."""
    size = dist.get_world_size(group)
    words, splits, payload = [], None, 0
    if name in ("all_reduce", "broadcast", "reduce"):
        payload = _bytes(call["tensor"])
        words.append(_shape(call["tensor"]))
    elif name in ("gather", "scatter", "all_gather"):
        payload = size * _bytes(call["tensor"])
        words.append(_shape(call["tensor"]))
        outputs = [_shape(tensor) for tensor in call.get("tensor_list") or []]
        if name == "all_gather" and outputs != size * words:
            words.append(f"into {len(outputs)} tensors, {', '.join(dict.fromkeys(outputs))}")
    elif "input_tensor" in call or (name.startswith("reduce_scatter_") and "input" in call):
        input, output = call.get("input_tensor", call.get("input")), call.get("output_tensor", call.get("output"))
        payload = max(_bytes(input), _bytes(output))
        words += [_shape(input), f"into {_shape(output)}"]
    elif name == "reduce_scatter":
        payload = _bytes(*call["input_list"])
        words += [", ".join(map(_shape, call["input_list"])), f"into {_shape(call['output'])}"]
    elif name == "all_to_all_single":
        payload = _bytes(call["input"])
        input, output = call["input"], call["output"]
        words.append(f"rows of {tuple(input.shape[1:])} {str(input.dtype).removeprefix('torch.')}")
        splits = {
            "in": list(call.get("input_split_sizes") or size * [len(input) // size]),
            "out": list(call.get("output_split_sizes") or size * [len(output) // size]),
        }
    elif name == "all_to_all":
        payload = _bytes(*call["input_tensor_list"])
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


def _direct(frame: Any) -> bool:
    """Whether a call is none of ours: outside a guarded world, or from the engine or torch itself."""
    name = frame.f_globals.get("__name__", "")
    own = name.startswith("zerolab.lab") or not name.startswith(("zerolab.", "torch."))
    return _guard is None or not own or not dist.is_initialized()


def _line(frame: Any) -> str:
    """Where the call stands: of interest if it is not what the others call."""
    return f" (line {frame.f_lineno})"


def _collective(original: Callable[..., Any]) -> Callable[..., Any]:
    name, signature = original.__name__, inspect.signature(original)
    steps = 2 if name == "all_reduce" else 1

    @wraps(original)
    def guarded(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        if _direct(frame):
            return original(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        group = bound.arguments.get("group") or dist.group.WORLD
        if dist.get_rank(group) < 0:
            return original(*args, **options)
        what, splits, payload = _describe(name, bound.arguments, group)
        agree({"op": name, "what": what, "splits": splits, "line": _line(frame)}, group)
        if "async_op" not in bound.arguments or "gloo" not in dist.get_backend(group):
            return original(*args, **options)
        n = dist.get_world_size(group)
        ready = network.collective(steps * payload * (n - 1) // n, steps * (n - 1))
        asynchronous, bound.arguments["async_op"] = bound.arguments["async_op"], True
        work = original(*bound.args, **bound.kwargs)
        peers = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
        return _finish(Flight(work, f"{name}{what}", peers, ready), asynchronous)

    return guarded


def _new_group(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def guarded(*args: Any, **options: Any) -> Any:
        frame = sys._getframe(1)
        ranks = signature.bind(*args, **options).arguments.get("ranks")
        if not _direct(frame) and not options.get("use_local_synchronization"):
            what = f" of ranks {list(ranks)}" if ranks is not None else ""
            agree({"op": "new_group", "what": what, "splits": None, "line": _line(frame)}, dist.group.WORLD)
        return original(*args, **options)

    return guarded


def _message(original: Callable[..., Any], asynchronous: bool) -> Callable[..., Any]:
    """isend, irecv, and what waits for them at once: send, recv."""
    name = original.__name__
    start = {"send": dist.isend, "recv": dist.irecv}.get(name, original)
    signature = inspect.signature(start)

    @wraps(original)
    def guarded(*args: Any, **options: Any) -> Any:
        if _direct(sys._getframe(1)):
            return original(*args, **options)
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        call = bound.arguments
        group = call["group"] or dist.group.WORLD
        if "gloo" not in dist.get_backend(group):
            return original(*args, **options)
        flight = _fly(start, call["tensor"], _peer(call, group), group, call["tag"])
        if asynchronous or flight is None:
            return flight
        flight.wait()
        if name == "send":
            return None
        source = flight.source()
        return dist.get_global_rank(group, source) if source >= 0 else _peer(call, group)

    return guarded


def _peer(call: dict[str, Any], group: Any) -> int | None:
    """The global rank that a message goes to or comes from; None: from anybody."""
    side = "dst" if "dst" in call else "src"
    if call[f"group_{side}"] is not None:
        return dist.get_global_rank(group, call[f"group_{side}"])
    return call[side]


def _fly(start: Callable[..., Any], tensor: Tensor, peer: int | None, group: Any, tag: int) -> Flight | None:
    """Start a message. On an emulated link the sender leaves a note of when it begins, for the receiver."""
    sends = start is _originals["isend"]
    me, nbytes = dist.get_rank(), _bytes(tensor)
    what = f"{'send' if sends else 'recv'} of {_shape(tensor)} {'to' if sends else 'from'} rank {peer}"
    peers = [peer] if peer is not None else [rank for rank in dist.get_process_group_ranks(group) if rank != me]
    moment, key = 0.0, None
    if network.on() and peer is not None:
        pair = (me, peer) if sends else (peer, me)
        key = f"link/{_guard.cell}/{group.group_name}/{pair}/{tag}/{_count(group, pair, tag)}"
        if sends:
            begin, moment = network.send(nbytes)
            _guard.store.set(key, repr(begin))
    work = start(tensor, peer, group, tag)
    if work is None:
        return None
    flight = Flight(work, what, peers, moment, p2p=True)
    if key and not sends:
        store = _guard.store
        flight.arrives(lambda: network.receive(float(store.get(key)), nbytes))
    return flight


def _count(group: Any, pair: tuple[int, int], tag: int) -> int:
    """Messages between two ranks arrive in the order in which they were sent: the number of this one in the cell."""
    name = (group.group_name, pair, tag)
    _guard.counts[name] += 1
    return _guard.counts[name]


def _batch(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def guarded(p2p_op_list: list[Any]) -> list[Any]:
        groups = [op.group or dist.group.WORLD for op in p2p_op_list]
        if _direct(sys._getframe(1)) or any("gloo" not in dist.get_backend(group) for group in groups):
            return original(p2p_op_list)
        flights = [_fly(op.op, op.tensor, op.peer, group, op.tag) for op, group in zip(p2p_op_list, groups)]
        return [flight for flight in flights if flight is not None]

    return guarded


_COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "gather"),
    *("scatter", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all_single", "all_to_all"),
    *("barrier", "monitored_barrier"),
    *("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list"),
)
_originals: dict[str, Callable[..., Any]] = {}


def _install() -> None:
    """Put the guarded functions in place, once."""
    if _originals:
        return
    names = [name for name in (*_COLLECTIVES, "isend", "irecv", "send", "recv") if hasattr(dist, name)]
    for name in (*names, "batch_isend_irecv", "new_group"):
        _originals[name] = getattr(dist, name)
    guarded: dict[str, Callable[..., Any]] = {}
    for name, original in _originals.items():
        if name in _COLLECTIVES:
            guarded[name] = _collective(original)
        elif name in ("isend", "irecv", "send", "recv"):
            guarded[name] = _message(original, asynchronous=name.startswith("i"))
    guarded["batch_isend_irecv"] = _batch(dist.batch_isend_irecv)
    guarded["new_group"] = _new_group(dist.new_group)

    class P2POp(dist.P2POp):
        """torch's, which insists on its own isend and irecv."""

        def __new__(cls, op: Callable[..., Any], *args: Any, **options: Any) -> P2POp:
            return super().__new__(cls, _unwrap(op), *args, **options)

        def __init__(self, op: Callable[..., Any], *args: Any, **options: Any) -> None:
            super().__init__(_unwrap(op), *args, **options)

    dist.P2POp = P2POp
    for name, function in guarded.items():
        setattr(dist, name, function)


def _unwrap(op: Callable[..., Any]) -> Callable[..., Any]:
    return next((_originals[name] for name in ("isend", "irecv") if op is getattr(dist, name)), op)
