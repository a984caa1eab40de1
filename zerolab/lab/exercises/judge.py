"""Runs a check on its own pool of ranks, for each world size in turn, and reports the verdict."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import io
import re
import signal
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import FrameType

import torch
import torch.distributed as dist

from zerolab.comm.waiting import CommError
from zerolab.lab.exercises.battery import OthersDiffer, load, play_battery
from zerolab.lab.exercises.catalogue import find_exercise
from zerolab.lab.exercises.exercise import Exercise, Todo, World, Wrong
from zerolab.lab.exercises.mistakes import Mistake, nearest
from zerolab.lab.exercises.observing import WORLD_SIZES
from zerolab.lab.exercises.spy import GLOO, PATIENCE, GaveUp, Spy
from zerolab.world.processes import RankError, Ranks

APART = 3  # with so many ranks the left neighbour is not the right one: a wrong answer is looked at there too
ORDER = ("late", "raised", "wrong", "waits", "todo", "right")  # of reports, the worst first
UNKNOWN = "a mistake that this check does not know; this is the smallest case that fails"
RAISED = "an error in the code, at the line shown"
CALLED = "the `def` line was changed, and the function can no longer be called: its arguments must stay as they were"
RAISED_LATER = "no line of yours failed, but what it left behind: compare the types with those in the docstring"
LEFT_BEHIND = {  # part of an error that no line of the answer raises -> the mistake behind it
    "incorrect number of gradients": "backward returns a value for each argument of forward: its gradient, or None",
    "expected Variable or None": "backward returns a tensor or None for each argument of forward",
    "has no attribute '_parameters'": "a Module's __init__ begins with super().__init__()",
    "NoneType": "a function returns nothing: `return` is missing, or was not reached",
}
DIED = (
    "the process itself died: look for exit(), endless recursion, or a view of memory that was given back, as after "
    "resize_(0)"
)
ENDLESS = "a loop that does not end"
NO_NAME = re.compile(r"\b(NameError|UnboundLocalError): ")
DIFFERENT = "the ranks make different calls, or the same calls in different orders"
NO_FIT = " of the group sends "  # the spy's words for what one rank sends and another does not expect
WALL = 60.0  # seconds for one number of ranks, for loops that sleep: the others are known by how much they compute
PRINTED = 2000  # characters of the answer's own output that are shown

_pool: Ranks | None = None


@dataclass
class Report:
    """The result on one rank. `kind`: right, todo, raised, wrong, waits."""

    rank: int
    kind: str
    seen: str = ""
    likely: str = ""
    tip: str = ""
    printed: str = ""
    marks: list[str] = field(default_factory=list)  # by which a known mistake is recognised
    about: str = ""  # what to look at if it is none
    blocks: int = 0  # how far the check got on this rank
    notes: list[str] = field(default_factory=list)  # what a right answer should know


@dataclass
class Verdict:
    """The verdict on an answer: `kind` as in Report, or late; `text` is what the learner reads."""

    id: str
    kind: str
    text: str
    seen: str = ""
    likely: str = ""
    reports: list[Report] = field(default_factory=list)
    marks: set[str] = field(default_factory=set)  # by which a known mistake is recognised

    @property
    def passed(self) -> bool:
        return self.kind == "right"


def digest(source: str) -> str:
    return hashlib.sha256(source.strip().encode()).hexdigest()[:16]


# ---------------------------------------------------------------------- on a rank


class Endless(BaseException):
    """The answer has computed for so long that it will not end. Not an Exception, so that no answer catches it."""


@contextlib.contextmanager
def _computing_at_most(seconds: float) -> Iterator[None]:
    """Raises Endless at the line that runs when this process has computed for `seconds`.

    What it computed, not how long it took: a machine that is busy with something else makes no answer wrong.
    """

    def stop(signum: int, frame: FrameType | None) -> None:
        raise Endless(f"had not finished after computing for {seconds:.0f} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds, 1.0)  # and again, if something swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, before)


def on_rank(id: str, source: str, filename: str, patience: float, computes: float) -> Report:
    """This rank's report on `source`, an answer to exercise `id`, which `computes` for so many seconds at most."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    torch.manual_seed(0)  # the same on every rank and in every check
    asked, printed = find_exercise(id), io.StringIO()
    try:
        with (
            Spy(store, rank, world_size, patience) as spy,
            contextlib.redirect_stdout(printed),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            world = World(rank, world_size, spy)
            report = _judge(asked, source, filename, world, computes)
        report.blocks, report.notes = spy.blocks, world.notes
        report.printed = printed.getvalue()[:PRINTED]
        return report
    finally:
        store.set(f"over/{rank}", "1")


def _judge(asked: Exercise, source: str, filename: str, world: World, computes: float) -> Report:
    try:
        with _computing_at_most(computes):
            answer = load(source, filename, f"ex_{asked.id.replace('.', '_')}")
            missing = [name for name in asked.exports if not hasattr(answer, name)]
            if missing:
                raise Wrong(f"the cell does not define {missing[0]}", f"the name was changed: it must be {missing[0]}")
            play_battery(asked, answer, world)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit too
        report = _report(error, filename, world.rank)
        report.marks, report.about = getattr(error, "marks", []), getattr(error, "about", "")
        if scene := getattr(error, "scene", ""):
            report.seen = f"{scene}: {report.seen}"
        return report
    return Report(world.rank, "right")


def _report(error: BaseException, filename: str, rank: int) -> Report:
    if isinstance(error, Todo):
        return Report(rank, "todo")
    if isinstance(error, OthersDiffer):
        return Report(rank, "right")
    if isinstance(error, Wrong):
        return Report(rank, "wrong", error.seen, error.likely, error.tip)
    if isinstance(error, Endless):
        return Report(rank, "late", f"{error}{_line_of(error, filename)}", ENDLESS)
    likely = getattr(error, "likely", "")  # exercise.returns_none()
    if isinstance(error, (GaveUp, CommError)):  # another rank's mistake, seen from here
        first = str(error).splitlines()[0].removeprefix(f"rank {rank}, ")
        engines = re.sub(rf"^rank {rank} of \d+: ", "", first)
        seen = engines if engines != first else f"stuck in {first}"
        return Report(rank, "waits", f"{seen}{_line_of(error, filename)}", likely)
    if _is_todo(error):
        return Report(rank, "todo")
    what = traceback.format_exception_only(type(error), error)[-1].strip().splitlines()[0]
    return Report(rank, "raised", f"{what}{_line_of(error, filename)}", likely)


def _is_todo(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, Todo):
            return True
        error = error.__cause__ or error.__context__
    return False


def _line_of(error: BaseException, filename: str) -> str:
    """Where in the answer it happened: " · line 7: work.wait()"."""
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == filename]
    if isinstance(error, SyntaxError) and error.filename == filename:
        return f", line {error.lineno}"
    if lines:
        return f" · line {lines[-1].lineno}: {lines[-1].line}"
    inside = [frame for frame in traceback.extract_tb(error.__traceback__) if "/zerolab/engine/" in frame.filename]
    return f", later in the engine, in {inside[-1].name}()" if inside else ""


