"""Which addresses were in use when: a rectangle for each allocation of a step, and the holes that are left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.lessons.lesson10.arena import Replay
from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, Look, frame, legend, many, patches, plain, scale_of
from zerolab.lab.plots.timeline import ORDER
from zerolab.measure.units import in_bytes

HEIGHT = 5.6  # inches


def address_map(replays: Sequence[Replay], titles: Sequence[str]) -> tuple[Figure, str]:
    """`lab.arena.replay` of one step, a panel for each way of placing it; x counts allocations and releases.

    White is free. What is not drawn with a colour of its own is too small to see.
    """
    if len(replays) != len(titles) or not replays:
        raise ValueError(f"{len(replays)} replays and {len(titles)} titles: give one title for each replay")
    sentence = _sentence(replays, titles)
    until = {replay.until for replay in replays}
    course = f"From the start of a step to the end of its {until.pop()}" if len(until) == 1 and "" not in until else ""
    subtitle = f"{course or 'One step'}, as rank {replays[0].line.rank} runs it; one flat buffer a panel"
    figure = frame("Who lies where", subtitle, sentence, (9.0, HEIGHT))
    scale = scale_of(max(replay.arena.size for replay in replays))
    top = max(replay.arena.size for replay in replays) / scale.bytes
    width = 0.92 / len(replays)
    for number, (replay, title) in enumerate(zip(replays, titles, strict=True)):
        axes = figure.add_axes((0.07 + number * width, 0.245, width - 0.05, 0.5))
        plain(axes)
        for piece in sorted(replay.pieces, key=lambda piece: piece.begin):
            begin, height = max(piece.begin, replay.line.before), piece.nbytes / scale.bytes
            large = height > 0.012 * top and piece.end - begin > 0.03 * (replay.moment - replay.line.before)
            look: Look = {"facecolor": COLOURS[piece.kind], "edgecolor": "white", "linewidth": 0.25}
            look["hatch"] = HATCHES[piece.kind] if large else None
            axes.add_patch(Rectangle((begin, piece.start / scale.bytes), piece.end - begin, height, **look))
        _mark_largest(axes, replay, scale.bytes)
        axes.axhline(replay.arena.size / scale.bytes, color=INK, linewidth=1.0)
        axes.set_xlim(replay.line.before, replay.moment + 0.1 * (replay.moment - replay.line.before))
        axes.set_ylim(0, 1.03 * top)
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_xticks([])
        axes.set_xlabel("allocations and releases, in order", fontsize=9, color=GREY)
        if number == 0:
            axes.set_ylabel(f"address, {scale.name}", color=GREY)
    used = [kind for kind in ORDER if any(piece.kind == kind for replay in replays for piece in replay.pieces)]
    place: Look = {"loc": "upper center", "bbox_to_anchor": (0.5, 0.855), "ncols": len(used), "fontsize": 9}
    legend(figure, patches(used), columnspacing=0.9, borderpad=0.0, handlelength=1.5, handletextpad=0.4, **place)
    return figure, sentence


def _mark_largest(axes: Any, replay: Replay, unit: float) -> None:
    """A line beside the largest hole at the end."""
    if replay.arena.holes:
        start, end = max(replay.arena.holes, key=lambda hole: hole[1] - hole[0])
        x = replay.moment + 0.03 * (replay.moment - replay.line.before)
        axes.plot([x, x], [start / unit, end / unit], color=INK, linewidth=3, solid_capstyle="butt")
        said: Look = {"rotation": 90, "va": "center", "ha": "left", "fontsize": 8.5, "color": INK}
        axes.annotate(in_bytes(end - start), (x, (start + end) / 2 / unit), (3, 0), textcoords="offset points", **said)


def _sentence(replays: Sequence[Replay], titles: Sequence[str]) -> str:
    said = []
    for replay, title in zip(replays, titles, strict=True):
        arena = replay.arena
        holes = f"{in_bytes(arena.free)} free in {many(len(arena.holes), 'hole')}, the largest of"
        said.append(f"{title}: {in_bytes(arena.size)} of addresses; at the end {holes} {in_bytes(arena.largest)}.")
    return " ".join(said)
