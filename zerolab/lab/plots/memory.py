"""What a run needs and what a GPU has: a bar for each stage."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, Look, above, frame, legend, patches, plain, scale_of
from zerolab.measure import CATEGORIES
from zerolab.measure.planning import STAGES, Row, in_parameters
from zerolab.measure.units import in_bytes


def memory_plan(rows: Sequence[Row], memory: float, title: str) -> tuple[Figure, str]:
    """The stages of `measure.plan(...)`, with a line at a GPU's `memory` (bytes). All by formula."""
    sentence = _sentence(rows, memory)
    figure = frame("Does it fit?", f"{title}; by the formula", sentence, (9.0, 4.9))
    axes = figure.add_axes((0.085, 0.26, 0.885, 0.49))
    plain(axes, grid="y")
    highest = max(memory, *(row.total for row in rows))
    scale = scale_of(highest)
    for x, row in enumerate(rows):
        bottom = 0.0
        for category, size in (*row.states.items(), ("activations", row.activations)):
            height = size / scale.bytes
            look: Look = {"color": COLOURS[category], "hatch": HATCHES[category], "edgecolor": "white"}
            axes.bar(x, height, 0.6, bottom, zorder=2, **look)
            bottom += height
        said = f"{in_bytes(row.total)}: {'fits' if row.fits else 'too much'}"
        above(axes, x, bottom, said, 3, fontsize=10.5, weight="bold" if row.fits else "normal", zorder=5)
    axes.axhline(memory / scale.bytes, color=INK, linewidth=1.2, linestyle="--", zorder=4)  # behind the labels
    place: Look = {"textcoords": "offset points", "ha": "right", "zorder": 5}
    axes.annotate(
        f"{in_bytes(memory)} per GPU", (len(rows) - 0.58, memory / scale.bytes), (0, 3), fontsize=9.5, **place
    )
    names = [f"{row.stage} {STAGES[row.stage]}\nlargest: {in_parameters(row.largest or 0)}" for row in rows]
    axes.set_xticks(range(len(rows)), names, fontsize=10.5, color=INK)
    axes.set_ylim(0, 1.15 * highest / scale.bytes)
    axes.set_xlim(-0.55, len(rows) - 0.45)
    axes.set_ylabel(f"{scale.name} per rank", color=GREY)
    used = [*CATEGORIES, *(["activations"] if rows[0].activations else [])]
    place = {"loc": "upper center", "bbox_to_anchor": (0.52, 0.835), "ncols": len(used)}
    legend(figure, patches(used), borderpad=0.0, columnspacing=1.2, fontsize=9.5, **place)
    return figure, sentence


def _sentence(rows: Sequence[Row], memory: float) -> str:
    fitting = [STAGES[row.stage] for row in rows if row.fits]
    needs = ", ".join(f"{STAGES[row.stage]} {in_bytes(row.total)}" for row in rows)
    verdict = f"it fits with {', '.join(fitting)}" if fitting else "no stage fits"
    return f"A rank needs {needs}; in {in_bytes(memory)} {verdict}. Units in flight come on top."
