"""What a battery sees of a program: the scenes it goes through, and a tape of all that could be observed.

A scene is an act, a function that puts a program in a situation and calls it. The reference and the answer go through
the same act; `Play` is what the act gets. What can be observed is on the tape after every event without being asked
for: what was returned, what was kept, what was sent, what was left running, the random state and torch's modes. An act
says only what differs between exercises: the situation, and what the text leaves open.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerolab.lab.exercises.exercise import World
from zerolab.lab.exercises.spy import Traffic
from zerolab.lab.exercises.values import nan_in_fresh_memory
from zerolab.world.processes import Patience

# Which ranks play together, of N. A rank that is in no list stands by.
GROUPS: dict[str, Callable[[int], list[list[int]]]] = {
    "all": lambda N: [list(range(N))],
    "tail": lambda N: [list(range(1, N))],  # numbers that are not those of the processes
    "strided": lambda N: [list(range(0, N, 2)), list(range(1, N, 2))],  # several at once
    "alone": lambda N: [[rank] for rank in range(N)],
}
WORLD_SIZES = (1, 2, 3, 4)
OTHERS = {"tail": (2, 3, 4), "strided": (3, 4), "alone": (3,)}  # the numbers of ranks at which they are worth a scene


@dataclass(frozen=True)
class Scene:
    """One situation. `title`: what is said before a difference in it, "" for the plain case.

    about: what to look at, if the answer differs here and is like no known mistake.
    note: what an answer is told that differs here and is right all the same, as the text leaves this open. Last, since
    ranks may part in it.
    loose: how far off values may be, relative to the largest of a tensor, and by the dtype's tolerance at least: where
    terms of sums cancel. 0: relative to each value.
    """

    title: str
    act: Callable[[Play], None]
    about: str = ""
    sizes: tuple[int, ...] = WORLD_SIZES
    groups: str = "all"
    loose: float = 0.0
    note: str = ""


class Enough(Exception):
    """The act ends here: what follows would take the process down. What is wrong was seen before."""


def in_groups(act: Callable[[Play], None], about: str) -> list[Scene]:
    """The scenes in which some of the ranks play `act` among themselves."""
    titles = {
        "tail": "among all ranks but rank 0",
        "strided": "in two groups, of the even ranks and of the odd ones",
        "alone": "in groups of a single rank",
    }
    return [Scene(titles[name], act, about, sizes, name) for name, sizes in OTHERS.items()]


# ---------------------------------------------------------------------- what was seen


@dataclass
class TensorSeen:
    kind: str  # Tensor, Parameter, or the name of another class
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str
    requires_grad: bool
    data: Tensor | None  # a copy; None on the meta device
    grad: TensorSeen | None = None


@dataclass
class Container:
    kind: str  # "list", which a tuple is too, "dict", "Module" (its parameters and buffers), or a dataclass's name
    items: dict[Any, Seen]


@dataclass
class Plain:
    """Anything else: equal or not."""

    kind: str
    value: Any


Seen = TensorSeen | Container | Plain


def snapshot(value: Any) -> Seen:
    """What can be seen of `value` now, with copies of its tensors."""
    if isinstance(value, Tensor):
        kind = "Parameter" if isinstance(value, nn.Parameter) else type(value).__name__
        data = None if value.is_meta else value.detach().clone().as_subclass(Tensor)
        grad = snapshot(value.grad) if value.is_leaf and value.grad is not None else None
        assert grad is None or isinstance(grad, TensorSeen)
        return TensorSeen(kind, tuple(value.shape), value.dtype, str(value.device), value.requires_grad, data, grad)
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return Container("list", {i: snapshot(item) for i, item in enumerate(value)})
    if isinstance(value, dict):
        return Container("dict", {key: snapshot(item) for key, item in value.items()})
    if isinstance(value, nn.Module):
        tensors = (*value.named_parameters(), *value.named_buffers())
        return Container("Module", {name: snapshot(tensor) for name, tensor in tensors})
    if is_dataclass(value) and not isinstance(value, type):
        return Container(type(value).__name__, {f.name: snapshot(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))):
        return Plain(type(value).__name__, tuple(value) if isinstance(value, torch.Size) else value)
    return Plain(type(value).__name__, None)


@dataclass
class Event:
    """One thing that was done, and what was seen after it."""

    name: str
    uses: tuple[str, ...] | None = None
    slack: float = 0.0  # bytes that may be sent beyond the reference's
    over: bool = False  # no error has ended it
    seen: dict[str, Seen] = field(default_factory=dict)  # must be as the reference's
    bounds: dict[str, float] = field(default_factory=dict)  # must not be more than the reference's
    clues: dict[str, str] = field(default_factory=dict)  # may differ, and tell mistakes apart
    traffic: list[Traffic] = field(default_factory=list)
    results: set[str] = field(default_factory=set)  # what of `seen` a call has returned
    before: dict[str, Seen] = field(default_factory=dict)  # what is looked at after every event, as it was before
    said: dict[str, str] = field(default_factory=dict)  # words for a difference in one of `seen`, which are no mark

    def see(self, name: str, value: Any) -> None:
        self.seen[name] = snapshot(value)


def _state_of_random() -> str:
    return hashlib.sha256(torch.random.get_rng_state().numpy().tobytes()).hexdigest()[:8]


def _modes() -> dict[str, Any]:
    return {
        "torch.is_grad_enabled()": torch.is_grad_enabled(),
        "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled(),
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.is_autocast_enabled('cpu')": torch.is_autocast_enabled("cpu"),
    }


class Play:
    """One program in one scene, on one rank. `code`: the module that the cell makes.

    members: the processes that play together; rank, size: this one's number among them, and how many they are; group:
    their process group. reference: the play of the course's answer, in that of a learner's. loose: as the scene's, or
    as the act sets it.
    """

    def __init__(
        self,
        code: Any,
        world: World,
        members: Sequence[int],
        group: Any = None,
        reference: Play | None = None,
        loose: float = 0.0,
    ) -> None:
        self.code, self.world, self.members, self.reference = code, world, list(members), reference
        self.group = dist.group.WORLD if group is None else group
        self.loose = loose
        self._too_much = 0
        self.notes: list[str] = []  # what a right answer should know
        self.rank, self.size = self.members.index(world.rank), len(self.members)
        self.tape: list[Event] = []
        self.bases: dict[str, tuple[int | None, Tensor]] = {}  # what values are sums of; a number that ranks count by
        self.kept: dict[str, Any] = {}
        self._numbers = torch.Generator().manual_seed(1)

    # ------------------------------------------------------------------ inputs

    def base(self, *shape: int, name: str = "", number: int | None = None) -> Tensor:
        """Numbers that are the same on every rank; those of two calls are no multiples of each other.

        1.5 makes means over 2, 3 and 4 ranks exact, and most of them no whole numbers. name: what is said when a result
        is found to be made of it.
        number: if ranks count by it ("chunk 3"), so that rank r's chunk r and rank s's chunk s are told alike.
        """
        made = 1.5 * torch.randint(1, 250, shape, generator=self._numbers).float()
        if name:
            self.bases[name] = (number, made)
        return made

    @staticmethod
    def share(base: Tensor, rank: int) -> Tensor:
        """What `rank` contributes: `16**rank * base`, so that a sum tells how often each rank's part is in it."""
        return base * 16.0**rank

    def among(self, places: Sequence[int]) -> Any:
        """A group of some of those that play; only they call this."""
        return dist.new_group([self.members[place] for place in places], use_local_synchronization=True)

    # ------------------------------------------------------------------ events

    def keep(self, name: str, value: Any) -> Any:
        """Look at `value` after every event from now on: an input that must stay as it is, a state."""
        self.kept[name] = value
        return value

    @contextmanager
    def event(
        self, name: str, uses: tuple[str, ...] | None = None, slack: float = 0.0, draws: bool = False
    ) -> Iterator[Event]:
        """Something is done; afterwards everything is looked at.

        uses: what may be called of torch.distributed. slack: bytes that may be sent beyond the reference's. draws:
        random numbers may be drawn, and do not count.
        """
        event = Event(name, uses, slack, before={kept: snapshot(value) for kept, value in self.kept.items()})
        self.tape.append(event)
        asked = set(self.world.spy.asked)
        with self.world.record() as calls, nan_in_fresh_memory():
            event.traffic = calls
            yield event
        event.over = True
        if draws:
            torch.manual_seed(0)
        for kept, value in self.kept.items():
            event.see(kept, value)
        event.see("the random state", _state_of_random())
        for mode, value in _modes().items():
            event.see(mode, value)
        event.clues["asked of all processes"] = " ".join(sorted(self.world.spy.asked - asked))

    def call(
        self,
        name: str,
        function: Callable,
        *args: Any,
        uses: tuple[str, ...] | None = None,
        slack: float = 0.0,
        result: str = "the result",
        **kwargs: Any,
    ) -> Any:
        """An event that is one call, and its result, which is looked at and returned. result: what it is called."""
        with self.event(name, uses, slack) as event:
            returned = function(*args, **kwargs)
            event.see(result, returned)
            event.results.add(result)
        return returned

    def refuses(self, error: type[Exception], name: str, function: Callable, *args: Any, **kwargs: Any) -> None:
        """An event that is one call which must raise `error`."""
        raised = "nothing"
        with self.event(name):
            try:
                function(*args, **kwargs)
            except Exception as found:
                raised = error.__name__ if isinstance(found, error) else type(found).__name__
        self.see(f"what {name} raises", raised)

    def everyone(self, value: Any) -> list[Any]:
        """`value`, which must be JSON, of each member."""
        return self.world.spy.everyone(value, self.members)

    def see(self, name: str, value: Any, said: str = "") -> None:
        """Of the event before: `value` must be as with the reference. said: what to add, if it is not."""
        self.tape[-1].see(name, value)
        self.tape[-1].said[name] = said

    def at_most(self, name: str, value: float | Callable[[], float], slack: float = 0.0) -> None:
        """Of the event before: `value` must not be more than with the reference, and `slack`.

        A function is asked again for a while, since one of gloo's threads may let go of memory a moment late; and a
        quarter as long after each that has been too much for all of it.
        """
        if self.reference is None:
            self.tape[-1].bounds[name] = (value() if callable(value) else value) + slack
            return
        most = self.reference.tape[len(self.tape) - 1].bounds.get(name, 0.0)
        patience = Patience(2.0 / 4**self._too_much, longest=0.02)
        while callable(value) and value() > most and patience.turn() > 0:
            time.sleep(0.01)
        self.tape[-1].bounds[name] = found = value() if callable(value) else value
        self._too_much += callable(value) and found > most

    def clue(self, name: str, value: Any) -> None:
        """Of the event before: `value` may differ, and tells mistakes apart."""
        self.tape[-1].clues[name] = str(value)

    def note(self, sentence: str) -> None:
        """What a right answer should know."""
        self.notes.append(sentence)
