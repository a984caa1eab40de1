"""Numbers counted by their power of two, above the ranges of float16, bfloat16 and float32."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, LABELS, PALE, frame, legend, plain


class Format(NamedTuple):
    """Powers of two: the smallest number of all, the smallest with all its digits, and the first that is too large."""

    name: str
    digits: int  # in binary
    smallest: int
    normal: int
    too_large: int


HALF = Format("float16", 11, -24, -14, 16)
FORMATS = (HALF, Format("bfloat16", 8, -133, -126, 128), Format("float32", 24, -149, -126, 128))


def binades(tensors: Iterable[Tensor]) -> dict[int, int]:
    """How many elements lie between 2**e and 2**(e + 1), without their signs, for each e. Zeros do not count."""
    counts: Counter[int] = Counter()
    for tensor in tensors:
        values = tensor.detach().double().abs().flatten()
        exponents = torch.frexp(values[values > 0]).exponent - 1
        found, often = exponents.unique(return_counts=True)
        counts.update(dict(zip(found.tolist(), often.tolist(), strict=True)))
    return dict(counts)


class Lost(NamedTuple):
    """Shares of the elements in float16: rounded to 0, kept with fewer digits, too large."""

    zero: float
    fewer_digits: float
    too_large: float


def lost(counts: Mapping[int, int], shift: int = 0) -> Lost:
    """What float16 does to numbers, `counts` by their power of two, if they are first multiplied by 2**shift."""
    total = sum(counts.values())

    def share(first: float, last: float) -> float:
        return sum(n for e, n in counts.items() if first <= e + shift < last) / total

    zero = share(-torch.inf, HALF.smallest - 1)  # half of the smallest number still rounds up to it
    return Lost(zero, share(HALF.smallest - 1, HALF.normal), share(HALF.too_large, torch.inf))


def number_line(
    counts: Mapping[str, Mapping[int, int]], shift: int, title: str, subtitle: str, span: tuple[int, int] = (-42, 22)
) -> tuple[Figure, str]:
    """`counts[category]` from `binades`: filled as they are, and as an outline multiplied by 2**shift.

    Below them are the ranges of the three formats. span: the powers of two that the picture shows.
    """
    if not counts or not all(counts.values()):
        raise ValueError("nothing to count: every category needs an element that is not 0")
    sentence = _sentence(counts, shift)
    figure = frame(title, subtitle, sentence, (9.0, 5.8))
    axes = figure.add_axes((0.1, 0.5, 0.87, 0.29))
    _bars(axes, counts, shift)
    axes.set_xlim(*span)
    axes.set_xticks([])
    axes.set_ylabel("% of each kind", color=GREY)
    _ranges(figure.add_axes((0.1, 0.235, 0.87, 0.24)), span)
    handles: list[Any] = [
        Patch(facecolor=COLOURS[name], edgecolor="white", hatch=HATCHES[name], label=_label(name)) for name in counts
    ]
    handles.append(Patch(facecolor="none", edgecolor=INK, linewidth=1.4, label=f"both, times $2^{{{shift}}}$"))
    handles.append(Patch(facecolor=PALE, edgecolor=GREY, hatch="///", label="fewer digits"))
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.53, 0.865), ncols=len(handles), borderpad=0.0)
    return figure, sentence


def _label(name: str) -> str:
    named = {"gradients": "gradients of weights", "activations": "gradients of activations"}
    return named.get(name, LABELS.get(name, name))


def _bars(axes: Any, counts: Mapping[str, Mapping[int, int]], shift: int) -> None:
    plain(axes, grid="y")
    width = 0.9 / len(counts)
    for number, (name, found) in enumerate(counts.items()):
        total, places = sum(found.values()), [e + 0.05 + number * width for e in found]
        heights = [100 * n / total for n in found.values()]
        look = {"color": COLOURS[name], "edgecolor": "white", "linewidth": 0.3, "hatch": HATCHES[name]}
        axes.bar(places, heights, width, align="edge", zorder=2, **look)
    everything: Counter[int] = Counter()
    for found in counts.values():
        everything.update(found)
    total = sum(everything.values())
    first, last = min(everything), max(everything)
    heights = [100 * everything.get(e, 0) / total for e in range(first, last + 1)]
    edges = [e + shift for e in range(first, last + 2)]
    axes.stairs(heights, edges, color=INK, linewidth=1.4, zorder=3)
    _edges(axes)


def _edges(axes: Any) -> None:
    """Where float16 begins, where it has all its digits, and where it ends."""
    for edge in (HALF.smallest, HALF.normal, HALF.too_large):
        axes.axvline(edge, color=GREY, linewidth=0.9, linestyle=":", zorder=1)


def _ranges(axes: Any, span: tuple[int, int]) -> None:
    plain(axes)
    first, last = span
    for row, one in enumerate(FORMATS):
        normal, end = max(one.normal, first), min(one.too_large, last)
        if one.smallest < normal:
            start = max(one.smallest, first)
            axes.barh(row, normal - start, 0.5, start, color=PALE, edgecolor=GREY, hatch="///", linewidth=0.8)
        axes.barh(row, end - normal, 0.5, normal, color="#9a9a9a", edgecolor=GREY, linewidth=0.8)
        ends = f"$2^{{{one.smallest}}}$ to $2^{{{one.too_large}}}$"
        axes.text((max(one.smallest, first) + end) / 2, row, f"{ends}, {one.digits} binary digits", **_centre())
    _edges(axes)
    axes.set_xlim(first, last)
    axes.set_ylim(len(FORMATS) - 0.6, -0.5)
    axes.set_yticks(range(len(FORMATS)), [one.name for one in FORMATS], fontsize=10, color=INK)
    ticks = [e for e in range(-120, 121, 8) if first <= e <= last]
    axes.set_xticks(ticks, [f"$2^{{{e}}}$" for e in ticks])


def _centre() -> dict[str, Any]:
    box = {"boxstyle": "round,pad=0.16", "facecolor": "white", "edgecolor": "none"}
    return {"ha": "center", "va": "center", "fontsize": 9.5, "color": INK, "bbox": box}


def _sentence(counts: Mapping[str, Mapping[int, int]], shift: int) -> str:
    said = []
    for name, found in counts.items():
        now, then = lost(found), lost(found, shift)
        said.append(
            f"{_label(name).capitalize()}: {_share(now.zero)} become 0 in float16 and {_share(now.fewer_digits)} have "
            f"fewer digits; times 2^{shift} it is {_share(then.zero)} and {_share(then.fewer_digits)}, and "
            f"{_share(then.too_large)} are too large."
        )
    return " ".join(said)


def _share(part: float) -> str:
    return f"{100 * part:.2g} %"
