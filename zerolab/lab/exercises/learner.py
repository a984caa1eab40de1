"""The learner's side of the exercises: where answers live, whether they are right, and whose code runs.

    %%exercise 03.2         write the cell to my/ex_03_2.py and load it, here and on every live rank
    check("03.2")           run the check on ranks of its own; a pass counts until the answer changes
    hint("03.2")            one more hint
    mine("03.2")            the learner's answer once it has passed, until then the course's
    mine(DDP)               the package's class with the learner's passed methods over it
    predict("02.1", 4e6)    then reveal("02.1") shows what was measured, and how far off that was
    progress()              what is done

Answers, passes and predictions are kept in the folder `my` beside the notebook, or where ZEROLAB_MY says.
"""

from __future__ import annotations

import functools
import sys
import traceback
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.lab.exercises import judge
from zerolab.lab.exercises.catalogue import EXERCISES, find_exercise
from zerolab.lab.exercises.exercise import Exercise, Todo
from zerolab.lab.exercises.store import file_of, read_progress, write, write_progress
from zerolab.lab.ranks.rank import _syntax
from zerolab.lab.ranks.report import Misused, Plain

_loaded: dict[str, tuple[str, ModuleType]] = {}  # id -> digest of the source and the module made of it, the newest
_told: dict[str, tuple[str, bool]] | None = None  # on a live rank: id -> (source, passed), as the notebook decided
_classes: dict[tuple, type] = {}  # what `mine` made of classes, so that it is the same one as long as nothing changes
_last: str | None = None  # the exercise that was written or checked last


class NotPython(Misused):
    """An answer does not compile: its line, and a mark under the place."""

    def __init__(self, id: str, error: SyntaxError) -> None:
        place = _syntax(error, 1) if error.text else ""  # the cell begins with a line of its own, %%exercise
        super().__init__(f"{id} is not Python yet: {type(error).__name__}: {error.msg}\n{place}".rstrip())


class Broken(Misused):
    """The cell of an answer fails when it is run: its own lines, and what was raised."""

    def __init__(self, id: str, error: Exception) -> None:
        file = str(file_of(id).absolute())
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        places = [f"\n  line {(frame.lineno or 0) + 1} of the cell\n    {frame.line}" for frame in own]
        super().__init__(f"{id} cannot be used yet: {type(error).__name__}: {error}{''.join(places)}")


class Stale(RuntimeError):
    """An object of an earlier version of an answer was used."""


def _decision(id: str) -> tuple[str, bool]:
    """The source of the answer ("" if none) and whether it has passed. On a live rank: as the notebook said."""
    if _told is not None:
        return _told.get(id, ("", False))
    file = file_of(id)
    source = file.read_text() if file.exists() else ""
    return source, bool(source) and read_progress()["passed"].get(id) == judge.digest(source)


def passed(id: str) -> bool:
    """Whether the answer to exercise `id`, as it is now, has passed its check."""
    return _decision(find_exercise(id).id)[1]


# ---------------------------------------------------------------------- %%exercise


def define(id: str, source: str) -> ModuleType:
    """What `%%exercise` does with a cell: write it down, load it, and let the live ranks load it too.

    A stub never replaces an answer that is there already.
    """
    global _last
    asked, file = find_exercise(id), file_of(id)
    is_stub = judge.digest(source) == judge.digest(asked.stub)
    if is_stub and file.exists() and judge.digest(file.read_text()) != judge.digest(source):
        source = file.read_text()
        print(
            f"{id} {asked.title}: the cell is empty, so your answer in {_short(file)} is used (delete it to start anew)"
        )
    else:
        write(file, source)
        state = "not written yet" if is_stub else f'written to {_short(file)}; lab.check("{id}") tries it'
        print(f"{id} {asked.title}: {state}")
    _last = id
    module = _load(asked, source)
    _tell_ranks()
    return module


