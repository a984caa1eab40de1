"""What lesson 16 shows: the paper's first figure from simulated runs, and what plans for a cluster cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from matplotlib.figure import Figure

from zerolab.lab.exercises.values import counted
from zerolab.lab.lessons.lesson16 import DAYS, DOLLARS, GPU, bytes_held, days, dollars
from zerolab.lab.plots import stacks
from zerolab.measure.simulation import Simulation


def figure_1(stages: Sequence[type], runs: Sequence[Simulation], yours: Sequence[bool]) -> tuple[Figure, str]:
    """What a rank holds in each stage; a bar is solid where the class is yours, else hatched."""
    bars = {
        stage.__name__: {kind: size / 1e9 for kind, size in run.states.items()}
        for stage, run in zip(stages, runs, strict=True)
    }
    title, subtitle = "Figure 1 of the paper, simulated", "7.5 billion parameters on 64 GPUs, bf16 with Adam"
    picture, _ = stacks(bars, title, subtitle, "GB", learner=yours)
    said = ", ".join(f"{sum(of.values()):.3g}" for of in bars.values())
    said += " GB: stage 1 shards optimizer state and masters, stage 2 gradients too, stage 3 weights too."
    return picture, said


def weigh_plan(stage: int, gpus: int, sequences: int) -> str:
    held, long, cost = bytes_held(stage, gpus, sequences), days(stage, gpus, sequences), dollars(stage, gpus, sequences)
    return f"{held / 1e9:.1f} GB, {long:.1f} days, ${cost:,.0f}"


def other_plans() -> str:
    """A line for each plan with as many sequences as fit."""
    lines = []
    for stage, gpus in product((1, 2, 3), (8, 16, 24, 32)):
        fits = [number for number in range(1, 7) if bytes_held(stage, gpus, number) <= GPU]
        if not fits:
            continue
        plan = stage, gpus, fits[-1]
        verdict = "too slow" if days(*plan) > DAYS else "too expensive" if dollars(*plan) > DOLLARS else "good"
        name = f"stage {stage}, {gpus:2} GPUs, {counted(fits[-1], 'sequence')}:"
        lines.append(f"{name:30} {days(*plan):4.1f} days, ${dollars(*plan):6,.0f} {verdict}")
    return "\n".join(lines)