# ---------------------------------------------------------------------- here


def ready() -> None:
    """Runs on a new pool, so that the ranks' imports are done before an answer is timed."""
    import torch._dynamo  # noqa: F401, which the engine's hooks ask for

    dist.barrier()


def pool() -> Ranks:
    """The checks' pool of ranks, kept from one check to the next."""
    global _pool
    if _pool is None:
        _pool = Ranks(max(WORLD_SIZES), threads=1, forked=True)
        atexit.register(close)
    if not _pool._processes or not all(process.is_alive() for process, _ in _pool._processes):
        _pool.run(ready, timeout=120.0)
    return _pool


def close() -> None:
    """End the pool's processes. The next check starts new ones."""
    global _pool
    if _pool is not None:
        _pool.close()
        _pool = None


def try_answer(
    id: str,
    source: str,
    filename: str = "answer.py",
    patience: float = PATIENCE,
    tell: Callable[[str], None] = lambda line: None,
    told: bool = True,
    sizes: Sequence[int] = (),
) -> Verdict:
    """The verdict on `source` as the answer to exercise `id`.

    A rank gives up at once when no rank will come on, or when all others have stood still for `patience` seconds. On
    gloo's clock nothing depends: it runs on while a machine sleeps.
    tell: is told how far the check has come. told: whether known mistakes are looked for. sizes: the numbers of ranks,
    all those of the exercise if there is none.
    """
    asked = find_exercise(id)
    good: list[int] = []  # the world sizes that passed
    notes: list[str] = []
    sizes = sizes or asked.sizes
    for world_size in sizes:
        tell(f"○ {id} {asked.title}    checking with {world_size} of {max(sizes)} ranks ...")
        reports = _reports(asked, source, filename, patience, world_size)
        kinds = {report.kind for report in reports}
        if kinds != {"right"}:
            marks = _marks(reports)
            if world_size < APART in asked.sizes and not kinds & {"late", "todo"}:
                marks |= _marks(_reports(asked, source, filename, patience, APART))
            verdict = _verdict(asked, good, world_size, reports, nearest(id, marks) if told else None)
            verdict.marks = marks
            return verdict
        good.append(world_size)
        notes += [note for report in reports for note in report.notes]
    lines = [f"✓ {id} {asked.title}    N={', '.join(map(str, good))} ok"]
    lines += [f"  note     {note}" for note in dict.fromkeys(notes)]
    return Verdict(id, "right", "\n".join(lines))


