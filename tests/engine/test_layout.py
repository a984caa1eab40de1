"""layout.py is pure arithmetic, so it is tested for any shapes, any world size and any alignment."""

from itertools import pairwise
from math import prod

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerolab import Layout
from zerolab.engine import layout

shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)  # () is a scalar; a 0 makes a tensor without elements
many_shapes = st.lists(shapes, max_size=6)
world_sizes = st.integers(1, 9)
alignments = st.integers(1, 16)


def numbered(shape_list: list[tuple[int, ...]]) -> list[tuple[str, torch.Tensor]]:
    """Tensors whose elements are all different, over all of them together."""
    start, tensors = 1, []
    for i, shape in enumerate(shape_list):
        tensors.append((f"p{i}", torch.arange(start, start + prod(shape)).view(shape)))
        start += prod(shape)
    return tensors


def filled(made: Layout, tensors: list[tuple[str, torch.Tensor]], before: int = 0) -> torch.Tensor:
    """A flat storage, `before` elements into a larger one, with the tensors' values in it."""
    flat = torch.zeros(before + made.size + 3, dtype=torch.int64)[before : before + made.size]
    for view, (_, tensor) in zip(made.views(flat), tensors, strict=True):
        view.copy_(tensor)
    return flat


cases = given(many_shapes, world_sizes, alignments)
hard = example([(), (0,), (3, 0, 2), (1,), (7, 1), ()], 9, 16)


@settings(max_examples=200, deadline=None)
@cases
@hard
@example([], 3, 4)
@example([(0,), (0, 5)], 4, 1)
def test_shards_are_equal_and_padding_is_small(shape_list, n, align):
    made = Layout(numbered(shape_list), n, align)
    assert made.size == n * made.shard_size and made.shard_size >= 1
    assert made.numel == sum(prod(shape) for shape in shape_list)
    assert [made.bounds(rank) for rank in range(n)] == [
        (rank * made.shard_size, (rank + 1) * made.shard_size) for rank in range(n)
    ]
    assert all(slot.offset % align == 0 for slot in made.slots)
    assert all(a.end <= b.offset < a.end + align for a, b in pairwise(made.slots))
    end = made.slots[-1].end if made.slots else 0
    assert made.size - end < n or (end == 0 and made.size == n)  # at least one element a rank, even of nothing
    assert made.size - made.numel < n + align * max(1, len(shape_list))


@settings(max_examples=200, deadline=None)
@cases
@hard
def test_gaps_are_the_complement_of_the_slots(shape_list, n, align):
    made = Layout(numbered(shape_list), n, align)
    covered = torch.zeros(made.size, dtype=torch.int64)
    for slot in made.slots:
        covered[slot.offset : slot.end] += 1
    for start, stop in made.gaps:
        assert start < stop
        covered[start:stop] += 1
    assert (covered == 1).all()
    assert all(a[1] <= b[0] for a, b in pairwise(made.gaps))


@settings(max_examples=200, deadline=None)
@cases
@hard
def test_round_trip_is_exact(shape_list, n, align):
    tensors = numbered(shape_list)
    made = Layout(tensors, n, align)
    flat = filled(made, tensors, before=5)
    for (name, tensor), slot, view in zip(tensors, made.slots, made.views(flat), strict=True):
        assert (slot.name, slot.shape, slot.numel) == (name, tuple(tensor.shape), tensor.numel())
        assert view.shape == tensor.shape and view.stride() == tensor.stride() and torch.equal(view, tensor)
        assert view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    shards = [made.shard(flat, rank) for rank in range(n)]
    assert {shard.shape for shard in shards} == {(made.shard_size,)}
    assert torch.equal(torch.cat(shards), flat)
    again = torch.cat([shard.clone() for shard in shards])  # what an all-gather does
    assert all(torch.equal(view, tensor) for view, (_, tensor) in zip(made.views(again), tensors, strict=True))


