"""`Recorded`: what it expects of a pass, and what it takes back when a pass turns out differently."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zerolab.lab.lessons.lesson09.recorded import Recorded, holds_memory

pytestmark = pytest.mark.slow


class Chosen(nn.Module):
    """Linear layers, called in the order of `path`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.path = (1, 0, 2)

    def forward(self, x):
        for number in self.path:
            x = torch.tanh(self.layers[number](x))
        return x.sum()


class Watched(Recorded):
    """Starts what comes next, and notes at each unit what was expected and how much was there ahead."""

    def pre_forward(self, unit):
        self.seen.append((unit.name, [other.name for other in self.coming]))
        unit.gather()
        for other in self.coming[: self.ahead]:
            other.start_gather()

    pre_backward = pre_forward


def passes(paths):
    torch.manual_seed(0)
    zero = Watched(Chosen(), units=[nn.Linear])
    found = []
    for path in paths:
        zero.model.path, zero.seen = path, []
        loss = zero.model(torch.ones(2, 3))
        left = sum(map(holds_memory, zero.units))
        forward, zero.seen = zero.seen, []
        loss.backward()
        found.append((forward, zero.seen, left + sum(map(holds_memory, zero.units)), zero.coming))
    return found


def test_a_pass_is_expected_to_be_like_the_one_before(ranks):
    first, second, third = ranks.run(passes, [(1, 0, 2)] * 3, ranks=2)[0]
    names = ["layers.1", "layers.0", "layers.2"]
    assert [unit for unit, _ in first[0]] == names and not any(coming for _, coming in first[0] + first[1])
    for forward, backward, left, coming in (second, third):
        assert forward == [(name, names[i + 1 :]) for i, name in enumerate(names)]
        assert backward == [(name, names[::-1][i + 1 :]) for i, name in enumerate(names[::-1])]
        assert left == 0 and coming == []


def test_what_was_gathered_for_nothing_is_released(ranks):
    for found in ranks.run(passes, [(1, 0, 2), (1, 2), (1, 2)], ranks=2):
        _, (forward, _, left, coming), (again, _, _, _) = found
        assert forward == [("layers.1", ["layers.0", "layers.2"]), ("layers.2", [])]
        assert left == 0 and coming == []
        assert again == [("layers.1", ["layers.2"]), ("layers.2", [])]


def held_by_itself():
    """The most units that hold full parameters at a time in the third forward."""
    zero, held = Recorded(Chosen(), units=[nn.Linear]), []
    for layer in zero.model.layers:
        layer.register_forward_pre_hook(lambda *_: held.append(sum(map(holds_memory, zero.units))))
    for _ in range(3):
        held.clear()
        zero.model(torch.ones(2, 3)).backward()
    return held


def test_by_itself_it_prefetches_nothing(ranks):
    assert ranks.run(held_by_itself, ranks=2) == [[1, 1, 1]] * 2
