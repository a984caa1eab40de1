"""Four ranks whose batches have different numbers of tokens: what a token weighs, and the gradient of a step.

A step of SGD with a rate of 1 subtracts the gradient from the parameters. So how far they move is the gradient, in
every stage alike.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zerolab
from zerolab.tasks.data import text
from zerolab.tasks.models import Block, small_gpt

RANKS, PIECES, PLACES = 4, 4, 64


def uneven_batch(rank: int) -> Tensor:
    """Four pieces of the text, (4, 64): of 64 bytes on rank 0, 32 on rank 1, 16, and 8, padded with 0."""
    length, start = PLACES >> rank, 1000 + 500 * rank
    pieces = text()[start : start + PIECES * length].view(PIECES, length).long()
    return F.pad(pieces, (0, PLACES - length))


def _predicted(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()


def token_weight(tokens: Tensor) -> float:
    """What the rank's first token weighs in the mean over ranks of the ranks' mean losses.

    The gradient of a token's loss is softmax - 1 at its target, times the weight of the token.
    """
    logits = small_gpt()(tokens)  # (4, 64, 256)
    logits.retain_grad()
    F.cross_entropy(*_predicted(logits, tokens), ignore_index=0).backward()
    assert logits.grad is not None
    target = int(tokens[0, 1])
    weight = logits.grad[0, 0, target] / (logits[0, 0].softmax(0)[target] - 1)
    return weight.item() / dist.get_world_size()


def gradient_with(loss_of: Callable[[Tensor, Tensor, int], Tensor], stage: int) -> Tensor:
    """The gradient of a step of all ranks, if each calls backward on loss_of(logits, tokens, number of ranks)."""
    model, tokens = small_gpt(), uneven_batch(dist.get_rank())
    zero = zerolab.shard(model, stage, units=[Block])
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_of(model(tokens), tokens, dist.get_world_size()).backward()
    sgd.step()
    with zero.full_parameters():
        return _moved(model)


def gradient_in_micro_batches(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The gradient that one process accumulates over the four batches; loss_of(predicted, targets) of each."""
    model = small_gpt()
    for tokens in map(uneven_batch, range(RANKS)):
        loss_of(*_predicted(model(tokens), tokens)).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return _moved(model)


def gradient_alone() -> Tensor:
    """The gradient of one process that has all the tokens in one batch: that of their mean loss."""
    model, tokens = small_gpt(), torch.cat([uneven_batch(rank) for rank in range(RANKS)])
    F.cross_entropy(*_predicted(model(tokens), tokens), ignore_index=0).backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return _moved(model)


def _moved(model: nn.Module) -> Tensor:
    pairs = zip(model.parameters(), small_gpt().parameters(), strict=True)
    return torch.cat([(param.detach() - before).flatten() for param, before in pairs])