def _short(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def _load(asked: Exercise, source: str) -> ModuleType:
    """The module made of `source`, made only once, with its names in the notebook's or the rank's namespace."""
    if asked.id in _loaded and _loaded[asked.id][0] == judge.digest(source):
        return _loaded[asked.id][1]
    module = judge.load(source, str(file_of(asked.id).absolute()), f"ex_{asked.id.replace('.', '_')}")
    if asked.id in _loaded:
        _retire(_loaded[asked.id][1], asked.id)
    _loaded[asked.id] = (judge.digest(source), module)
    names = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    }
    if (shell := _shell()) is not None:
        shell.user_ns.update(names)
    return module


def _retire(module: ModuleType, id: str) -> None:
    """Objects of the classes of an older version say that they are old, instead of running yesterday's code."""

    def refuse(name: str) -> FunctionType:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise Stale(
                f"{name} of an earlier version of {id} was called: rebuild the model (run the cell that makes it)"
            )

        return method

    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__:
            for name, attribute in list(vars(value).items()):
                if isinstance(attribute, FunctionType) and name not in ("__del__", "__repr__"):
                    setattr(value, name, refuse(f"{value.__name__}.{name}()"))


def _shell() -> Any:
    """The IPython that this runs in, or None."""
    if "IPython" not in sys.modules:
        return None
    return sys.modules["IPython"].get_ipython()


def _tell_ranks() -> None:
    """The notebook decides whose code runs, and tells every live rank, so that they never differ."""
    session = sys.modules.get("zerolab.lab.ranks.session")
    current = session.current() if session is not None else None
    if current is None:
        return
    decisions = {id: _decision(id) for id in EXERCISES if file_of(id).exists()}
    code = f"from zerolab.lab.exercises import learner as _e; _e.hear({decisions!r}, {list(_loaded)!r}); del _e"
    try:
        current.run(code)
    except Exception as error:
        print(f"the live ranks do not have it: {str(error).splitlines()[0]}")


def hear(decisions: dict[str, tuple[str, bool]], load: list[str]) -> None:
    """On a live rank: what the notebook decided, and which answers it has loaded."""
    global _told
    _told = decisions
    for id in load:
        if id in decisions:
            _load(find_exercise(id), decisions[id][0])


# ---------------------------------------------------------------------- check, hint, progress


def check(id: str | None = None) -> None:
    """Try the answer to exercise `id` (default: the last one) and print what came of it."""
    global _last
    _last = asked = find_exercise(_which(id)).id
    file = file_of(asked)
    if not file.exists():
        title = find_exercise(asked).title
        print(f"○ {asked} {title}    not done yet: run the cell that begins with %%exercise {asked}")
        return
    source = file.read_text()
    if judge.digest(source) == judge.digest(find_exercise(asked).stub):  # no need to start ranks for it
        print(f"○ {asked} {find_exercise(asked).title}    not done yet")
        return
    verdict = judge.try_answer(asked, source, str(file.absolute()))
    progress = read_progress()
    progress["passed"].pop(asked, None)
    if verdict.passed:
        progress["passed"][asked] = judge.digest(source)
    write_progress(progress)
    _tell_ranks()
    print(verdict.text)


def _which(id: str | None) -> str:
    if id is None and _last is None:
        raise Misused(f'which exercise? There are {", ".join(EXERCISES)}: lab.check("01.1"), lab.hint("01.1")')
    return id or _last or ""


def hint(id: str | None = None) -> None:
    """Print one hint more for exercise `id` (default: the last one)."""
    asked = find_exercise(_which(id))
    progress = read_progress()
    number = min(progress["hints"].get(asked.id, 0) + 1, len(asked.hints))
    progress["hints"][asked.id] = number
    write_progress(progress)
    for i, text in enumerate(asked.hints[:number], 1):
        print(f"{asked.id}, hint {i} of {len(asked.hints)}: {text}")


def progress() -> None:
    """Print what is done in the course."""
    kept, done = read_progress(), 0
    for id, asked in EXERCISES.items():
        source, right = _decision(id)
        state = "not written yet"
        if right:
            state, done = "done", done + 1
        elif source and judge.digest(source) != judge.digest(asked.stub):
            state = "changed since it passed" if id in kept["passed"] else "written, not passed"
        print(f"{'✓' if right else '○'} {id} {asked.title:<28} {state}")
    print(f"{done} of {len(EXERCISES)} exercises, {len(kept['predictions'])} predictions")


