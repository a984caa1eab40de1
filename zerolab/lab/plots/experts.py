"""How many tokens each expert gets: a skyline, and the capacity that cuts its towers off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from zerolab.lab.plots.style import COLOURS, GREY, HATCHES, INK, PALE, Look, frame, many, plain


def tokens_by_expert(
    ways: Mapping[str, Sequence[int]], title: str, capacity: float, learner: bool = False
) -> tuple[Figure, str]:
    """A panel for each way, in it a bar for each expert. capacity: how many tokens an expert takes, as a dashed line.

    learner: whether the learner's code has sent the tokens. Its bars are solid, the package's hatched.
    """
    if not ways or not all(map(sum, ways.values())):
        raise ValueError("no tokens to draw")
    experts = max(map(len, ways.values()))
    subtitle = f"tokens of a step, {many(experts, 'expert')}; dashed: the capacity; hollow: beyond it; dotted: the mean"
    sentence = _sentence(ways, capacity)
    figure = frame(title, subtitle, sentence, (9.0, 4.3))
    highest = 1.15 * max(max(counts) for counts in ways.values())
    width = 0.91 / len(ways)
    for number, (name, counts) in enumerate(ways.items()):
        axes = figure.add_axes((0.075 + width * number, 0.27, width - 0.035, 0.47))
        plain(axes, grid="y")
        kept = [min(count, capacity) for count in counts]
        look: Look = {"color": COLOURS["activations"], "edgecolor": "white", "linewidth": 0.4}
        axes.bar(range(len(counts)), kept, 0.8, zorder=2, hatch=None if learner else HATCHES["activations"], **look)
        over: Look = {"color": "white", "edgecolor": INK, "linewidth": 1.0}
        for expert, count in enumerate(counts):
            if count > capacity:
                axes.bar(expert, count - capacity, 0.8, capacity, zorder=2, **over)
        axes.axhline(capacity, color=INK, linewidth=1.4, linestyle="--", zorder=4)
        axes.axhline(sum(counts) / len(counts), color=GREY, linewidth=1.4, linestyle=":", zorder=4)
        axes.set_xticks(range(len(counts)), [str(expert) for expert in range(len(counts))], color=INK)
        axes.set_ylim(0, highest)
        axes.set_title(name, loc="left", fontsize=11, color=INK, pad=5)
        axes.set_xlabel("expert", color=GREY)
        if number:
            axes.tick_params(labelleft=False)
        axes.grid(color=PALE, axis="y")
    return figure, sentence


def _sentence(ways: Mapping[str, Sequence[int]], capacity: float) -> str:
    said = []
    for name, counts in ways.items():
        mean, over = sum(counts) / len(counts), sum(max(0, count - capacity) for count in counts)
        most, beyond = max(counts) / mean, 100 * over / sum(counts)
        said.append(f"{name}: the fullest expert has {most:.2f} times the mean, {beyond:.0f} % are beyond the capacity")
    return "; ".join(said) + "."
