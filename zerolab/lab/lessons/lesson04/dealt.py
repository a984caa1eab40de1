"""Four ways to deal a model's parameters out to ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import nn

from zerolab.lab.plots.shards import Piece

Sizes = Mapping[str, int]


def ways_to_deal(model: nn.Module, ranks: int) -> dict[str, list[Piece]]:
    """By block and by layer in turn; each tensor to the rank that has the least; flat, in equal parts.

    A piece is what has to stay together. The flat parts leave out the elements that do not divide by `ranks`.
    """
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    return {
        "blocks in turn": _in_turn(_together(sizes, _block), ranks),
        "layers in turn": _in_turn(_together(sizes, lambda name: name.rpartition(".")[0]), ranks),
        "tensors greedily": _greedy(sizes, ranks),
        "flat": [Piece(sum(sizes.values()) // ranks, rank) for rank in range(ranks)],
    }


def _block(name: str) -> str:
    """ "blocks.0.mlp.up.weight" is of "blocks.0", "token.weight" of "token"."""
    return ".".join(name.split(".")[: 2 if name.startswith("blocks") else 1])


def _together(sizes: Sizes, key: Callable[[str], str]) -> Sizes:
    """The elements of all parameters with the same key, added up."""
    pieces: dict[str, int] = {}
    for name, numel in sizes.items():
        pieces[key(name)] = pieces.get(key(name), 0) + numel
    return pieces


def _in_turn(pieces: Sizes, ranks: int) -> list[Piece]:
    return [Piece(numel, number % ranks) for number, numel in enumerate(pieces.values())]


def _greedy(pieces: Sizes, ranks: int) -> list[Piece]:
    """As torch's ZeroRedundancyOptimizer does: largest first, each to the rank that has the least."""
    load, owner = [0] * ranks, {}
    for name, numel in sorted(pieces.items(), key=lambda piece: -piece[1]):
        owner[name] = load.index(min(load))
        load[owner[name]] += numel
    return [Piece(numel, owner[name]) for name, numel in pieces.items()]
