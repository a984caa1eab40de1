"""Who computes which part of a model, and what has to travel before the next layer can begin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from zerolab.lab.plots.cells import RANKS
from zerolab.lab.plots.style import COLOURS, GREY, INK, frame, many, plain
from zerolab.measure.units import in_bytes


class Area(NamedTuple):
    """What `rank` computed of `layer`: these samples, these hidden units, each as a part (from, to) of 0 to 1.

    waited: bytes that had to reach this rank from others before it could begin.
    """

    rank: int
    layer: int
    samples: tuple[float, float]
    units: tuple[float, float]
    waited: int = 0


def who_computes_what(ways: Mapping[str, Sequence[Area]]) -> tuple[Figure, str]:
    """A row for each way to cut; in it a square for each layer: samples from top to bottom, hidden units across.

    An arrow before a layer: a rank had to wait for bytes of others before it could compute that layer.
    """
    if not ways or not all(ways.values()):
        raise ValueError("nothing was computed")
    layers = 1 + max(area.layer for areas in ways.values() for area in areas)
    ranks = 1 + max(area.rank for areas in ways.values() for area in areas)
    height = 1.7 + 1.55 * len(ways)
    sentence = _sentence(ways)
    subtitle = (
        f"{many(ranks, 'rank')}, {many(layers, 'layer')}; in a square: samples from top to bottom, hidden units across"
    )
    figure = frame("Who computes what in forward", subtitle, sentence, (9.0, height))
    for number, (name, areas) in enumerate(ways.items()):
        bottom = 0.72 + 1.55 * (len(ways) - 1 - number)
        axes = figure.add_axes((0.02, bottom / height, 0.96, 1.42 / height))
        plain(axes)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlim(-1.05, 1.6 * layers)
        axes.set_ylim(1.3, -0.05)
        axes.text(-1.0, 0.5, name, va="center", fontsize=11.5, weight="bold", color=INK)
        for area in areas:
            _draw(axes, area)
        for layer in range(layers):
            axes.text(1.6 * layer + 0.5, 1.17, f"layer {layer}", ha="center", va="center", fontsize=9, color=GREY)
            waited = max((area.waited for area in areas if area.layer == layer), default=0)
            if waited:
                _arrow(axes, layer, waited)
    return figure, sentence


def _draw(axes: Any, area: Area) -> None:
    (top, low), (left, right) = area.samples, area.units
    x, y = 1.6 * area.layer + left, top
    look: dict[str, Any] = {"facecolor": RANKS[area.rank % len(RANKS)], "edgecolor": INK, "linewidth": 0.9}
    axes.add_patch(Rectangle((x, y), right - left, low - top, **look))
    narrow = right - left < 0.5
    text = f"{area.rank}" if narrow else f"rank {area.rank}"
    axes.text(x + (right - left) / 2, y + (low - top) / 2, text, ha="center", va="center", fontsize=8.5, color=INK)


def _arrow(axes: Any, layer: int, waited: int) -> None:
    x = 1.6 * layer
    arrow = {"arrowstyle": "-|>", "color": COLOURS["communication"], "linewidth": 2.2}
    axes.annotate("", (x - 0.04, 0.5), (x - 0.56, 0.5), arrowprops=arrow)
    axes.text(x - 0.3, 0.36, in_bytes(waited), ha="center", va="bottom", fontsize=8, color=INK)


def _sentence(ways: Mapping[str, Sequence[Area]]) -> str:
    said = []
    for name, areas in ways.items():
        waiting = Counter(area.rank for area in areas if area.waited)
        waits = "no rank waits for another"
        if waiting:
            layers = many(max(waiting.values()), "layer")
            waits = f"{many(len(waiting), 'rank')} must wait for others, each before {layers}"
        said.append(f"{name}: {waits}")
    return "; ".join(said) + "."
