"""What all pictures share: colours, hatches, the frame of a figure, its legend and the sentence below it.

A thing has the same colour throughout the course, from the palette of Okabe and Ito, which the colour-blind can tell
apart. It also has a hatch, so that nothing depends on colour alone.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLOURS = {
    "parameters": "#56B4E9",
    "gathered parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "communication": "#D55E00",
    "other": "#BBBBBB",
}
HATCHES = {
    "parameters": "//",
    "gathered parameters": "++",
    "gradients": "..",
    "optimizer": "\\\\",
    "activations": "xx",
    "communication": "--",
    "other": "",
}
LABELS = {"optimizer": "optimizer state"}  # where people say something other than the category's name

SENTENCE = "sentence"  # marks the text below the picture, which a page shows as real text
Look = dict[str, Any]  # keyword arguments for matplotlib
INK, GREY, PALE = "#1a1a1a", "#5f5f5f", "#e6e6e6"


def frame(title: str, subtitle: str, sentence: str, size: tuple[float, float] = (9.0, 6.0)) -> Figure:
    """A white figure with its title at the top and the sentence at the bottom. The picture goes between them."""
    figure = Figure(figsize=size, facecolor="white")
    height = size[1]
    if link := emulated_link():
        subtitle += f" · emulated link: {link}"
    figure.text(0.03, 1 - 0.42 / height, title, fontsize=18, weight="bold", color=INK)
    figure.text(0.03, 1 - 0.75 / height, subtitle, fontsize=11.5, color=GREY)
    lines = textwrap.fill(sentence, round(11.7 * size[0]))
    place: Look = {"va": "bottom", "linespacing": 1.45, "gid": SENTENCE}
    figure.text(0.03, 0.12 / height, lines, fontsize=11, color=INK, **place)
    return figure


def emulated_link() -> str:
    """The network that `lab.link` emulates, as it was asked for; "" for none."""
    if session := sys.modules.get("zerolab.lab.ranks.session"):  # in a notebook that has started ranks
        return session.link.current() or ""
    if network := sys.modules.get("zerolab.lab.ranks.network"):  # on a rank
        return network.current() or ""
    return ""


def plain(axes: Any, grid: str = "") -> None:
    """No box, no ticks, grey numbers; a pale grid along one axis."""
    axes.set_facecolor("white")
    axes.tick_params(axis="both", length=0, colors=GREY)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GREY)
    if grid:
        getattr(axes, f"{grid}axis").grid(True, color=PALE)
    axes.set_axisbelow(True)


def patches(names: list[str], hatched: bool = True) -> list[Any]:
    """A legend entry for each category. hatched: as the package's, and not as the learner's code's."""
    look: list[Look] = [{"facecolor": COLOURS[name], "hatch": HATCHES[name] if hatched else None} for name in names]
    return [Patch(edgecolor="white", label=LABELS.get(name, name), **own) for name, own in zip(names, look)]


def whose(learner: bool | Sequence[bool], number: int) -> list[bool]:
    """For each of `number` bars or panels, whether the learner's code ran. A single answer is for all of them."""
    answers = [learner] * number if isinstance(learner, bool) else [bool(one) for one in learner]
    if len(answers) != number:
        raise ValueError(f"learner has {len(answers)} answers for {number} bars or panels")
    return answers


def key(yours: Sequence[bool]) -> str:
    """What a subtitle says of bars that are drawn solid; nothing where none is."""
    return "; solid: your code" * any(yours) + ", hatched: the package's" * (len(set(yours)) > 1)


def legend(where: Any, handles: list[Any], **keywords: Any) -> None:
    """Draw the legend of a figure or of axes, on plain white."""
    look = {"fontsize": 10.5, "frameon": True, "facecolor": "white", "edgecolor": "none", "framealpha": 1.0}
    where.legend(handles=handles, **(look | {"handlelength": 2.2, "handleheight": 1.3} | keywords))


def above(axes: Any, x: float, y: float, text: str, points: float, **keywords: Any) -> None:
    """Put text this many points above (x, y), on white, so that no grid line runs through it."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    look = {"ha": "center", "color": INK, "zorder": 3, "bbox": box}
    axes.annotate(text, (x, y), (0, points), textcoords="offset points", **(look | keywords))


class Scale(NamedTuple):
    """The unit of an axis, such as MB, and the number of bytes in it."""

    bytes: float
    name: str


def scale_of(highest: float) -> Scale:
    """The largest unit in which the highest value of an axis is at least 1."""
    return next((Scale(size, name) for size, name in ((1e9, "GB"), (1e6, "MB")) if highest >= size), Scale(1e3, "kB"))


def many(count: int, what: str) -> str:
    """1 rank, 4 ranks."""
    return f"{count:,} {what}{'s' * (count != 1)}"
