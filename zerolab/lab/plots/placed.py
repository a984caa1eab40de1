"""What of one parameter each rank keeps, by the placement, and what its gradient is made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.style import COLOURS, HATCHES, INK, PALE, Look, frame, legend, many, patches, plain


class Placed(NamedTuple):
    """On one rank: the elements of the parameter that it keeps, and of how many ranks their gradient is the mean."""

    kept: Sequence[int]
    ranks: int


def placements(ways: Mapping[str, Sequence[Placed]], elements: int) -> tuple[Figure, str]:
    """A panel for each way, in it a row for each rank: the parameter's elements, and under them their gradient's."""
    if not ways:
        raise ValueError("no placements to draw")
    ranks = max(map(len, ways.values()))
    sentence = _sentence(ways, elements)
    height = 2.15 + 0.52 * ranks
    subtitle = f"{many(elements, 'element')} on {many(ranks, 'rank')}; hollow: needed for a while, and not kept"
    figure = frame("One parameter, three placements", subtitle, sentence, (9.0, height))
    width = 0.9 / len(ways)
    for number, (name, rows) in enumerate(ways.items()):
        axes = figure.add_axes((0.075 + width * number, 0.62 / height, width - 0.03, 0.52 * ranks / height))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        for rank, placed in enumerate(rows):
            for element in range(elements):
                _cell(axes, element, rank + 0.08, "parameters", element in placed.kept)
                _cell(axes, element, rank + 0.5, "gradients", element in placed.kept)
        axes.set_xlim(0, elements)
        axes.set_ylim(ranks, 0)
        axes.set_xticks([])
        labels = [f"rank {rank}" for rank in range(ranks)] if not number else []
        axes.set_yticks([rank + 0.48 for rank in range(ranks)] if labels else [], labels, fontsize=9.5)
        axes.set_title(name, loc="left", fontsize=11, color=INK, pad=5)
    place = {"loc": "upper right", "bbox_to_anchor": (0.975, 1 - 0.12 / height), "ncols": 2}
    legend(figure, patches(["parameters", "gradients"]), borderpad=0.0, columnspacing=1.2, **place)
    return figure, sentence


def _cell(axes: Any, element: int, top: float, kind: str, kept: bool) -> None:
    look: Look = {"facecolor": COLOURS[kind], "edgecolor": "white", "hatch": HATCHES[kind], "linewidth": 0.4}
    if not kept:
        look = {"facecolor": "white", "edgecolor": PALE, "linewidth": 1.0}
    axes.add_patch(Rectangle((element + 0.06, top), 0.88, 0.36, **look))


def _sentence(ways: Mapping[str, Sequence[Placed]], elements: int) -> str:
    said = []
    for name, rows in ways.items():
        most, means = max(len(row.kept) for row in rows), {row.ranks for row in rows}
        mean = f"the mean of {' or '.join(map(str, sorted(means)))}"
        said.append(f"{name}: a rank keeps {most} of {elements} elements, each gradient {mean}")
    return "; ".join(said) + "."
