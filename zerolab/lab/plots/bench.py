"""How long a step takes: every stage beside its peers, and the floor below both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zerolab.lab.plots.style import GREY, INK, above, frame, legend, many, plain

OURS, PEER, DEEPSPEED, FLOOR = "#0072B2", "#BBBBBB", "#E8C547", "#1a1a1a"


def step_times(reports: Sequence[dict[str, Any]]) -> tuple[Figure, str]:
    """reports: what `zerolab bench` measured, one report for each precision, all on the same number of ranks."""
    ranks = reports[0]["ranks"]
    sentence = _sentence(reports)
    rounds = reports[0]["rounds"]
    subtitle = f"{many(ranks, 'rank')}, seconds per step, median of {rounds} rounds; above a peer: our time over its"
    figure = frame("Every stage beside its peers", subtitle, sentence, (9.0, 5.2))
    width = 0.92 / len(reports)
    for number, report in enumerate(reports):
        axes = figure.add_axes((0.07 + number * width, 0.36, width - 0.05, 0.38))
        _panel(axes, report)
    handles = [Patch(facecolor=OURS, hatch="//", edgecolor="white", label="this package")]
    handles += [Patch(facecolor=PEER, edgecolor="white", label="torch's peer")]
    if any(_is_deepspeed(pair) for report in reports for pair in report["pairs"]):
        handles += [Patch(facecolor=DEEPSPEED, hatch="..", edgecolor="white", label="DeepSpeed")]
    handles += [Patch(facecolor=FLOOR, label="the floor: no communication")]
    legend(figure, handles, loc="upper center", bbox_to_anchor=(0.5, 0.86), ncols=4, borderpad=0.0, fontsize=10)
    return figure, sentence


def _is_deepspeed(pair: dict[str, Any]) -> bool:
    return pair["peer"].startswith("DeepSpeed")


def _panel(axes: Any, report: dict[str, Any]) -> None:
    """A group for each of our stages: the stage, then its peers, each with our time over its time above the bar."""
    plain(axes, grid="y")
    seconds = report["step_seconds"]
    stages = list(dict.fromkeys(pair["ours"] for pair in report["pairs"]))
    for x, ours in enumerate(stages):
        pairs = [pair for pair in report["pairs"] if pair["ours"] == ours]
        left = x - 0.14 * len(pairs)  # centres the group above its name
        axes.bar(left, seconds[ours], 0.27, color=OURS, hatch="//", edgecolor="white", zorder=2)
        for k, pair in enumerate(pairs, 1):
            look = {"color": DEEPSPEED, "hatch": ".."} if _is_deepspeed(pair) else {"color": PEER}
            height = seconds[pair["peer"]]
            axes.bar(left + 0.28 * k, height, 0.27, edgecolor="white", zorder=2, **look)
            above(axes, left + 0.28 * k, height, f"{pair['wall_ratio']:.2f}", 3, fontsize=7)
    axes.axhline(seconds["no communication"], color=FLOOR, linewidth=1.2, zorder=4)
    short = {"ZeroRedundancyOptimizer": "ZeroRedund.\nOptimizer", "FSDP2 reshard": "FSDP2\nreshard"}
    peers = {pair["ours"]: pair["peer"] for pair in report["pairs"] if not _is_deepspeed(pair)}
    names = [f"{ours}\n{short.get(peers.get(ours, ''), peers.get(ours, ''))}" for ours in stages]
    axes.set_xticks(range(len(names)), names, fontsize=9, color=INK)
    axes.set_ylim(0, 1.18 * max(seconds.values()))
    axes.set_title(report["precision"], loc="left", fontsize=11, color=INK)
    axes.set_ylabel("seconds", color=GREY, fontsize=9)


def _sentence(reports: Sequence[dict[str, Any]]) -> str:
    parts = []
    for report in reports:
        torchs = [pair for pair in report["pairs"] if not _is_deepspeed(pair)]
        part = ", ".join(f"{pair['ours']} {pair['wall_ratio']:.2f} of {pair['peer']}" for pair in torchs)
        others = [f"{pair['ours']} {pair['wall_ratio']:.2f}" for pair in report["pairs"] if _is_deepspeed(pair)]
        parts.append(f"{report['precision']}: {part}" + (f", of DeepSpeed's stages {', '.join(others)}" * bool(others)))
    return f"Our step times as fractions of the peers': in {'; in '.join(parts)}."
