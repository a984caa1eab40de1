"""Sharding over all GPUs or within a node: who holds which shard, which wires carry it, and what a step takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from zerolab.lab.plots.style import COLOURS, GREY, INK, Look, above, frame, legend, plain

SLOW, FAST = COLOURS["communication"], "#8a8a8a"
TIMES = {  # the parts of a step's time: colour and hatch
    "computing": ("#BBBBBB", ""),
    "sending": (COLOURS["communication"], "--"),
    "latency": (GREY, "xx"),
}


def sharding_map(nodes: int, per_node: int) -> tuple[Figure, str]:
    """One group over all GPUs beside a group in each node. A square is a GPU; the number in it is its shard."""
    if nodes < 2 or per_node < 2:
        raise ValueError(f"{nodes} nodes of {per_node} GPUs: there must be two or more of each")
    sentence = (
        f"Left: each of {nodes * per_node} GPUs holds a different shard, and every gather crosses the slow wires "
        f"between nodes. Right: a node of {per_node} holds all shards, and only gradients leave it."
    )
    height = 2.1 + 0.5 * nodes
    figure = frame("Over all GPUs, or within a node", "rows are nodes, squares are GPUs", sentence, (9.0, height))
    for panel, title in enumerate(("flat: one group", "hybrid: a group in each node, and one for each shard")):
        axes = figure.add_axes((0.03 + 0.49 * panel, 0.62 / height, 0.46, (height - 2.0) / height))
        axes.set_xlim(-1.0, per_node - 0.2)
        axes.set_ylim(nodes - 0.4, -0.6)
        axes.axis("off")
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        _wires(axes, nodes, per_node, hybrid=bool(panel))
        for node in range(nodes):
            axes.text(-0.45, node, f"node {node}", ha="right", va="center", fontsize=8.5, color=GREY)
            for gpu in range(per_node):
                shard = gpu if panel else node * per_node + gpu
                look: Look = {"facecolor": "white", "edgecolor": COLOURS["gathered parameters"], "zorder": 3}
                axes.add_patch(Rectangle((gpu - 0.3, node - 0.28), 0.6, 0.56, linewidth=1.1, **look))
                axes.text(gpu, node, str(shard), ha="center", va="center", fontsize=8, color=INK, zorder=4)
    handles: list[Any] = [
        Patch(facecolor=FAST, label="fast wires within a node"),
        Patch(facecolor=SLOW, hatch="--", edgecolor="white", label="slow wires between nodes"),
    ]
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.7, 1 - 0.45 / height), ncols=2, borderpad=0.0)
    return figure, sentence


def _wires(axes: Any, nodes: int, per_node: int, hybrid: bool) -> None:
    fast: Look = {"color": FAST, "linewidth": 1.4, "zorder": 1}
    slow: Look = {"color": SLOW, "linewidth": 1.8, "linestyle": "--", "zorder": 2}
    for node in range(nodes):
        axes.plot([0, per_node - 1], [node, node], **fast)
    if hybrid:
        for gpu in range(per_node):
            axes.plot([gpu, gpu], [0, nodes - 1], **slow)
        return
    for node in range(nodes - 1):  # from the last GPU of a node to the first of the next
        axes.plot([per_node - 1, per_node - 1, 0, 0], [node, node + 0.5, node + 0.5, node + 1], **slow)


def where_time_goes(panels: Mapping[str, Mapping[int, Mapping[str, float]]], subtitle: str) -> tuple[Figure, str]:
    """`panels[name][GPUs]["computing" | "sending" | "latency"]` in seconds, stacked; all panels on one scale."""
    if not panels:
        raise ValueError("no times to draw")
    ends = []
    for name, bars in panels.items():
        first, last = (sum(bars[n].values()) for n in (min(bars), max(bars)))
        ends.append(f"{name} from {first:.1f} s on {min(bars):,} GPUs to {last:.1f} s on {max(bars):,}")
    sentence = f"If nothing overlaps, a step takes: {'; '.join(ends)}."
    figure = frame("Where a step's time goes", subtitle, sentence, (9.0, 4.7))
    highest = max(sum(parts.values()) for bars in panels.values() for parts in bars.values())
    width = 0.9 / len(panels)
    for number, (name, bars) in enumerate(panels.items()):
        axes = figure.add_axes((0.07 + number * width, 0.22, width - 0.035, 0.5))
        plain(axes, grid="y")
        for x, parts in enumerate(bars.values()):
            bottom = 0.0
            for kind, (colour, hatch) in TIMES.items():
                look: Look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4, "zorder": 2}
                axes.bar(x, parts[kind], 0.62, bottom, **look)
                bottom += parts[kind]
            above(axes, x, bottom, f"{bottom:.1f}", 3, fontsize=11, weight="bold")
        axes.set_xticks(range(len(bars)), [f"{n:,}" for n in bars], fontsize=10, color=INK)
        axes.set_xlabel("GPUs", color=GREY, fontsize=9.5)
        axes.set_ylim(0, 1.14 * highest)
        axes.set_title(name, loc="left", fontsize=11, color=INK)
        if number:
            axes.set_yticklabels([])
        else:
            axes.set_ylabel("seconds", color=GREY)
    handles = [Patch(facecolor=c, edgecolor="white", hatch=h, label=kind) for kind, (c, h) in TIMES.items()]
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.52, 0.83), ncols=3, borderpad=0.0)
    return figure, sentence