# ---------------------------------------------------------------------- whose code runs


def mine(what: str | type, name: str = "") -> Any:
    """The learner's code where it has passed its check, else the course's; one line says whose it is.

    `mine("03.2")` is what that exercise defines, a function or a class. Where it defines several, `name` says which;
    without it this is the first, and the line names the others. `mine(DDP)` is a class of the package with the
    learner's passed methods over it.
    """
    if not isinstance(what, (str, type)):
        raise Misused(f'lab.mine("03.2") is an answer, lab.mine(DDP) a class with your methods; {what!r} is neither')
    return _mine_of_exercise(find_exercise(what), name) if isinstance(what, str) else _mine_of_class(what)


def _answer(asked: Exercise) -> tuple[ModuleType | None, str]:
    """The learner's module if it has passed, else None and why not."""
    source, right = _decision(asked.id)
    if right:
        return _load(asked, source), ""
    written = source and judge.digest(source) != judge.digest(asked.stub)
    if not written:
        return None, f"{asked.id} is not written yet"
    return None, f'{asked.id} has not passed as it is now: lab.check("{asked.id}")'


def _mine_of_exercise(asked: Exercise, name: str) -> Any:
    module, why_not = _answer(asked)
    others = "".join(f'; {other} is lab.mine("{asked.id}", "{other}")' for other in asked.exports[1:]) * (not name)
    name = name or asked.exports[0]
    if name not in asked.exports:
        raise Misused(f"exercise {asked.id} defines {', '.join(asked.exports)}, and no {name!r}")
    print(f"{name}: " + (f"your code ({asked.id})" if module else f"the course's code, {why_not}") + others)
    return getattr(module or _reference(asked.id), name)


@functools.cache
def _reference(id: str) -> ModuleType:
    return judge.load(find_exercise(id).reference, f"the course's answer to {id}", f"reference_{id.replace('.', '_')}")


def _mine_of_class(base: type) -> type:
    parts = [asked for asked in EXERCISES.values() if asked.extends == base.__name__]
    if not parts:
        known = ", ".join(sorted({asked.extends for asked in EXERCISES.values() if asked.extends}))
        raise Misused(f"no exercise extends {base.__name__}; there are exercises for {known}")
    answers = [(asked, *_answer(asked)) for asked in parts]
    ours = [getattr(module, asked.exports[0]) for asked, module, _ in answers if module is not None]
    said = [f"your code ({asked.id})" if module else why_not for asked, module, why_not in answers]
    print(f"{base.__name__}: {', '.join(said)}; the rest is the package's")
    key = (base, *ours)
    if ours and key not in _classes:
        _classes[key] = type(base.__name__, (*ours, base), {"stage": base.stage, "__doc__": base.__doc__})
    return _classes.get(key, base)


# ---------------------------------------------------------------------- for the answers


def exchange(tensor: Tensor, to: int, source: int) -> Tensor:
    """Send `tensor` to rank `to` and return what rank `source` sends here: both at once, so that neither blocks."""
    if to == source == dist.get_rank():
        return tensor.clone()
    out = torch.empty_like(tensor, memory_format=torch.contiguous_format)
    send = dist.P2POp(dist.isend, tensor.detach().contiguous(), to)
    for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, out, source)]):
        work.wait()
    return out


# ---------------------------------------------------------------------- IPython


def _exercise_magic(line: str, cell: str) -> None:
    """`%%exercise 03.2`: the rest of the cell is the answer to exercise 03.2."""
    if not line.strip():
        raise Misused(f"which exercise? %%exercise and one of {', '.join(EXERCISES)}")
    try:
        define(line.strip(), cell)
    except SyntaxError as error:
        raise NotPython(line.strip(), error) from None
    except Exception as error:
        if isinstance(error, Plain):
            raise
        raise Broken(line.strip(), error) from error


def register(shell: Any) -> None:
    """`%load_ext zerolab.lab` calls this."""
    shell.register_magic_function(_exercise_magic, "cell", "exercise")


__all__ = ["Stale", "Todo", "check", "define", "exchange", "hint", "mine", "passed", "progress"]
