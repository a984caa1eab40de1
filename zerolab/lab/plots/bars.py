"""Bars of memory by category, side by side: what a parameter costs, or what a rank holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, Look, above, frame, key, legend, patches, plain, whose


def stacks(
    bars: Mapping[str, Mapping[str, float]],
    title: str,
    subtitle: str,
    unit: str,
    learner: bool | Sequence[bool] = False,
) -> tuple[Figure, str]:
    """`bars[name][category]`, stacked in the order of the first bar's categories. unit: the unit of the numbers.

    learner: whether the learner's code ran, for all bars or for each. Its bars are solid, the package's hatched.
    """
    if not bars:
        raise ValueError("no bars to draw")
    yours = whose(learner, len(bars))
    subtitle += key(yours)
    totals = {name: sum(parts.values()) for name, parts in bars.items()}
    categories = [c for c in next(iter(bars.values())) if any(parts.get(c) for parts in bars.values())]
    sentence = _sentence(totals, unit)
    figure = frame(title, subtitle, sentence, (9.0, 4.7))
    axes = figure.add_axes((0.085, 0.25, 0.885, 0.5))
    plain(axes, grid="y")
    highest = max(totals.values())
    for x, (name, parts) in enumerate(bars.items()):
        bottom = 0.0
        for category in categories:
            height = parts.get(category, 0.0)
            if height <= 0:
                continue
            hatch = None if yours[x] else HATCHES[category]
            look: Look = {"color": COLOURS[category], "edgecolor": "white", "linewidth": 0.4, "hatch": hatch}
            axes.bar(x, height, 0.62, bottom, zorder=2, **look)
            middle, said = bottom + height / 2, f"{height:.3g}"
            if height > 0.095 * highest:
                box = {"boxstyle": "round,pad=0.16", "facecolor": "white", "edgecolor": "none"}
                axes.text(x, middle, said, ha="center", va="center", fontsize=9.5, zorder=5, bbox=box)
            elif height > 0.055 * highest:  # too thin for its number, which would cover the next one's
                axes.text(x + 0.33, middle, said, ha="left", va="center", fontsize=8, color=INK)
            bottom += height
        above(axes, x, totals[name], f"{totals[name]:.3g}", 3, fontsize=12, weight="bold")
    axes.set_xticks(range(len(bars)), list(bars), fontsize=10, color=INK)
    axes.set_xlim(-0.55, len(bars) - 0.45)
    axes.set_ylim(0, 1.16 * highest)
    axes.set_ylabel(unit, color=GREY)
    place = {"loc": "upper center", "bbox_to_anchor": (0.52, 0.835), "ncols": len(categories)}
    legend(figure, patches(categories, not all(yours)), borderpad=0.0, columnspacing=1.2, **place)
    return figure, sentence


def _sentence(totals: Mapping[str, float], unit: str) -> str:
    listed = [f"{name.replace(chr(10), ' ')} = {total:.3g}" for name, total in totals.items()]
    return f"In {unit}: {'; '.join(listed)}."
