"""The pictures of the course. Each is a function of what was measured, and returns the sentence it should say."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

# The same thing has the same colour in the whole course (Okabe and Ito's palette, safe for the colour-blind), and
# a hatch, so that nothing is said by colour alone.
COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#E69F00",
    "optimizer": "#009E73",
    "activations": "#CC79A7",
    "communication": "#56B4E9",
}
HATCHES = {"parameters": "//", "gradients": "..", "optimizer": "\\\\", "activations": "xx", "communication": "--"}
LABELS = {"optimizer": "optimizer state"}


def ladder(report: dict[str, Any], file: str, precision: str = "fp32") -> str:
    """The ladder: a stacked bar per stage of the bytes a rank holds, and the formula as a line across it.

    report: what `zerolab demo --json` writes. Saves a PNG and returns the sentence.
    """
    names = {"0": "DDP", "1": "ZeRO-1", "2": "ZeRO-2", "3": "ZeRO-3"}
    stages = report["stages"]
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for x, result in enumerate(stages.values()):
        bottom = 0.0
        for category, size in result["state_bytes"].items():
            height = size / 1e6
            axes.bar(
                x,
                height,
                0.62,
                bottom,
                color=COLOURS[category],
                edgecolor="white",
                hatch=HATCHES[category],
                label=LABELS.get(category, category) if x == 0 else None,
            )
            bottom += height
        formula = sum(result["formula_bytes"].values()) / 1e6
        axes.hlines(formula, x - 0.4, x + 0.4, color="black", linewidth=1.6, label="formula" if x == 0 else None)
        axes.annotate(f"{bottom:.1f} MB", (x, bottom), (0, 5), textcoords="offset points", ha="center", weight="bold")
    axes.set_xticks(range(len(stages)), [names[stage] for stage in stages])
    axes.set_ylabel("MB held by a rank when backward returns")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.06)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    millions = report["parameters"] / 1e6
    axes.set_title(
        f"The same model, the same numbers: {millions:.1f}M parameters, {report['ranks']} ranks, {precision}, Adam"
    )
    figure.savefig(file, dpi=110, facecolor="white")
    totals = {names[stage]: sum(result["state_bytes"].values()) / 1e6 for stage, result in stages.items()}
    steps = ", ".join(f"{name} {total:.1f} MB" for name, total in totals.items())
    first, *_, last = [*totals.values(), *totals.values()]
    return f"Each stage takes one colour down: {steps}; the last holds {last / first:.0%} of the first."
