"""An emulated network: real collectives on this machine take as long as on a link of a given speed.

    lab.link("200 MB/s, 50 us")

Loopback has no wires, so on a laptop nothing shows that depends on bandwidth or latency. With a link set, a collective
does not finish before its messages would have arrived: `messages` x latency + bytes sent / bandwidth after it was
issued, or after the link is free: each rank has one link, and what it issues queues there. Data and bytes stay real.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from zerolab.comm.recording import Observer, bytes_sent, observers, passes
from zerolab.lab.ranks.report import Misused

_BANDWIDTH = {"kb/s": 1e3, "mb/s": 1e6, "gb/s": 1e9, "kbit/s": 125.0, "mbit/s": 125e3, "gbit/s": 125e6}
_LATENCY = {"us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


class Link(NamedTuple):
    """A speed: `bandwidth` in bytes per second, `latency` in seconds per message."""

    bandwidth: float
    latency: float
    text: str

    def seconds(self, sent: float, messages: int = 1) -> float:
        return messages * self.latency + sent / self.bandwidth


def parse(text: str) -> Link:
    """`200 MB/s, 50 us`: kB/s, MB/s, GB/s or kbit/s, Mbit/s, Gbit/s, decimal; us, ms or s."""
    number = r"(\d+(?:\.\d+)?)\s*([^\s,]+)"
    match = re.fullmatch(rf"{number}\s*,\s*{number}", text.strip())
    fast, late = (match[2].lower(), match[4].lower()) if match else ("", "")
    if not match or fast not in _BANDWIDTH or late not in _LATENCY or float(match[1]) == 0:
        raise Misused(f'{text!r} is not a link: write a bandwidth and a latency, such as "200 MB/s, 50 us"')
    return Link(float(match[1]) * _BANDWIDTH[fast], float(match[3]) * _LATENCY[late], text)


# -- on a rank ---------------------------------------------------------------------------------------------------------

_link: Link | None = None
_free = {"out": 0.0, "in": 0.0}  # when each direction of this rank's link is free, on the clock of time.perf_counter


class _Delay(Observer):
    """Makes collectives as slow as if they ran as rings over the link."""

    def before(self, op: str, payload: int, size: int) -> float:
        return collective(bytes_sent(op, payload, size), passes(op) * (size - 1))


delay = _Delay()


def use(text: str | None) -> None:
    """On a rank: from now on, delay the engine's collectives and (guard.py) torch.distributed's."""
    global _link
    _link = parse(text) if text else None
    _free.update({"out": 0.0, "in": 0.0})
    if delay in observers:
        observers.remove(delay)
    if _link:
        observers.append(delay)


@contextmanager
def linked(text: str | None) -> Iterator[None]:
    """On a rank, for the length of a block: what `lab.link` does in the notebook. All ranks must name the same link."""
    before = current()
    use(text)
    try:
        yield
    finally:
        use(before)


def on() -> bool:
    return _link is not None


def current() -> str | None:
    """On a rank: the emulated link, as it was asked for."""
    return _link.text if _link else None


def collective(sent: int, messages: int) -> float:
    """Issue a collective: when it may be complete, by time.perf_counter."""
    if _link is None:
        return 0.0
    begin = max(time.perf_counter(), *_free.values())
    end = begin + _link.seconds(sent, messages)
    _free.update({"out": end, "in": end})
    return end


def send(sent: int) -> tuple[float, float]:
    """Issue a message: when it is sent, and when it has left."""
    if _link is None:
        return 0.0, 0.0
    begin = max(time.perf_counter(), _free["out"])
    _free["out"] = begin + _link.seconds(sent)
    return begin, _free["out"]


def receive(begin: float, sent: int) -> float:
    """When a message that was sent at `begin` has arrived; messages that come at the same time queue."""
    if _link is None:
        return 0.0
    _free["in"] = max(begin, _free["in"]) + _link.seconds(sent)
    return _free["in"]


def sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
