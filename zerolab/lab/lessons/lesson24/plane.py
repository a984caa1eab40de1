"""Local steps where they can be seen: a model of two parameters, of which each rank's loss has another best place.

walks = lab.walk(lab.PlainAverage)     # on a live rank: where its two parameters go, round by round
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

START = (-3.0, -6.0)
BEST = ((1.0, 0.9), (-1.0, 0.7), (0.6, -0.9), (-0.6, -0.7))  # of each rank; their mean is the origin
STEEPNESS = (1.0, 0.12)  # the valley of every loss: steep across, flat along
RATE = 0.25

Walk = list[list[tuple[float, float]]]


class PlainAverage:
    """The outer step without an optimizer: all go on from the mean of their parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params

    @torch.no_grad()
    def step(self) -> None:
        for param in self.params:
            dist.all_reduce(param)
            param.div_(dist.get_world_size())


def walk(outer: Callable[..., Any], rounds: int = 8, steps: int = 4, **options: float) -> Walk:
    """The points of each round: where it began, and after each local step. The last has one point, where all ended.

    outer: makes an outer optimizer of a list of parameters and `options`.
    """
    steepness, best = torch.tensor(STEEPNESS), torch.tensor(BEST[dist.get_rank() % len(BEST)])
    place = nn.Parameter(torch.tensor(START))
    optimizer = outer([place], **options)
    found: Walk = []
    for _ in range(rounds):
        found.append([as_point(place)])
        for _ in range(steps):
            with torch.no_grad():
                place.sub_(RATE * steepness * (place - best))  # SGD
            found[-1].append(as_point(place))
        optimizer.step()
    return [*found, [as_point(place)]]


def as_point(place: Tensor) -> tuple[float, float]:
    x, y = place.tolist()
    return x, y
