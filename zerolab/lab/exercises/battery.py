"""Plays an exercise's scenes with the course's answer and with the learner's, side by side, on each rank."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import re
import sys
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from zerolab.comm.waiting import CommError
from zerolab.lab.exercises.differences import Difference, clues, compared
from zerolab.lab.exercises.exercise import Exercise, Todo, World, Wrong, returns_none
from zerolab.lab.exercises.observing import GROUPS, Enough, Play, Scene
from zerolab.lab.exercises.spy import END, GaveUp

MOST = 120  # marks that a rank reports
BEHIND = ("waiting", "meddling")  # what is behind other differences
SAY_MORE = {*BEHIND, "bytes", "calls", "changed", "keys", "nothing", "state", "type"}  # than the scene can
_versions = itertools.count(1)
_kept: dict[tuple[Scene, int, int], Play] = {}  # the reference's, by scene, number of ranks and rank


class Differs(Wrong):
    """The first difference of an answer from the reference, and the marks of all that the scene showed."""

    def __init__(self, seen: str, about: str, marks: list[str]) -> None:
        super().__init__(seen)
        self.about, self.marks = about, marks


class OthersDiffer(Exception):
    """This rank is right so far, and another is not."""


def load(source: str, filename: str, name: str) -> ModuleType:
    """`source` as a fresh module, whose lines tracebacks show and inspect finds.

    Lines count as in the notebook, where `%%exercise` is the first.
    """
    module = ModuleType(f"{name}_v{next(_versions)}")
    module.__file__ = filename
    source = f"# %%exercise\n{source}"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    sys.modules[module.__name__] = module
    try:
        exec(compile(source, filename, "exec"), vars(module))
    except BaseException:
        del sys.modules[module.__name__]
        raise
    return module


def play_battery(asked: Exercise, answer: ModuleType, world: World) -> None:
    """Raises Differs at the first scene in which `answer` differs, and on the other ranks OthersDiffer."""
    reference = load(asked.reference, f"<the course's answer to {asked.id}>", f"reference_{asked.id.replace('.', '_')}")
    for name in asked.exports:
        wanted, found = getattr(reference, name), getattr(answer, name)
        if callable(wanted) and not callable(found):
            what = "a class" if isinstance(wanted, type) else "a function"
            raise Wrong(f"{name} is a {type(found).__name__}", f"the cell must define {name} as {what}")
    for number, scene in enumerate(asked.battery):
        if world.world_size in scene.sizes:
            try:
                differs = _play_scene(scene, reference, answer, world)
            except (Exception, GaveUp) as error:
                if not scene.note or isinstance(error, Todo):
                    raise
                differs = Differs("", "", [])
            if scene.note:  # and no meeting afterwards, since ranks may have parted
                if differs:
                    world.note(scene.note)
                    return
                continue
            world.spy.store.set(f"scene {number} on {world.rank}", "differs" if differs else "")
            if differs:
                raise differs  # at once, since others may wait for this rank
            names = [f"scene {number} on {rank}" for rank in range(world.world_size)]
            try:
                world.spy.agree(f"{END} the case {scene.title!r}" if scene.title else f"{END} the first case")
            except GaveUp:
                if any(world.spy.store.check([name]) and world.spy.store.get(name) for name in names):
                    raise OthersDiffer from None
                raise
            if any(world.spy.store.multi_get(names)):
                raise OthersDiffer
            world.came_on()


def _play_scene(scene: Scene, reference: ModuleType, answer: ModuleType, world: World) -> Differs | None:
    teams = GROUPS[scene.groups](world.world_size)
    groups = [dist.new_group(team) if scene.groups != "all" else None for team in teams]
    team, group = next(((t, g) for t, g in zip(teams, groups, strict=True) if world.rank in t), ([], None))
    right = _reference_in(scene, reference, world, team, group)
    if right is None:
        return None
    ours = Play(answer, world, team, group, right, scene.loose)
    try:
        _act(scene, ours)
    except Enough:
        pass
    except BaseException as error:
        event = ours.tape[-1].name if ours.tape else "the start"
        line = re.sub(r"/\S+", "", str(error).split("\n")[0])  # without paths, which differ from run to run
        sorts = ["", re.sub(r"[\d\W]+", " ", line)[:40], line]  # of the error, from coarse to fine
        if isinstance(error, (GaveUp, CommError)):  # where the others are by then is a matter of time
            del sorts[1:]
        raised = [f"{event} raised {type(error).__name__} {sort}" for sort in sorts]
        found = list(compared(right, ours))
        error.marks = hashed(scene, raised + _marks(found, right, ours))  # type: ignore[attr-defined]
        if found and isinstance(error, Exception) and not isinstance(error, Todo):  # a consequence
            return _differs(scene, found, error.marks)  # type: ignore[attr-defined]
        where = f"in {event}" if len({event.name for event in right.tape}) > 1 else ""
        error.scene, error.about = ", ".join(filter(None, [scene.title, where])), scene.about  # type: ignore[attr-defined]
        calls = ours.tape[-1].traffic if ours.tape else []
        of_none = isinstance(error, (TypeError, AttributeError)) and "NoneType" in str(error)
        if of_none and not scene.about and any(call.used for call in calls):
            error.likely = returns_none(calls, str(error))  # type: ignore[attr-defined]
        raise
    if not (found := list(compared(right, ours))):
        for note in ours.notes:
            world.note(note)
        return None
    return _differs(scene, found, hashed(scene, _marks(found, right, ours)))


def _reference_in(scene: Scene, reference: ModuleType, world: World, team: list[int], group: Any) -> Play | None:
    """The reference's play on this rank. It is the same in every check, so it is kept, unless a rank has lost it."""
    key = scene, world.world_size, world.rank
    if not all(world.everyone(not team or key in _kept)) and team:
        play = Play(reference, world, team, group, loose=scene.loose)
        _act(scene, play)
        play.kept.clear()
        del play.group, play.world  # or this check's process group would live, with threads that ask for messages
        _kept[key] = play
    return _kept.get(key)


def _differs(scene: Scene, found: list[Difference], marks: list[str]) -> Differs:
    seen = f"{scene.title}: {found[0].seen}" if scene.title else found[0].seen
    cause = next((difference for kind in BEHIND for difference in found if difference.kind == kind), found[0])
    about = cause.about if cause.kind in SAY_MORE or not scene.about else scene.about
    return Differs(seen, about, marks)


def _act(scene: Scene, play: Play) -> None:
    """What an answer leaves switched on or off is seen on its tape, and ends with the scene."""
    recording, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        scene.act(play)
    finally:
        torch.set_grad_enabled(recording)
        torch.set_default_dtype(dtype)


def _marks(found: list[Difference], right: Play, ours: Play) -> list[str]:
    return clues(right, ours) + [mark for difference in found for mark in difference.marks]


def hashed(scene: Scene, marks: list[str]) -> list[str]:
    """The marks as they are stored: short, and without the words."""
    wordy = dict.fromkeys(f"{scene.title} {mark}" for mark in marks)
    return [hashlib.sha256(mark.encode()).hexdigest()[:6] for mark in itertools.islice(wordy, MOST)]
