"""What a cell on all ranks shows: its output in rank order, equal output only once, and which rank failed first."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

# An output: ("stdout" | "stderr", text) or ("display", (data, metadata)), data by MIME type.
Output = tuple[str, Any]

# What a rank raises because another one failed: the engine's CommError, and what gloo says.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset|refused)|Timed out|timed out|Broken pipe|Application timeout|Another rank stopped"
)
# After these, the ranks may be at different collectives. After a CollectiveError they are not: nothing was sent.
_OUT_OF_STEP = re.compile(r"LostRank|CommError|Dist\w*Error")
_SOURCE = re.compile(r"\[/\S*/gloo/\S+\] | \(\d+\.py, line \d+\)$")  # a place in gloo's source or in a cell's file
_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Failure:
    """How a cell failed on a rank. kind: "raised", "died", or "interrupted". time: seconds since the epoch."""

    kind: str
    message: str
    trace: str = ""  # the frames, outermost first
    time: float = 0.0
    consequence: bool = False  # it probably failed because another rank did

    @property
    def summary(self) -> str:
        return self.message.partition("\n")[0]


@dataclass
class Result:
    """What one rank did with a cell."""

    rank: int
    outputs: list[Output] = field(default_factory=list)
    failure: Failure | None = None
    seconds: float | None = None  # how long it took; None until it is done

    @property
    def text(self) -> str:
        """Everything that it printed, and the plain text of what it displayed."""
        return "".join(
            data if kind in ("stdout", "stderr") else data[0].get("text/plain", "") + "\n"
            for kind, data in self.outputs
        )

    def write(self, kind: str, text: str) -> None:
        if self.outputs and self.outputs[-1][0] == kind:
            text = self.outputs.pop()[1] + text
        self.outputs.append((kind, _returned(text)))


class Plain(Exception):
    """An error that a notebook shows as one sentence. Its traceback would hold only our own frames."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class Misused(Plain, ValueError):
    """What was asked for cannot be done."""


class RankFailure(RuntimeError):
    """A cell failed. `rank` is the rank that failed first; `results` holds every rank's result."""

    def __init__(self, message: str, rank: int | None, results: dict[int, Result]) -> None:
        super().__init__(message)
        self.rank, self.results = rank, results

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows in place of a traceback, which would hold only our own frames."""
        return [f"RankFailure: {self}"]


def raised(content: dict[str, Any], now: float) -> Failure:
    """The failure in a kernel's error message. The first line of its traceback is what rank.py adds, as JSON."""
    name, value, lines = content.get("ename", ""), content.get("evalue", ""), list(content.get("traceback", []))
    about: dict[str, Any] = {}
    if lines and lines[0].startswith('{"consequence"'):
        about = json.loads(lines.pop(0))
    consequence = about.get("consequence", False) or bool(_CONSEQUENCE.search(value))
    kind = "interrupted" if name == "KeyboardInterrupt" else "raised"
    if name == "SystemExit" or (kind == "interrupted" and not about):
        lines = []  # these are IPython's own: advice, or where in IPython the interrupt arrived
    value = _SOURCE.sub("", value)
    if "is not registered, please create group" in value:
        value = "this belongs to a process group that is gone: rebuild what was sharded before lab.reset()"
    message = f"{name}: {value}" if value else name
    return Failure(kind, message, _ANSI.sub("", "\n".join(lines)), about.get("time", now), consequence)


def failure(results: dict[int, Result], size: int, hint: str) -> RankFailure | None:
    """The error to raise, if any: what went wrong on which rank, beginning with the rank that failed first."""
    failed = {rank: result.failure for rank, result in results.items() if result.failure}
    if not failed:
        return None
    # A death comes before the errors that it caused, even though this process notices it last.
    order = {"died": 0, "raised": 1, "interrupted": 2}
    first = min(failed, key=lambda r: (failed[r].consequence, order[failed[r].kind], failed[r].time, r))
    same = [rank for rank in failed if _key(failed[rank]) == _key(failed[first])]
    lines = [f"{who(same, size)} {_did(failed[first], len(same) > 1)}"]
    places: dict[str, list[int]] = {}
    for rank in sorted(same, key=lambda rank: (rank != first, rank)):
        places.setdefault(failed[rank].trace, []).append(rank)
    for trace, ranks in places.items():
        if trace:
            lines += [f"{who(ranks, size)}:"] * (len(places) > 1) + [trace]
    rest: dict[str, list[int]] = {}
    for rank in sorted(results.keys() - set(same)):
        other = results[rank].failure
        rest.setdefault(_shorten(_did(other, False, short=True)) if other else "finished the cell", []).append(rank)
    lines += [f"{who(ranks, size)}: {what}" for what, ranks in rest.items()]
    return RankFailure("\n".join([*lines, hint] if hint else lines), first, results)