@settings(max_examples=200, deadline=None)
@cases
@hard
def test_slices_are_disjoint_complete_and_in_order(shape_list, n, align):
    tensors = numbered(shape_list)
    made = Layout(tensors, n, align)
    flat = filled(made, tensors)
    pieces: list[list[torch.Tensor]] = [[] for _ in tensors]
    for rank in range(n):
        shard = made.shard(flat, rank).clone()
        slices = made.slices(shard, rank)
        assert len(slices) == len(tensors)
        for i, (slot, piece) in enumerate(zip(made.slots, slices, strict=True)):
            start, stop = made.owned(slot, rank)
            assert piece.shape == (stop - start, *[1] * (len(slot.shape) - 1))
            assert piece.dim() == max(1, len(slot.shape))
            assert torch.equal(piece.flatten(), flat[start:stop])
            assert piece.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr()
            pieces[i].append(piece.flatten())
    # All elements are different, so equal sequences mean: each element on exactly one rank, and in order.
    for (_, tensor), parts in zip(tensors, pieces, strict=True):
        assert torch.equal(torch.cat(parts), tensor.flatten())


@settings(max_examples=100, deadline=None)
@given(st.data(), world_sizes, alignments)
def test_dense_strides_are_kept(data, n, align):
    tensors = []
    for name, tensor in numbered(data.draw(many_shapes)):
        tensors.append((name, tensor.permute(data.draw(st.permutations(range(tensor.dim()))))))
    made = Layout(tensors, n, align)
    flat = filled(made, tensors)
    for (_, tensor), slot, view in zip(tensors, made.slots, made.views(flat), strict=True):
        assert slot.stride == view.stride() == tensor.stride()
        assert torch.equal(view, tensor)
        in_memory = tensor.as_strided((tensor.numel(),), (1,))
        assert torch.equal(flat[slot.offset : slot.end], in_memory)


def test_channels_last_stays_channels_last():
    weight = torch.randn(6, 3, 5, 5).to(memory_format=torch.channels_last)
    made = Layout([("conv.weight", weight)], 4, 4)
    view = made.views(torch.zeros(made.size))[0]
    assert view.is_contiguous(memory_format=torch.channels_last) and not view.is_contiguous()


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), world_sizes)
def test_tensors_that_are_not_dense_become_dense(rows, columns, n):
    sliced = torch.arange(rows * 12).view(rows, 12)[:, : 2 * columns : 2]  # with holes
    expanded = torch.arange(columns).expand(rows, columns)  # overlapping
    tensors = [("sliced", sliced), ("expanded", expanded)]
    made = Layout(tensors, n)
    flat = filled(made, tensors)
    assert made.numel == 2 * rows * columns
    for view, (_, tensor) in zip(made.views(flat), tensors, strict=True):
        assert torch.equal(view, tensor)


def test_meta_tensors_have_a_layout():
    made = Layout([("w", torch.empty(3, 5, device="meta")), ("b", torch.empty((), device="meta"))], 4, 4)
    assert [tuple(view.shape) for view in made.views(torch.empty(made.size, device="meta"))] == [(3, 5), ()]


def test_the_picture_in_the_docstring_is_true():
    lines = [line.split() for line in layout.__doc__.splitlines()]
    flat = next(line[1:] for line in lines if line[:1] == ["flat"])
    shard = next(line[1:] for line in lines if line[:1] == ["shard"])
    letters, owners = [x for x in flat if x in "abc."], [int(x) for x in shard if x in "0123"]
    owners = owners[: len(letters)]
    made = Layout([("a", torch.empty(5)), ("b", torch.empty(4)), ("c", torch.empty(6))], 4)
    drawn = ["."] * made.size
    for slot in made.slots:
        drawn[slot.offset : slot.end] = slot.name * slot.numel
    assert drawn == letters
    assert [i // made.shard_size for i in range(made.size)] == owners
    assert (made.numel, made.size - made.numel, made.shard_size) == (15, 1, 4)
    slices = made.slices(made.shard(torch.arange(made.size), 1), 1)
    assert [piece.tolist() for piece in slices] == [[4], [5, 6, 7], []]


@pytest.mark.parametrize(("n", "align"), [(0, 1), (-1, 1), (2, 0)])
def test_world_size_and_alignment_start_at_one(n, align):
    with pytest.raises(ValueError, match=f"{n} and {align}"):
        Layout([("a", torch.empty(5))], n, align)
