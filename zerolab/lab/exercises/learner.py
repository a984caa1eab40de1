"""The learner's side of the exercises: writing an answer, checking it, and whose code runs.

%%exercise 03.2         write the cell to my/ex_03_2.py and load it, here and on every live rank
check("03.2")           run the check on ranks of its own; a pass counts until the answer changes
hint("03.2")            show one more hint
mine("03.2")            the learner's answer once it has passed, until then the course's
mine(DDP)               the learner's class; as long as a part has not passed, over the package's
progress()              what is done
"""

from __future__ import annotations

import ast
import functools
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerolab.engine.engine import Engine
from zerolab.lab.exercises import judge
from zerolab.lab.exercises.cards import Status, say, shell_here
from zerolab.lab.exercises.catalogue import EXERCISES, LESSONS, find_exercise
from zerolab.lab.exercises.exercise import Exercise, Todo
from zerolab.lab.exercises.questions import QUESTIONS
from zerolab.lab.exercises.store import file_of, read_progress, write, write_progress
from zerolab.lab.ranks.rank import _syntax
from zerolab.lab.ranks.report import Misused, Plain

_loaded: dict[str, tuple[str, ModuleType]] = {}  # id -> the newest module and the digest of its source
_told: dict[str, tuple[str, bool]] | None = None  # on a live rank: id -> (source, passed), as the notebook decided
_classes: dict[tuple, type] = {}  # what `mine` made, so that it returns the same class until an answer changes
_last: str | None = None  # the exercise that was written or checked last


class NotPython(Misused):
    """An answer that does not compile. Shows the line, with a mark under the place."""

    def __init__(self, id: str, error: SyntaxError) -> None:
        place = _syntax(error) if error.text else ""
        super().__init__(f"{id} is not Python yet: {type(error).__name__}: {error.msg}\n{place}".rstrip())


class Broken(Misused):
    """An answer's cell that raises when it runs. Shows its own lines and the error."""

    def __init__(self, id: str, error: Exception) -> None:
        file = str(file_of(id).absolute())
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        places = [f"\n  line {frame.lineno} of the cell\n    {frame.line}" for frame in own]
        super().__init__(f"{id} cannot be used yet: {type(error).__name__}: {error}{''.join(places)}")


class Stale(RuntimeError):
    """An object of an earlier version of an answer was used."""


def _decision(id: str) -> tuple[str, bool]:
    """The source of the answer ("" if there is none), and whether it has passed. Live ranks go by the notebook."""
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
    """What `%%exercise` does with a cell: save it, load it, and have the live ranks load it too.

    A stub never replaces an answer that is already there.
    """
    global _last
    asked, file = find_exercise(id), file_of(id)
    is_stub = _is_stub(asked, source)
    if is_stub and file.exists() and judge.digest(file.read_text()) != judge.digest(source):
        source = file.read_text()
        print(f"{id} {asked.title}: the cell has no code yet, so your answer in {_short(file)} is used", end=" ")
        print("(delete it to start over)")
    else:
        write(file, source)
        state = "not written yet" if is_stub else f'written to {_short(file)}; lab.check("{id}") tries it'
        print(f"{id} {asked.title}: {state}")
    _last = id
    module = _load(asked, source)
    _tell_ranks()
    return module


def _is_stub(asked: Exercise, source: str) -> bool:
    """Whether `source` is the stub, perhaps with other comments and docstrings."""
    return _skeleton(source) == _skeleton(asked.stub)


def _skeleton(source: str) -> str:
    """What is left of `source` without docstrings and comments."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return source
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            del node.body[0]
    return ast.dump(tree)


def _short(file: Path) -> str:
    return f"{file.parent.name}/{file.name}"


def _load(asked: Exercise, source: str) -> ModuleType:
    """The module of `source`, loaded only once. Its names go into the notebook's or the rank's namespace."""
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
    if (shell := shell_here()) is not None:
        shell.user_ns.update(names)
    return module


def _retire(module: ModuleType, id: str) -> None:
    """Make objects of an older version raise Stale instead of running yesterday's code."""

    def refuse(name: str) -> Callable[..., Any]:
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


def _tell_ranks() -> None:
    """Tell every live rank whose code runs: the notebook decides, so the ranks never differ."""
    session = sys.modules.get("zerolab.lab.ranks.session")
    current = session.current() if session is not None else None
    if current is None:
        return
    decisions = {id: _decision(id) for id in EXERCISES if file_of(id).exists()}
    code = f"from zerolab.lab.exercises import learner as _e; _e.hear({decisions!r}, {list(_loaded)!r}); del _e"
    try:
        current.run(code)
    except Exception as error:
        print(f"the live ranks could not load it: {str(error).splitlines()[0]}")


def hear(decisions: dict[str, tuple[str, bool]], load: list[str]) -> None:
    """On a live rank: take over what the notebook decided, and load the answers that it has loaded."""
    global _told
    _told = decisions
    for id in load:
        if id in decisions:
            _load(find_exercise(id), decisions[id][0])


# ---------------------------------------------------------------------- check, hint, progress


def check(id: str | None = None) -> None:
    """Check the answer to exercise `id` (default: the last one) and print the verdict."""
    global _last
    _last = asked = find_exercise(_which(id)).id
    file = file_of(asked)
    if not file.exists():
        title = find_exercise(asked).title
        say(f"○ {asked} {title}    not done yet: run the cell that begins with %%exercise {asked}", "open")
        return
    source = file.read_text()
    if _is_stub(find_exercise(asked), source):  # no need to start ranks for it
        say(f"○ {asked} {find_exercise(asked).title}    not done yet", "open")
        return
    status = Status()
    status(f"○ {asked} {find_exercise(asked).title}    starting ranks for the check ...")
    verdict = judge.try_answer(asked, source, str(file.absolute()), tell=status)
    progress = read_progress()
    progress["passed"].pop(asked, None)
    if verdict.passed:
        progress["passed"][asked] = judge.digest(source)
    write_progress(progress)
    _tell_ranks()
    status.end(verdict.text, {"right": "right", "todo": "open"}.get(verdict.kind, "wrong"))