def out_of_step(results: dict[int, Result]) -> bool:
    """Whether the ranks may now be at different collectives. A learner's mistake that no other rank met is harmless."""
    failures = [result.failure for result in results.values() if result.failure]
    return any(
        failure.kind != "raised"
        or _OUT_OF_STEP.match(failure.message) is not None
        or (failure.consequence and not failure.message.startswith("CollectiveError"))
        for failure in failures
    )


def _key(failure: Failure) -> tuple[str, str]:
    """Failures with equal keys count as the same. Memory addresses are ignored."""
    return failure.kind, re.sub(r"\b0x[0-9a-f]+", "0x...", failure.message)


def _did(failure: Failure, many: bool, short: bool = False) -> str:
    """What one rank or many did. `short`: in one line, with the innermost line of the learner's code."""
    if failure.kind == "raised":
        return f"raised {failure.summary if short else failure.message}"
    if failure.kind == "interrupted":
        return f"{'were' if many else 'was'} interrupted" + (_place(failure.trace) if short else "")
    return re.sub("^was", "were", failure.message) if many else failure.message


def _place(trace: str) -> str:
    """The innermost line of the cell in a trace, or else the innermost line."""
    lines = [line.strip() for line in trace.splitlines()]
    frames = list(zip(lines[::2], lines[1::2]))
    chosen = [frame for frame in frames if " of the cell" in frame[0]] or frames
    return f" at {': '.join(chosen[-1])}" if chosen else ""


def _shorten(text: str, most: int = 200) -> str:
    text = " ".join(text.split())
    return text if len(text) <= most else text[: most - 4] + " ..."


def who(ranks: Iterable[int], size: int) -> str:
    """`rank 2`, `ranks 0, 2`, or `all 4 ranks`."""
    ranks = sorted(ranks)
    if len(ranks) == size > 1:
        return f"all {size} ranks"
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


# -- output ------------------------------------------------------------------------------------------------------------


def _returned(text: str) -> str:
    """The text as a terminal would leave it: after a carriage return, a line is overwritten."""
    if "\r" not in text:
        return text
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        ended = line.endswith("\r")  # a progress bar may overwrite this line later: keep the mark
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown + "\r" * ended)
    return "\n".join(lines)


def show(results: dict[int, Result], size: int) -> None:
    """Print and display what the ranks did, in rank order. Ranks with the same output share one entry."""
    groups: list[tuple[list[int], Result]] = []
    for rank in sorted(results):
        for ranks, result in groups:
            if result.outputs == results[rank].outputs:
                ranks.append(rank)
                break
        else:
            groups.append(([rank], results[rank]))
    for ranks, result in groups:
        if result.outputs:
            _show(who(ranks, size), result.outputs)
    sys.stdout.flush()


def _show(header: str, outputs: list[Output]) -> None:
    from IPython.display import display

    for kind, data in outputs:
        stream = sys.stderr if kind == "stderr" else sys.stdout
        if kind == "display":
            bundle, metadata = data
            if set(bundle) == {"text/plain"}:
                kind, data = "stdout", bundle["text/plain"] + "\n"
            else:
                if header:
                    print(f"{header}:", flush=True)
                display(bundle, metadata=metadata, raw=True)
        if kind != "display":
            stream.write(_with_header(header, data.replace("\r", "")))
            stream.flush()
        header = ""


def _with_header(header: str, text: str) -> str:
    """`rank 0: one line`, or the header on a line of its own above several."""
    text = text if text.endswith("\n") else text + "\n"
    if not header:
        return text
    return f"{header}: {text}" if text.count("\n") == 1 else f"{header}:\n{text}"
