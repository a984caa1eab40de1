"""One moment of a step: every rank's memory by kind, and one rank's largest buffers with the lines that made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

import zerolab
from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, Look, frame, legend, patches, plain, scale_of
from zerolab.lab.plots.timeline import ORDER
from zerolab.measure.allocations import Timeline
from zerolab.measure.units import in_bytes

BUFFERS = 9  # lines of the list


def moment_picture(lines: Sequence[Timeline], moment: int, rank: int = 0) -> tuple[Figure, str]:
    """All ranks after `moment` events of their step, and the largest buffers of `lines[rank]` at that moment.

    A rank whose step has fewer events is shown at its end.
    """
    at = [min(line.before + moment, len(line.events)) for line in lines]
    line, now = lines[rank], at[rank]
    sentence = _sentence(line, now)
    stage = f"stage {line.stage}, {zerolab.STAGES[line.stage].__name__}"
    event = line.events[now - 1]
    where = f"{event.phase or 'before'}{f', unit {event.unit}' if event.unit else ''}"
    subtitle = f"{stage}; after event {moment} rank {line.rank} is in {where}"
    height = 3.4 + 0.34 * len(lines) + 0.21 * BUFFERS
    figure = frame("A moment of a step", subtitle, sentence, (9.0, height))
    bars = 0.34 * len(lines) + 0.25
    axes = figure.add_axes((0.085, 1 - (1.4 + bars) / height, 0.885, bars / height))
    used = _bars(axes, lines, at)
    place = {"loc": "upper center", "bbox_to_anchor": (0.5, 1 - 0.85 / height), "ncols": max(1, len(used))}
    look = {"columnspacing": 0.9, "fontsize": 9, "borderpad": 0.0, "handlelength": 1.5, "handletextpad": 0.4}
    legend(figure, patches(used), **place, **look)
    _list(figure, line, now, 1 - (2.05 + bars) / height, 0.21 / height)
    return figure, sentence


def _bars(axes: Any, lines: Sequence[Timeline], at: Sequence[int]) -> list[str]:
    """Draw a bar for each rank, scaled to the highest peak. Returns the kinds that occur in the step."""
    plain(axes, grid="x")
    highest = max(line.peak for line in lines)
    scale = scale_of(highest)
    for row, (line, moment) in enumerate(zip(lines, at)):
        left = 0.0
        sizes = line.by_kind(moment)
        for kind in ORDER:
            width = sizes[kind] / scale.bytes
            look = {"color": COLOURS[kind], "hatch": HATCHES[kind], "edgecolor": "white", "linewidth": 0.0}
            axes.barh(row, width, 0.72, left, **look)
            left += width
        axes.plot([line.peak / scale.bytes] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=1.4)
    axes.set_yticks(range(len(lines)), [f"rank {line.rank}" for line in lines], fontsize=9.5)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, 1.03 * highest / scale.bytes)
    axes.set_xlabel(f"{scale.name}; the black line is the rank's peak", color=GREY, fontsize=9)
    return [kind for kind in ORDER if any(max(line.curve(kind)) for line in lines)]


def _list(figure: Figure, line: Timeline, moment: int, top: float, step: float) -> None:
    """The largest buffers, a line of text for each."""
    held = sorted(line.alive(moment).items(), key=lambda item: -item[1])
    look: Look = {"fontsize": 8.6, "family": "DejaVu Sans Mono", "va": "top"}
    title = f"{'bytes':>8}  {'what':<20}{'unit':<11}{'shape':<18}made in"
    figure.text(0.03, top, title, color=GREY, **look)
    for number, (index, nbytes) in enumerate(held[:BUFFERS], start=1):
        buffer = line.buffers[index]
        file, place, function = buffer.site
        name = "the cell" if "/ipykernel_" in file else file.rsplit("/", 1)[-1]
        made = f"{name}:{place} {function}" if file else "before the step"
        shape = "x".join(map(str, buffer.shape))
        text = f"{in_bytes(nbytes):>8}  {buffer.kind:<20}{buffer.unit[:10]:<11}{shape[:17]:<18}{made[:42]}"
        figure.text(0.03, top - number * step, text, color=INK, **look)


def _sentence(line: Timeline, moment: int) -> str:
    sizes = line.alive(moment)
    total = sum(sizes.values())
    share = 100 * total / line.peak
    return f"Rank {line.rank} holds {in_bytes(total)} in {len(sizes)} buffers, {share:.0f} % of its peak."