def _which(id: str | None) -> str:
    if id is None and _last is None:
        raise Misused(f'which exercise? There are {", ".join(EXERCISES)}: lab.check("01.1"), lab.hint("01.1")')
    return id or _last or ""


def hint(id: str | None = None) -> None:
    """Print one more hint for exercise `id` (default: the last one)."""
    asked = find_exercise(_which(id))
    progress = read_progress()
    number = min(progress["hints"].get(asked.id, 0) + 1, len(asked.hints))
    progress["hints"][asked.id] = number
    write_progress(progress)
    for i, text in enumerate(asked.hints[:number], 1):
        print(f"{asked.id}, hint {i} of {len(asked.hints)}: {text}")


def progress() -> None:
    """Print a line for each lesson of the course: what is done, what is begun, and which exercise is next."""
    kept = read_progress()
    predicted = kept["predictions"].keys() & QUESTIONS.keys()
    states = {asked.id: _state(asked, kept) for asked in EXERCISES.values()}
    for number, title in LESSONS.items():
        asked = [id for id in QUESTIONS if id.startswith(number)]
        guesses = f"{len(predicted.intersection(asked))} of {len(asked)}"
        marks = [
            "✓ " + id if states[id] == "done" else f"○ {id} {states[id]}".rstrip()
            for id in states
            if id.startswith(number)
        ]
        print(f"{number} {title:<48} {guesses:>7} predicted   {', '.join(marks)}".rstrip())
    done = list(states.values()).count("done")
    print(f"{done} of {len(states)} exercises, {len(predicted)} of {len(QUESTIONS)} predictions", end="")
    following = next((asked for asked in EXERCISES.values() if states[asked.id] != "done"), None)
    print(f"; next: {following.id} {following.title}" if following else "")


def _state(asked: Exercise, kept: dict[str, Any]) -> str:
    source, right = _decision(asked.id)
    if right:
        return "done"
    if not source or _is_stub(asked, source):
        return ""
    return "changed since it passed" if asked.id in kept["passed"] else "written, not passed"


# ---------------------------------------------------------------------- whose code runs


def mine(what: str | type, name: str = "") -> Any:
    """The learner's code where it has passed its check, else the course's; one line says whose it is.

    `mine("03.2")` is the function or class that the exercise defines. If it defines several, `name` picks one; the
    default is the first, and the line names the others. `mine(DDP)` is the learner's class, once all exercises about it
    have passed, and until then the package's with the learner's passed methods over it.
    """
    if not isinstance(what, (str, type)):
        raise Misused(f'lab.mine() takes an exercise ("03.2") or a class (DDP); {what!r} is neither')
    return _mine_of_exercise(find_exercise(what), name) if isinstance(what, str) else _mine_of_class(what)


def _answer(asked: Exercise) -> tuple[ModuleType | None, str]:
    """The learner's module if it has passed, else None and the reason."""
    source, right = _decision(asked.id)
    if right:
        return _load(asked, source), ""
    if not source or _is_stub(asked, source):
        return None, f"{asked.id} is not written yet"
    return None, f'{asked.id} has not passed as it is now: lab.check("{asked.id}")'


def _mine_of_exercise(asked: Exercise, name: str) -> Any:
    module, why_not = _answer(asked)
    others = "".join(f'; {other} is lab.mine("{asked.id}", "{other}")' for other in asked.exports[1:]) * (not name)
    name = name or asked.exports[0]
    if name not in asked.exports:
        raise Misused(f"exercise {asked.id} defines {', '.join(asked.exports)}, not {name!r}")
    print(f"{name}: " + (f"your code ({asked.id})" if module else f"the course's code, {why_not}") + others)
    return getattr(module or _reference(asked.id), name)


@functools.cache
def _reference(id: str) -> ModuleType:
    return judge.load(find_exercise(id).reference, f"the course's answer to {id}", f"reference_{id.replace('.', '_')}")


def _mine_of_class(base: type) -> type:
    parts = [asked for asked in EXERCISES.values() if asked.extends == base.__name__]
    if not parts or not issubclass(base, Engine):
        known = ", ".join(sorted({asked.extends for asked in EXERCISES.values() if asked.extends}))
        raise Misused(f"no exercise extends {base.__name__}; there are exercises for {known}")
    answers = [(asked, *_answer(asked)) for asked in parts]
    ours = [getattr(module, asked.exports[0]) for asked, module, _ in answers if module is not None]
    said = [f"your code ({asked.id})" if module else why_not for asked, module, why_not in answers]
    print(f"{base.__name__}: {', '.join(said)}; the rest is the package's")
    key = (base, *ours)
    if ours and key not in _classes:
        # All of it, and it stands alone: under it, the package's would do what an answer's super() only seems to.
        bases = (*ours, base) if len(ours) < len(parts) else tuple(ours)
        _classes[key] = type(base.__name__, bases, {"stage": base.stage, "__doc__": base.__doc__})
    return _classes.get(key, base)


# ---------------------------------------------------------------------- for the answers


def exchange(tensor: Tensor, to: int, source: int) -> Tensor:
    """Send `tensor` to rank `to` and return what rank `source` sends: both at once, so that neither rank blocks."""
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
    """Called by `%load_ext zerolab.lab`."""
    shell.register_magic_function(_exercise_magic, "cell", "exercise")


__all__ = ["Stale", "Todo", "check", "define", "exchange", "hint", "mine", "passed", "progress"]
