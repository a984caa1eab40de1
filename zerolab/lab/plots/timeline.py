"""The skyline: memory through one step, with a panel for each stage, all on one scale."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from matplotlib.figure import Figure

import zerolab
from zerolab.lab.plots.style import (
    COLOURS,
    GREY,
    HATCHES,
    INK,
    LABELS,
    Scale,
    frame,
    legend,
    patches,
    plain,
    scale_of,
    whose,
)
from zerolab.measure.allocations import Timeline
from zerolab.measure.units import in_bytes

ORDER = ("parameters", "optimizer", "gradients", "gathered parameters", "communication", "other", "activations")
PHASES = ("forward", "backward", "step")


def skyline(
    lines: Sequence[Timeline], learner: bool | Sequence[bool] = False, names: Sequence[str] = (), title: str = ""
) -> tuple[Figure, str]:
    """One rank's `measure.timeline` of a step at each stage: bytes by kind, and what the peak is made of.

    A phase of the step is equally wide in all panels; within a phase, x counts allocations and releases. learner:
    whether the learner's code ran, in all panels or in each. Its areas are solid, the package's hatched. names: of the
    panels, where they do not differ in their stage. title: what sets this picture apart from the lesson's others.
    """
    if not lines:
        raise ValueError("no timeline to draw")
    phases = [phase for phase in PHASES if any(phase in _phases(line) for line in lines)]
    what = "step" if len(phases) > 1 else phases[0]  # a forward may be recorded alone
    sentence = _sentence(lines, what, names or [f"in stage {line.stage}" for line in lines])
    first = lines[0]
    yours = whose(learner, len(lines))
    columns = 2 if len(lines) > 1 else 1
    subtitle = f"One {'training ' * (what == 'step')}{what} as rank {first.rank} of {first.world_size} sees it"
    subtitle += "; every panel on the same scale" * (columns - 1)
    rows = -(-len(lines) // columns)
    height = 1.95 + 2.5 * rows
    figure = frame(f"The skyline of a {what}" + f", {title}" * bool(title), subtitle, sentence, (9.0, height))
    scale = scale_of(max(line.peak for line in lines))
    top = 1.35 * max(line.peak for line in lines) / scale.bytes
    for number, line in enumerate(lines):
        row, column = divmod(number, columns)
        width = 0.92 / columns
        left = 0.07 + column * width
        bottom = 1.0 / height + (rows - 1 - row) * 2.5 / height + 0.1 / height
        axes = figure.add_axes((left, bottom, width - 0.045, 2.02 / height))
        _panel(axes, line, phases, top, scale, yours[number], names[number] if names else "")
        if column == 0:
            axes.set_ylabel(scale.name, color=GREY)
    used = [kind for kind in ORDER if any(max(line.curve(kind)) for line in lines)]
    legend(
        figure,
        patches(used, not all(yours)),
        loc="upper center",
        bbox_to_anchor=(0.5, 1 - 0.82 / height),
        ncols=len(used),
        columnspacing=0.9,
        fontsize=9,
        borderpad=0.0,
        handlelength=1.5,
        handletextpad=0.4,
    )
    return figure, sentence


def _panel(axes: Any, line: Timeline, phases: list[str], top: float, scale: Scale, learner: bool, name: str) -> None:
    plain(axes, grid="y")
    xs, bounds = _course(line, phases)
    curves = [[nbytes / scale.bytes for nbytes in line.curve(kind)] for kind in ORDER]
    floor = [0.0] * len(xs)
    for kind, curve in zip(ORDER, curves):
        if max(curve) == 0:
            continue
        ceiling = [low + high for low, high in zip(floor, curve)]
        hatch = None if learner else HATCHES[kind]
        look = {"facecolor": COLOURS[kind], "edgecolor": "white", "linewidth": 0.0, "hatch": hatch}
        axes.fill_between(xs, floor, ceiling, step="post", **look)
        floor = ceiling
    axes.step(xs, floor, where="post", color=INK, linewidth=0.7)
    title = (name or f"stage {line.stage}, {zerolab.STAGES[line.stage].__name__}") + ", your code" * learner
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.set_xlim(0, len(phases))
    axes.set_ylim(0, top)
    axes.vlines(bounds[1:-1], 0, top, color=GREY, linewidth=0.6, linestyles=":")
    axes.set_xticks([(a + b) / 2 for a, b in pairwise(bounds)], phases, fontsize=9)

    x = xs[line.peak_moment - line.before]
    made_of = [f"{LABELS.get(kind, kind)} {in_bytes(size)}" for kind, size in _largest(line)]
    axes.plot([x], [line.peak / scale.bytes], marker="v", color=INK, markersize=6, zorder=6)
    text = f"peak {in_bytes(line.peak)}: {made_of[0]},\n{', '.join(made_of[1:])}"  # two lines, to fit in half a page
    axes.text(0.03, 0.97 * top, text, fontsize=8, color=INK, va="top", zorder=7)


def _largest(line: Timeline) -> list[tuple[str, int]]:
    """The three kinds that make up most of the peak."""
    return sorted(line.by_kind().items(), key=lambda item: -item[1])[:3]


def _phases(line: Timeline) -> list[str]:
    """The phase of each event that the timeline recorded."""
    return [event.phase for event in line.events[line.before :]]


def _course(line: Timeline, phases: list[str]) -> tuple[list[float], list[float]]:
    """The x of every moment, from 0 to the number of `phases`, and where these begin and end."""
    came = _phases(line)
    edges = [0]
    for phase in phases[1:]:
        edges.append(next((i for i in range(edges[-1], len(came)) if came[i] == phase), len(came)))
    edges.append(len(came))
    xs = [0.0]
    for number, (start, end) in enumerate(pairwise(edges)):
        xs += [number + (i + 1) / (end - start) for i in range(end - start)]
    return xs, [float(number) for number in range(len(phases) + 1)]


def _sentence(lines: Sequence[Timeline], what: str, where: Sequence[str]) -> str:
    peaks = ", ".join(f"{in_bytes(line.peak)} {name}" for line, name in zip(lines, where, strict=True))
    highest = max(lines, key=lambda line: line.peak)
    kind, size = _largest(highest)[0]
    largest = f"{LABELS.get(kind, kind)}, {in_bytes(size)}"
    if what != "step":
        return f"The peak of a {what} is {peaks}. The largest part is {largest}."
    phase = highest.events[highest.peak_moment - 1].phase
    which = "The highest" if len(lines) > 1 else "It"
    return f"The peak of a step is {peaks}. {which} comes in {phase}; its largest part is {largest}."
