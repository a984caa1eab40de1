"""Which replicas made each step: deaths, attempts that were thrown away, and newcomers that took a peer's state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, PALE, Look, frame, legend, many, plain


class Attempt(NamedTuple):
    """One try to make step number `step`: by which replicas, who took whose state before, and whether it was made."""

    step: int
    members: Sequence[str]
    sources: Mapping[str, str]
    made: bool


def membership(attempts: Sequence[Attempt], replicas: Sequence[str]) -> tuple[Figure, str]:
    """A row for each replica and a column for each attempt."""
    if not attempts:
        raise ValueError("no attempts to draw")
    sentence = _sentence(attempts)
    height = 2.5 + 0.5 * len(replicas)
    subtitle = f"{many(len(attempts), 'attempt')} to make a step, from left to right; a row for each replica"
    figure = frame("Who made which step", subtitle, sentence, (9.0, height))
    axes = figure.add_axes((0.11, 1.15 / height, 0.86, 0.5 * len(replicas) / height))
    plain(axes)
    axes.spines["bottom"].set_visible(False)
    for column, (attempt, after) in enumerate(itertools.zip_longest(attempts, attempts[1:])):
        for row, name in enumerate(replicas):
            lost = not attempt.made and after is not None and name not in after.members
            _cell(axes, column, row, name, attempt, lost)
    axes.set_xlim(-0.1, len(attempts) + 0.1)
    axes.set_ylim(len(replicas), -0.05)
    axes.set_yticks([row + 0.5 for row in range(len(replicas))], [f"replica {name}" for name in replicas], fontsize=9.5)
    places, labels = [], []
    for first, stretch in _stretches(attempts):
        places.append(first + len(stretch) / 2)
        last = stretch[-1].step
        steps = f"step {last}" if len(stretch) == 1 else f"steps {stretch[0].step} to {last}"
        labels.append(f"÷ {len(stretch[0].members)}\n{steps}" if stretch[0].made else "")
    axes.set_xticks(places, labels, fontsize=9.5, color=GREY)
    axes.tick_params(axis="both", length=0)
    look: Look = {"edgecolor": "white", "linewidth": 0.4}
    handles = [
        Patch(facecolor=COLOURS["gradients"], hatch=HATCHES["gradients"], label="its gradient is in the mean", **look),
        Patch(facecolor=COLOURS["communication"], hatch=HATCHES["communication"], label="takes a peer's state", **look),
        Patch(facecolor="white", edgecolor=INK, label="thrown away (x: died)"),
    ]
    place = {"loc": "upper left", "bbox_to_anchor": (0.105, 1 - 0.88 / height), "ncols": 3}
    legend(figure, handles, borderpad=0.0, columnspacing=1.2, **place)
    return figure, sentence


def _cell(axes: Any, column: int, row: int, name: str, attempt: Attempt, lost: bool) -> None:
    kind = "communication" if name in attempt.sources else "gradients"
    look: Look = {"facecolor": COLOURS[kind], "edgecolor": "white", "hatch": HATCHES[kind], "linewidth": 0.4}
    if name not in attempt.members:
        look = {"facecolor": "white", "edgecolor": PALE, "linewidth": 0.8}
    elif not attempt.made:
        look = {"facecolor": "white", "edgecolor": INK, "linewidth": 1.0}
    axes.add_patch(Rectangle((column + 0.08, row + 0.1), 0.84, 0.8, **look))
    if lost and name in attempt.members:
        axes.text(column + 0.5, row + 0.5, "x", ha="center", va="center", fontsize=12, weight="bold", color=INK)


def _stretches(attempts: Sequence[Attempt]) -> list[tuple[int, list[Attempt]]]:
    """Attempts in a row by the same members and with the same success, and the number of the first."""
    found, first = [], 0
    for _, group in itertools.groupby(attempts, key=lambda attempt: (tuple(attempt.members), attempt.made)):
        stretch = list(group)
        found.append((first, stretch))
        first += len(stretch)
    return found


def _sentence(attempts: Sequence[Attempt]) -> str:
    said = []
    for _, stretch in _stretches(attempts):
        members = ", ".join(stretch[0].members)
        if not stretch[0].made:
            said.append(f"then {many(len(stretch), 'attempt')} thrown away")
            continue
        taken = "".join(f", {name} with the state of {source}" for name, source in stretch[0].sources.items())
        said.append(f"{many(len(stretch), 'step')} by {members}, divided by {len(stretch[0].members)}{taken}")
    text = "; ".join(said)
    return f"{text[0].upper()}{text[1:]}."
