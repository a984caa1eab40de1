"""What lesson 10 is made of beside the engine: an allocator of one flat buffer, and the link to the host."""

from __future__ import annotations

import pytest
import torch

import zerolab
from zerolab.lab.lessons.lesson10.arena import GRAIN, Arena, OutOfMemory, replay
from zerolab.lab.lessons.lesson10.host import HostLink
from zerolab.lab.lessons.lesson10.moment import Moment
from zerolab.measure import timeline
from zerolab.tasks.models import GPT, Block


def test_first_fit_and_holes_that_grow_together():
    arena = Arena(8 * GRAIN)
    a, b, c = (arena.take(2 * GRAIN) for _ in range(3))
    assert (a, b, c) == (0, 2 * GRAIN, 4 * GRAIN) and arena.free == arena.largest == 2 * GRAIN
    arena.give(a)
    assert (arena.free, arena.largest, len(arena.holes)) == (4 * GRAIN, 2 * GRAIN, 2)
    with pytest.raises(OutOfMemory, match=r"1.54 kB wanted, and 2.05 kB are free: 2 holes, the largest of 1.02 kB"):
        arena.take(3 * GRAIN)
    assert arena.take(1) == 0  # the lowest hole, and a whole grain
    assert arena.holes[0] == (GRAIN, 2 * GRAIN)
    arena.give(c)
    assert arena.holes == [(GRAIN, 2 * GRAIN), (4 * GRAIN, 8 * GRAIN)]
    arena.give(b)
    arena.give(0)
    assert arena.holes == [(0, 8 * GRAIN)] and arena.top == 6 * GRAIN


def test_a_write_over_a_piece_is_noticed():
    arena = Arena(4 * GRAIN)
    piece = arena.take(GRAIN)
    arena.memory[piece + 3] = 0
    with pytest.raises(AssertionError, match="somebody wrote"):
        arena.give(piece)


def recorded(stage):
    torch.manual_seed(0)
    zero = zerolab.STAGES[stage](GPT(layers=3, width=64, context=16), units=[Block])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    x = torch.randint(0, 256, (8, 16), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        with timeline(zero, optimizer) as line:
            zero.model(x, x).backward()
            optimizer.step()
            optimizer.zero_grad()
    return line


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_again_in_one_buffer(ranks, stage):
    line = ranks.run(recorded, stage, ranks=2)[0]
    whole = replay(line)
    assert line.peak <= whole.needed <= whole.arena.size == whole.arena.top
    assert whole.needed < 1.1 * line.peak + GRAIN * len(line.buffers)  # sizes are rounded up
    with pytest.raises(OutOfMemory):
        replay(line, whole.arena.size - GRAIN)
    alive = line.alive(len(line.events))
    assert whole.arena.size - whole.arena.free == sum(-(-size // GRAIN) * GRAIN for size in alive.values())
    for pieces in ([piece for piece in whole.pieces if piece.kind == "gradients"], whole.pieces):
        for i, one in enumerate(pieces):  # no two share an address at any moment
            for other in pieces[i + 1 :]:
                together = one.begin < other.end and other.begin < one.end
                overlap = one.start < other.start + other.nbytes and other.start < one.start + one.nbytes
                assert not (together and overlap), (one, other)
    apart = replay(line, apart=["gradients"], until="backward")
    starts = [piece.start for piece in apart.pieces if piece.kind == "gradients"]
    others = [piece.start for piece in apart.pieces if piece.kind != "gradients"]
    assert max(starts) < min(others)


def test_the_link_counts_copies():
    link, shard = HostLink(), torch.ones(10, dtype=torch.bfloat16)
    host = link.to_host(shard)
    host += 1
    assert shard.sum() == 10 and host.dtype == torch.bfloat16 and (link.down, link.up) == (20, 0)
    master = torch.full((10,), 3.0, requires_grad=True)
    link.to_device(shard, master)
    assert shard.tolist() == [3.0] * 10 and not shard.requires_grad and (link.down, link.up) == (20, 40)


def test_a_moment_comes_again():
    """The same draws in the same dtype, and nobody who draws afterwards notices."""
    x = torch.ones(4, 4)
    torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16):
        moment = Moment("cpu")
        first = torch.rand(3), (x @ x).dtype
    torch.manual_seed(2)
    with moment.again():
        again = torch.rand(3), (x @ x).dtype
    after = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(first[0], again[0]) and first[1] == again[1] == torch.bfloat16
    assert torch.equal(after, torch.rand(3)) and (x @ x).dtype == torch.float32
