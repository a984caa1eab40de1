"""How lesson 11 shows what it has measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.losses import curves


def going_on(
    before: Sequence[float], after: Mapping[str, Sequence[float]], moved: Mapping[str, float]
) -> tuple[Figure, str]:
    """The losses of steps 51 to 60, and in each way of going on those of 61 to 70.

    moved: how many learning rates the median element moved in step 61.
    """
    alone, never = (after[name][1] for name in ("weights alone", "never stopped"))
    said = (
        f"The stop is after step 60. At step 62 the loss is {alone:.2f} with weights alone, not {never:.2f}: the "
        f"median element had moved {moved['weights alone']:.2f} learning rates, not {moved['never stopped']:.2f}."
    )
    lines = {name: [*before, *losses] for name, losses in after.items()}
    return curves(lines, "Going on after a stop", "Steps 51 to 70 of the run", "loss", said, first=51)