def _reports(asked: Exercise, source: str, filename: str, patience: float, world_size: int) -> list[Report]:
    """Each rank's, or that of the one which died or did not end."""
    try:
        return pool().run(
            on_rank,
            *(asked.id, source, filename, patience, 4 * patience),
            ranks=world_size,
            timeout=WALL,
            group_timeout=GLOO.total_seconds(),
        )
    except RankError as error:
        lines = [line for line in error.traceback.splitlines() if filename in line]
        where = f" · {lines[0].strip()}" if lines else ""
        first = str(error).splitlines()[0].removeprefix("time is up: ").split(", in zerolab")[0]
        first = first.removeprefix(f"rank {error.rank} of {world_size} ")
        known = [mistake for part, mistake in asked.errors.items() if part in first]
        likely = known[0] if known else DIED
        if "time is up" in str(error):
            likely = DIFFERENT if "/exercises/spy.py" in error.traceback else ENDLESS
        return [Report(error.rank, "late", f"{first}{where}", likely, marks=[re.sub(r"\W+", "_", first)])]


def _marks(reports: list[Report]) -> set[str]:
    """Of all ranks, and how the reports end; where one waits, how far the others came is a matter of time."""
    kinds = {report.kind for report in reports}
    if "waits" in kinds:
        kinds = {min(kinds, key=ORDER.index)}
    return {f"{kind}/{len(reports)}" for kind in kinds}.union(*(report.marks for report in reports))


def _verdict(
    asked: Exercise, good: list[int], world_size: int, reports: list[Report], mistake: Mistake | None
) -> Verdict:
    worst = min(reports, key=lambda report: (ORDER.index(report.kind), report.rank))
    waiting = [report for report in reports if report.kind == "waits"]
    if worst.kind == "wrong" and waiting and waiting[0].blocks <= worst.blocks:
        worst = waiting[0]  # that rank got no further than the wrong one, so the wrong value is not what stopped it
    if worst.kind == "todo":
        return Verdict(asked.id, "todo", f"○ {asked.id} {asked.title}    not done yet", reports=reports)
    likely, where = worst.likely, f"rank {worst.rank}"
    # A rank that waits further on was right up to where this one stopped.
    rights = [r.rank for r in reports if r.kind == "right" or (r.kind == "waits" and r.blocks > worst.blocks)]
    known = [mistake for part, mistake in asked.errors.items() if part in worst.seen]
    if worst.kind == "waits":
        likely = likely or (known[0] if known else _why_it_waits(reports))
    if worst.kind == "raised":
        at_a_line = " · line " in worst.seen or ", line " in worst.seen
        signature = "positional argument" in worst.seen or "keyword argument" in worst.seen
        left = [mistake for part, mistake in LEFT_BEHIND.items() if part in worst.seen]
        otherwise = CALLED if signature and "later in the engine" not in worst.seen else (left or [RAISED_LATER])[0]
        about = "" if at_a_line and NO_NAME.search(worst.seen) else worst.about  # which case it is does not matter
        here = DIFFERENT if NO_FIT in worst.seen else RAISED
        likely = likely or (known[0] if known else about or (here if at_a_line else otherwise))
    likely = mistake.says if mistake else likely or worst.about or UNKNOWN
    lines = [
        f"✗ {asked.id} {asked.title}    " + " · ".join([*(f"N={n} ok" for n in good), f"N={world_size} wrong"]),
        f"  seen     {where}, {worst.seen}" + (f" ({_list(rights)} right)" if rights else ""),
        f"  likely   {likely}",
        f"  try      lab.hint() · {worst.tip or chr(34) + asked.section + chr(34)}",
    ]
    lines += [f"  printed  {line}" for line in worst.printed.splitlines()[:10]]
    return Verdict(asked.id, worst.kind, "\n".join(lines), worst.seen, likely, reports)


def _why_it_waits(reports: list[Report]) -> str:
    if any(" out of step" in report.seen for report in reports):
        return "every rank must make as many optimizer.step() calls: each updates its own copy, or its own shard"
    others = [report for report in reports if report.kind != "waits"]
    if others and not any(" instead" in report.seen for report in reports):
        return f"not every rank makes the same calls: {_list([r.rank for r in others])} done while others wait"
    if any("exchange(" in report.seen for report in reports):
        return "the neighbours are mixed up: if rank r sends to rank s, then rank s must receive from r"
    return DIFFERENT


def _list(ranks: list[int]) -> str:
    return f"{_names(ranks)} {'is' if len(ranks) == 1 else 'are'}"


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
