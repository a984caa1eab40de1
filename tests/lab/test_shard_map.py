"""The picture of shard maps: who owns which element, and how full the fullest rank is."""

from __future__ import annotations

import pytest

from zerolab.lab.lessons.lesson23.blocks import blocks_and_owners, in_other_blocks
from zerolab.lab.plots import Piece, largest_share, png, shard_map

pytestmark = pytest.mark.slow

EVEN = [Piece(3, 0), Piece(3, 1)]


def test_the_fullest_rank() -> None:
    assert largest_share(EVEN, 2) == 1.0
    assert largest_share([Piece(4, 0), Piece(1, 1), Piece(1, 0)], 2) == 10 / 6
    assert largest_share([Piece(6, 1)], 3) == 3.0


def test_the_picture_says_what_it_shows() -> None:
    figure, sentence = shard_map({"flat": EVEN, "in turn": [Piece(5, 0), Piece(1, 1)]}, 2)
    assert "1.00 flat, 1.67 in turn" in sentence
    axes = figure.axes[0]
    assert [patch.get_width() for patch in axes.patches] == [3, 3, 5, 1]
    assert len({patch.get_facecolor() for patch in axes.patches}) == 2
    assert len(png(figure)) > 1000


def test_ways_must_deal_out_the_same_elements() -> None:
    with pytest.raises(ValueError, match="'short' and 'flat' do not divide the same number of elements"):
        shard_map({"flat": EVEN, "short": EVEN[:1]}, 2)


def test_blocks_have_owners_and_a_border_moves_those_behind_it() -> None:
    assert blocks_and_owners([10, 3], [0, 6, 13], 4) == [(4, 0), (2, 0), (2, 1), (2, 1), (3, 1)]
    assert in_other_blocks([10, 3], [0, 6, 13], 4) == 6  # 4 and 5 alone, then 6 to 9
    assert in_other_blocks([10, 3], [0, 8, 13], 4) == in_other_blocks([10, 3], [0, 0, 13], 4) == 0
