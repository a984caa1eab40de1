"""A recommender whose batch reads a few rows of a large table: what travels, and which rows change."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerolab
from zerolab.measure import ledger

ROWS, WIDTH = 20_000, 16


class Recommender(nn.Module):
    """Product numbers (B,) -> scores (B,)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.score = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1))

    def forward(self, products: Tensor) -> Tensor:
        return self.score(self.table(products)).squeeze(1)


def table_traffic(count: int) -> tuple[int, int]:
    """In stage 2, with `count` rows in this rank's batch: (bytes of the table's gradient that this rank sends, rows).

    rows: how many AdamW changes in the step after, whose batch reads a single row. Call it on all ranks.
    """
    torch.manual_seed(0)
    model = Recommender()
    zero = zerolab.Zero2(model, units=[nn.Embedding])
    adam = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    sent, changed = 0, 0
    for products in (torch.randperm(ROWS, generator=generator)[:count], torch.tensor([ROWS - 1])):
        with zero.full_parameters():
            before = model.table.weight.detach().clone()
        with ledger(zero) as book:
            model(products).square().mean().backward()
        sent = sent or sum(call.sent for call in book.calls if (call.unit, call.op) == ("table", "reduce_scatter"))
        adam.step()
        adam.zero_grad()
        with zero.full_parameters():
            changed = int((model.table.weight.detach() != before).any(dim=1).sum())
    return sent, changed
