"""What lessons 02 and 03 draw and count with."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from zerolab.engine.layout import Layout
from zerolab.lab.ranks.counting import calls

plots = pytest.importorskip("zerolab.lab.plots")

pytestmark = pytest.mark.slow


def small(picture):
    figure, sentence = picture
    assert 3_000 < len(plots.png(figure)) <= 60_000
    return sentence


def test_flat_storage():
    params = [("a", torch.empty(5)), ("b", torch.empty(2, 2)), ("c", torch.empty(3, 2))]
    said = small(plots.flat_storage(Layout(params, world_size=4)))
    assert said.startswith("3 parameters of 5, 4, 6 elements lie in one buffer of 16, 1 of them padding")
    with pytest.raises(ValueError, match="100 elements are too many"):
        plots.flat_storage(Layout([("a", torch.empty(100))], world_size=1))


def test_stacks():
    bars = {"Adam": {"parameters": 4, "gradients": 4, "optimizer": 8}, "SGD": {"parameters": 4, "gradients": 4}}
    assert small(plots.stacks(bars, "title", "subtitle", "bytes")) == "In bytes: Adam = 16; SGD = 8."
    figure, _ = plots.stacks(bars, "title", "subtitle", "bytes", learner=[False, True])
    assert [bool(bar.get_hatch()) for bar in figure.axes[0].patches] == [True] * 3 + [False] * 2
    assert any("solid: your code, hatched: the package's" in text.get_text() for text in figure.texts)
    figure, _ = plots.stacks(bars, "title", "subtitle", "bytes", learner=True)
    assert any(text.get_text().endswith("; solid: your code") for text in figure.texts)
    assert not any(swatch.get_hatch() for swatch in figure.legends[0].get_patches())
    with pytest.raises(ValueError, match="no bars"):
        plots.stacks({}, "title", "subtitle", "bytes")


def test_growth():
    measured = {"activations": {k: 2000.0 * k + 500 for k in (1, 2, 5)}, "parameters": {1: 7e3, 5: 7e3}}
    said = small(plots.growth(measured, "tokens", "title", "subtitle"))
    assert "Activations: 2.00 kB per token, plus 500 B." in said
    assert "Parameters: 7.00 kB, however many tokens." in said
    with pytest.raises(ValueError, match="two points"):
        plots.fit_line({1: 2.0})


def test_call_costs_and_curves():
    costs = {"29 calls": plots.Cost(0.174, 0.014, 0.2), "1 call": plots.Cost(0.006, 0.014, 0.021)}
    said = small(plots.call_costs(costs, "title", "subtitle"))
    assert "29 calls: 200 ms; by the link's numbers, 174 ms latency" in said
    assert small(plots.curves({"a": [3.0, 1.0]}, "title", "subtitle", "loss")) == "Loss: a from 3.00 to 1.00."
    with pytest.raises(ValueError, match="5 curves"):
        plots.curves({str(k): [1.0] for k in range(5)}, "title", "subtitle", "loss")


def counted():
    with calls() as book:
        dist.all_reduce(torch.ones(10))
        dist.barrier()
        dist.broadcast(torch.ones(3, dtype=torch.float64), src=0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    loss = model(torch.ones(1, 4)).sum()
    with calls() as of_torch:
        loss.backward()
    return book.calls, book.sent, of_torch.calls


def gathered_in_two_ways():
    with calls() as book:
        dist.all_gather([torch.empty(10) for _ in range(dist.get_world_size())], torch.ones(10))
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gather(torch.empty(10 * dist.get_world_size()), torch.ones(10))
    return [call.payload for call in book.calls]


def scattered_in_groups():
    size, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([each]) for each in range(size)][rank]
    with calls() as book:
        dist.reduce_scatter(torch.empty(10), [torch.ones(10) for _ in range(size)])
        dist.all_reduce(torch.ones(10), group=alone)
        functional.wait_tensor(
            torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(10), size, dist.group.WORLD.group_name)
        )
    return [call.payload for call in book.calls], book.sent


def test_calls_count_lists_groups_and_functional_collectives(ranks):
    assert ranks.run(scattered_in_groups, ranks=2) == 2 * [([80, 40, 80], 40.0 + 0.0 + 40.0)]


def sent_unevenly():
    """Rank 0 sends rank 1 three rows of two numbers and keeps one; rank 1 sends rank 0 nothing and keeps two."""
    rank = dist.get_rank()
    send, receive = ([1, 3], [1, 0]) if rank == 0 else ([0, 2], [3, 2])
    with calls() as book:
        dist.all_to_all_single(torch.empty(sum(receive), 2), torch.ones(sum(send), 2), receive, send)
    with calls() as message:
        if rank == 0:
            dist.send(torch.ones(5), dst=1)
        else:
            dist.recv(torch.empty(5), src=0)
    return book.sent, message.sent


def test_calls_count_uneven_splits_and_messages_by_what_this_rank_sends(ranks):
    assert ranks.run(sent_unevenly, ranks=2) == [(3 * 2 * 4, 5 * 4), (0, 0)]


def test_an_all_gather_counts_the_parts_of_all_ranks(ranks):
    assert ranks.run(gathered_in_two_ways, ranks=2) == 2 * [[80, 80]]


def test_calls_are_counted_whoever_makes_them(ranks):
    for made, sent, of_torch in ranks.run(counted, ranks=2):
        assert made == [("allreduce", 40), ("broadcast", 24)]
        assert sent == 2 * 40 / 2 + 24 / 2
        assert of_torch == [("allreduce", 4 * 10)]  # one bucket for weight and bias


def test_a_skipped_prediction_is_one_too(tmp_path, monkeypatch):
    from zerolab.lab.exercises import predictions

    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path))
    assert not predictions.predicted("02.1")
    predictions.skip("02.1")
    assert predictions.predicted("02.1")
