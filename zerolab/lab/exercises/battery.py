"""Plays an exercise's scenes with the course's answer and with the learner's, side by side, on each rank."""

from __future__ import annotations

import hashlib
import itertools
import linecache
import re
import sys
from types import ModuleType

import torch

from zerolab.lab.exercises.differences import KINDS, Difference, clues, compared
from zerolab.lab.exercises.exercise import Exercise, World, Wrong
from zerolab.lab.exercises.observing import GROUPS, Play, Scene

MOST = 120  # marks that a rank reports
_versions = itertools.count(1)


class Differs(Wrong):
    """The first difference of an answer from the reference, and the marks of all that the scene showed."""

    def __init__(self, seen: str, about: str, marks: list[str], values_differ: bool) -> None:
        super().__init__(seen, "", "", values_differ)
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
    for number, scene in enumerate(asked.battery):
        if world.world_size in scene.sizes:
            differs = _play_scene(scene, reference, answer, world)
            world.spy.store.set(f"scene {number} on {world.rank}", "differs" if differs else "")
            world.all_returned(f"scene {number}, ")
            if differs:
                raise differs
            names = [f"scene {number} on {rank}" for rank in range(world.world_size)]
            if any(world.spy.store.multi_get(names)):
                raise OthersDiffer
            world.came_on()


def _play_scene(scene: Scene, reference: ModuleType, answer: ModuleType, world: World) -> Differs | None:
    team = next((team for team in GROUPS[scene.groups](world.world_size) if world.rank in team), None)
    if team is None:
        return None
    right, ours = (Play(code, world, team) for code in (reference, answer))
    _act(scene, right)
    try:
        _act(scene, ours)
    except BaseException as error:
        event = ours.tape[-1].name if ours.tape else "the start"
        said = re.sub(r"[\d\W]+", " ", str(error).split("\n")[0])[:40]
        raised = [f"{event} raised {type(error).__name__}", f"{event} raised {type(error).__name__} {said}"]
        error.marks = hashed(scene, raised + _marks(list(compared(right, ours)), right, ours))  # type: ignore[attr-defined]
        error.scene = scene.title  # type: ignore[attr-defined]
        raise
    if not (found := list(compared(right, ours))):
        return None
    first, marks = found[0], hashed(scene, _marks(found, right, ours))
    seen = f"{scene.title}: {first.seen}" if scene.title else first.seen
    return Differs(seen, scene.about or KINDS[first.kind], marks, first.kind in ("values", "parts"))


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
    return [mark for difference in found for mark in difference.marks] + clues(right, ours)


def hashed(scene: Scene, marks: list[str]) -> list[str]:
    """The marks as they are stored: short, and without the words."""
    wordy = dict.fromkeys(f"{scene.title} {mark}" for mark in marks)
    return [hashlib.sha256(mark.encode()).hexdigest()[:6] for mark in itertools.islice(wordy, MOST)]
