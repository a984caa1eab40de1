"""The pictures: drawn from real runs, and saying what those runs came to. (How they look, a person must see.)"""

from __future__ import annotations

import base64
import dataclasses
import json
import time
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import torch.distributed as dist
from jobs_common import worlds
from matplotlib.backends.backend_agg import FigureCanvasAgg
from PIL import Image, ImageChops

import zerolab
from zerolab.lab.lessons.lesson10.arena import replay
from zerolab.lab.lessons.lesson15.compared import three_ways
from zerolab.lab.lessons.lesson15.pipeline import Clocked, Pipeline
from zerolab.lab.ranks.network import linked
from zerolab.measure import CATEGORIES, holdings, ledger, timeline, trace
from zerolab.measure.paper import BF16
from zerolab.measure.units import in_bytes
from zerolab.tasks.models import GPT, Block

plots = pytest.importorskip("zerolab.lab.plots")
explorers = pytest.importorskip("zerolab.lab.explorers")

pytestmark = pytest.mark.slow


def seen(stage, precision=None):
    """One rank's timeline, trace and holdings of a real step."""
    torch.manual_seed(0)
    zero = zerolab.STAGES[stage](GPT(layers=2, width=64, context=16), units=[Block], precision=precision)
    optimizer = torch.optim.AdamW(zero.model.parameters())
    x = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(zero.rank))

    def step():
        zero.model(x, x).backward()
        held = holdings(zero, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        return held

    step()
    with trace(zero, optimizer) as record:
        step()
    with timeline(zero, optimizer) as line:
        held = step()
    return line, record, held


def drawn(figure):
    """The share of the picture that is lines, areas and words inside the axes, and not white, frame or axis."""
    inside = [a for axes in figure.axes for a in (*axes.lines, *axes.patches, *axes.collections, *axes.images)]
    inside += [text for axes in figure.axes for text in axes.texts]
    shown = [artist for artist in inside if artist.get_visible()]
    canvas, pictures = FigureCanvasAgg(figure), []
    for visible in (False, True):
        for artist in shown:
            artist.set_visible(visible)
        canvas.draw()
        pictures.append(Image.fromarray(np.array(canvas.buffer_rgba())).convert("L"))
    difference = ImageChops.difference(*pictures)
    return sum(difference.histogram()[16:]) / (difference.width * difference.height)


def save(figure, tmp_path):
    """Draws it as a page has it: in at most 60 kB, and with something in it."""
    picture = plots.png(figure)
    (tmp_path / "picture.png").write_bytes(picture)
    assert picture.startswith(b"\x89PNG") and len(picture) <= 60_000
    assert drawn(figure) > 0.002, "nothing is drawn but axes"


def test_an_empty_picture_is_noticed(tmp_path):
    figure, axes = plt.subplots(figsize=(9, 4))
    axes.set(title="What a rank holds", xlabel="time, ms", ylabel="MB")
    assert len(plots.png(figure)) > 2_000, "the size would not tell"
    with pytest.raises(AssertionError, match="nothing is drawn"):
        save(figure, tmp_path)
    axes.bar([1, 2], [3, 4])
    save(figure, tmp_path)
    plt.close(figure)


@pytest.fixture(scope="module")
def measured(ranks):
    return {stage: ranks.run(seen, stage, ranks=3) for stage in range(4)}


# -- who holds what -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", worlds(None, others=[BF16]))
@pytest.mark.parametrize("n", worlds(3, others=[1, 2]))
def test_holdings(ranks, n, precision):
    sharded = {0: (), 1: ("optimizer",), 2: ("gradients", "optimizer"), 3: CATEGORIES}
    for stage in range(4):
        everyone = [held for _, _, held in ranks.run(seen, stage, precision, ranks=n)]
        size = everyone[0].size
        for category in CATEGORIES:
            covered = [
                sum(start <= x < end for held in everyone for start, end in held.extents[category])
                for x in range(0, size, 37)
            ]
            if category in sharded[stage]:
                assert max(covered) == 1  # no two ranks hold the same
                assert all(held.share(category) == pytest.approx(1 / n, rel=0.02) for held in everyone)
            else:
                assert all(held.share(category) == pytest.approx(1, rel=0.02) for held in everyone)
            assert sum(covered) > 0.98 * len(covered) * (1 if category in sharded[stage] else n)
        assert everyone[0].units[-1][2] == size


def test_released_storage_holds_nothing(ranks):
    for line, _, held in ranks.run(seen, 3, ranks=2):
        assert held.share("parameters") == pytest.approx(0.5, rel=0.02)
        assert line.rank == held.rank


def test_who_holds_what(measured, tmp_path):
    figure, sentence = plots.who_holds_what([[held for _, _, held in measured[stage]] for stage in range(4)])
    save(figure, tmp_path)
    assert "in stage 1 a rank holds 33 % of the optimizer state" in sentence and "3 units" in sentence


# -- the others -----------------------------------------------------------------------------------------------------


def gradients_of_a_backward():
    torch.manual_seed(0)
    model = GPT(layers=1, width=32, context=16)
    x = torch.randint(0, 256, (4, 16), generator=torch.Generator().manual_seed(dist.get_rank()))
    (model(x, x) / 64).backward()  # as with 64 micro-batches
    grads = [param.grad for param in model.parameters()]
    flat = torch.cat([grad.flatten() for grad in grads])
    flat = flat[flat != 0]
    becomes_zero = (flat.half() == 0).double().mean().item()
    too_large = (~(flat * 2.0**30).half().isfinite()).double().mean().item()
    return plots.binades(grads), len(flat), becomes_zero, too_large


def test_number_line(ranks, tmp_path):
    for counts, number, becomes_zero, too_large in ranks.run(gradients_of_a_backward, ranks=2):
        assert sum(counts.values()) == number
        assert plots.lost(counts).zero == pytest.approx(becomes_zero) and becomes_zero > 0.001
        assert plots.lost(counts, 30).too_large == pytest.approx(too_large, abs=1e-3) and too_large > 0
        assert plots.lost(counts, 24).zero < plots.lost(counts).zero
    assert plots.binades([torch.tensor([0.0, 1.0, -1.5, 2.0**-24, 65504.0])]) == {0: 2, -24: 1, 15: 1}
    figure, sentence = plots.number_line({"gradients": counts, "activations": counts}, 16, "title", "subtitle")
    save(figure, tmp_path)
    assert f"Gradients of weights: {100 * becomes_zero:.2g} % become 0 in float16" in sentence
    assert "Gradients of activations: " in sentence and "times 2^16 it is" in sentence
    with pytest.raises(ValueError, match="nothing to count"):
        plots.number_line({"gradients": {}}, 16, "title", "subtitle")


def test_skyline(measured, tmp_path):
    lines = [measured[stage][0][0] for stage in range(4)]
    figure, sentence = plots.skyline(lines)
    save(figure, tmp_path)
    assert sentence.count(" in stage ") == 4 and "backward" in sentence
    save(plots.skyline(lines[3:], learner=True)[0], tmp_path)
    figure, _ = plots.skyline(lines, learner=[False, False, False, True])
    assert [axes.get_title("left").endswith("your code") for axes in figure.axes] == [False, False, False, True]
    assert [any(area.get_hatch() for area in axes.collections) for axes in figure.axes] == [True, True, True, False]
    with pytest.raises(ValueError, match="learner has 2 answers for 4 bars or panels"):
        plots.skyline(lines, learner=[True, False])
    end = next(i for i, event in enumerate(lines[3].events) if i >= lines[3].before and event.phase == "backward")
    figure, sentence = plots.skyline([dataclasses.replace(lines[3], events=lines[3].events[:end])])
    assert sentence.startswith("The peak of a forward is ") and "comes in" not in sentence
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()] == ["forward"]
    with pytest.raises(ValueError, match="no timeline"):
        plots.skyline([])


def test_skyline_of_two_steps_in_one_stage(measured, tmp_path):
    lines = [measured[1][0][0], measured[1][1][0]]
    figure, sentence = plots.skyline(lines, names=["before", "after"])
    save(figure, tmp_path)
    assert [axes.get_title("left") for axes in figure.axes] == ["before", "after"]
    assert " before, " in sentence and " after. " in sentence and "in stage" not in sentence


def test_address_map(measured, tmp_path):
    line = measured[0][0][0]
    replays = [replay(line, until="backward"), replay(line, apart=["gradients"], until="backward")]
    figure, sentence = plots.address_map(replays, ["first fit", "apart"])
    save(figure, tmp_path)
    arena = replays[1].arena
    assert f"apart: {in_bytes(arena.size)} of addresses; at the end {in_bytes(arena.free)} free in" in sentence
    assert sentence.endswith(f"the largest of {in_bytes(arena.largest)}.")
    for axes, drawn_of in zip(figure.axes, replays, strict=True):
        assert len(axes.patches) == len(drawn_of.pieces)
    save(plots.address_map([replay(line)], ["a step"])[0], tmp_path)
    with pytest.raises(ValueError, match="1 replays and 2 titles"):
        plots.address_map(replays[:1], ["one", "two"])


def test_gantt(measured, tmp_path):
    figure, sentence = plots.gantt([record for _, record, _ in measured[2]])
    save(figure, tmp_path)
    assert "% of the time of backward's collectives" in sentence
    with pytest.raises(ValueError, match="no trace"):
        plots.gantt([])
    figure, _ = plots.gantt(measured[2][1][1])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["rank 1"]


def step_on_a_link(stage, links):
    """Seconds of a real step on each emulated link, and the bytes of its phases."""
    zero = zerolab.STAGES[stage](GPT(layers=2, width=64, context=16), units=[Block])
    optimizer = torch.optim.AdamW(zero.model.parameters())
    x = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(zero.rank))

    def step():
        zero.model(x, x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with ledger(zero) as book:
        step()
    sent = {phase: sum(c.sent for c in book.calls if c.phase == phase) for phase in ("forward", "backward")}
    times = {}
    for speed in links:
        with linked(f"{speed / 1e6} MB/s, 20 us"):
            dist.barrier()
            begin = time.perf_counter()
            step()
            times[speed] = time.perf_counter() - begin
    return times, sent


def test_link_sweep(ranks, tmp_path):
    found = {stage: ranks.run(step_on_a_link, stage, (2e6, 50e6), ranks=2)[0] for stage in (0, 3)}
    names = {0: "DDP", 3: "Zero3"}
    measured = {names[stage]: times for stage, (times, _) in found.items()}
    phases = {
        names[stage]: {phase: plots.Phase(0.01 + 0.01 * (phase == "backward"), sent[phase]) for phase in sent}
        for stage, (_, sent) in found.items()
    }
    for name, times in measured.items():
        assert times[2e6] > sum(phase.sent for phase in phases[name].values()) / 2e6, "no step is faster than its link"
    figure, sentence = plots.link_sweep(measured, phases, "title", "emulated links")
    save(figure, tmp_path)
    highest = max(plots.knee(of_stage) for of_stage in phases.values())
    assert "The predicted knee is " in sentence and f"{highest / 1e6:.1f} MB/s" in sentence
    assert "A step at 2.00 MB/s and at 50.0 MB/s: DDP " in sentence
    alike = {"forward": plots.Phase(1.0, 3e6), "backward": plots.Phase(2.0, 6e6)}
    assert plots.knee(alike) == 3e6
    with pytest.raises(ValueError, match="no measurements"):
        plots.link_sweep({}, {}, "title", "subtitle")


def ring(n):
    """A ring reduce-scatter of chunks in which bit r says that rank r's part is in: the history of one rank."""
    rank = dist.get_rank()
    chunks = [torch.tensor([2**rank]) for _ in range(n)]
    history = [[int(chunk) for chunk in chunks]]
    for k in range(n - 1):
        got = torch.empty_like(chunks[0])
        send = dist.P2POp(dist.isend, chunks[(rank - 1 - k) % n], (rank + 1) % n)
        receive = dist.P2POp(dist.irecv, got, (rank - 1) % n)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
        chunks[(rank - 2 - k) % n] += got
        history.append([int(chunk) for chunk in chunks])
    return history


@pytest.mark.parametrize("n", [2, 3, 4])
def test_ring_against_root(ranks, n, tmp_path):
    everyone = ranks.run(ring, n, ranks=n)
    history = [[rank[k] for rank in everyone] for k in range(n)]
    assert [everyone[rank][-1][rank] for rank in range(n)] == [2**n - 1] * n
    figure, sentence = plots.ring_against_root(history, {2: (16e6, 16e6), 8: (112e6, 28e6)})
    save(figure, tmp_path)
    full = [text for text in figure.axes[0].texts if text.get_text() == "\n".join("ABCD"[:n])]
    assert len(full) == n  # each rank ends with one complete chunk
    assert "from 16.0 MB to 112 MB with a root" in sentence
    with pytest.raises(ValueError, match="no traffic"):
        plots.ring_against_root(history, {})


def test_to_a_trillion(tmp_path):
    cells = json.loads((Path(__file__).parents[2] / "zerolab" / "measure" / "table1.json").read_text())["cells"]
    figure, sentence = plots.to_a_trillion(cells)
    save(figure, tmp_path)
    assert len(figure.axes) == 3
    assert "On 1,024 GPUs, a rank of a 1T model holds" in sentence and "13.7 GB in stage 3" in sentence
    with pytest.raises(ValueError, match="no cells"):
        plots.to_a_trillion([])


def test_before_after(tmp_path):
    figure, sentence = plots.before_after("all-gather", [[1], [2], [3]], [[1, 2, 3]] * 3)
    save(figure, tmp_path)
    assert sentence == "all-gather: 3 numbers on 3 ranks became 9; no rank received more than 2 that it did not have."
    figure, sentence = plots.before_after("reduce", [[1], [2]], [[3], []])
    assert sentence == "reduce: 2 numbers on 2 ranks became 1; each made from several ranks' numbers."
    assert any(text.get_text() == "nothing" for text in figure.axes[1].texts)
    with pytest.raises(ValueError, match="one for each rank"):
        plots.before_after("reduce", [[1], [2]], [[3]])


def test_cost_finds_the_line(tmp_path):
    line = {size: [2e-3 + size / 5e8] * 3 for size in (10_000, 1_000_000, 20_000_000)}
    line[10_000] = [2e-3 + 1e4 / 5e8, 1.0, 1e-6]  # the median counts
    fit = plots.fit_cost(line)
    assert fit.latency == pytest.approx(2e-3, rel=1e-6) and fit.bandwidth == pytest.approx(5e8, rel=1e-6)
    figure, sentence = plots.cost(line, "all-reduce on 4 ranks")
    save(figure, tmp_path)
    assert sentence.startswith("An all-reduce on 4 ranks takes 2.00 ms") and "500 MB" in sentence
    with pytest.raises(ValueError, match="two sizes"):
        plots.fit_cost({1: [1.0]})
    with pytest.raises(ValueError, match="did not take longer"):
        plots.fit_cost({1: [2.0], 1000: [1.0]})


# -- the explorers --------------------------------------------------------------------------------------------------


def test_memory_explorer():
    explorer = explorers.memory_explorer("7.5B", 64, activations="10 GB")
    assert "Zero1 41.4 GB" in explorer.sentence and "it fits with Zero1, Zero2, Zero3" in explorer.sentence
    before = bytes(explorer.image.value)
    assert before.startswith(b"\x89PNG")
    explorer.controls["memory"].value = "24 GB"
    assert explorer.image.value != before and "it fits with Zero3." in explorer.sentence
    explorer.controls["optimizer"].value = "sgd"
    assert "Zero2 25.7 GB" in explorer.sentence  # 10 GB, 2Ψ of parameters, (2 + 4)Ψ/64 of gradients and masters
    explorer.controls["offload"].value, explorer.controls["replicas"].value = True, 8
    assert explorer.sentence.startswith("A rank needs Zero1 25.0 GB, Zero2 25.0 GB, Zero3 11.9 GB;")  # stage 0 has none
    explorer.controls["offload"].value, explorer.controls["replicas"].value = False, 1
    for control, wrong, word in (
        ("parameters", "lots", "not a number of parameters"),
        ("memory", "5 GB", "leave nothing"),
        ("activations", "-", "not a number of bytes"),
    ):
        kept, good = explorer.image.value, explorer.controls[control].value
        explorer.controls[control].value = wrong
        assert word in explorer.said.value and explorer.image.value == kept
        explorer.controls[control].value = good
        assert word not in explorer.said.value


def test_timeline_scrubber(measured):
    lines = [line for line, _, _ in measured[3]]
    explorer = explorers.timeline_scrubber(lines)
    assert "100 % of its peak" in explorer.sentence  # it begins at the peak
    seen = [explorer.sentence]
    for moment in (0, 100, 10_000):  # the last is held at the end
        explorer.controls["moment"].value = moment
        seen.append(explorer.sentence)
    assert seen[1] == seen[3]  # a step leaves nothing behind
    assert len(set(seen)) == 3
    explorer.controls["rank"].value = 2
    assert explorer.sentence.startswith("Rank 2 holds")
    with pytest.raises(ValueError, match="no timeline"):
        explorers.timeline_scrubber([])


def test_a_page_without_a_kernel_shows_the_picture(measured):
    for explorer in (explorers.memory_explorer(), explorers.timeline_scrubber([measured[0][0][0]], moment=5)):
        bundle = explorer._repr_mimebundle_()
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
        assert bundle["text/plain"] == explorer.sentence
        assert "application/vnd.jupyter.widget-view+json" in bundle


def test_colours_and_hatches_name_the_same_things():
    assert plots.COLOURS.keys() == plots.HATCHES.keys()
    assert len(set(plots.COLOURS.values())) == len(set(plots.HATCHES.values())) == len(plots.COLOURS)


def cuts(n):
    """The root unit of a model on `n` ranks: the length of a shard, and its elements without padding."""
    layout = zerolab.Zero3(GPT(layers=1, width=20), units=[Block]).units[0].layout
    assert layout.world_size == n
    return layout.shard_size, layout.slots[-1].end


def test_who_reads_what(ranks, tmp_path):
    length, end = ranks.run(cuts, 4, ranks=4)[0]
    files = [(f"rank-{rank}.safetensors", length) for rank in range(4)]
    figure, sentence = plots.who_reads_what(files, end, 3)
    save(figure, tmp_path)
    assert sentence.startswith(f"3 ranks read the {end:,} elements in 6 reads, {end:,} elements in all; ")
    small = [("rank-0.safetensors", 3), ("rank-1.safetensors", 3)]
    plans = [[("rank-0.safetensors", 0, 2, 0)], [("rank-0.safetensors", 2, 3, 0), ("rank-1.safetensors", 0, 1, 1)], []]
    figure, sentence = plots.who_reads_what(small, 4, plans)
    save(figure, tmp_path)
    assert "in 3 reads, 4 elements in all; the 2 of padding in the files" in sentence and "2 of their own" in sentence
    with pytest.raises(ValueError, match="0 files and 1 ranks"):
        plots.who_reads_what([], 4, [[]])


def tokens_of(texts):
    """How many targets this rank's text has, and how many with padding."""
    tokens = torch.tensor(list(texts[dist.get_rank()].encode().ljust(30, b"\0"))).view(1, 30)
    targets = tokens[:, 1:]
    return int((targets != 0).sum()), targets.numel()


def test_token_weights(ranks, tmp_path):
    found = ranks.run(tokens_of, ["a long sentence, of tokens", "short"], ranks=2)
    tokens, places = zip(*found)
    assert tokens == (25, 4) and places == (29, 29)
    figure, sentence = plots.token_weights(tokens, places)
    save(figure, tmp_path)
    assert sentence.startswith(
        "2 ranks have 25, 4 tokens. In the mean of their means a token of rank 1 weighs 6.25 times"
    )
    with pytest.raises(ValueError, match="one or more"):
        plots.token_weights([3, 0], [5, 5])


def rounded_gradients():
    """(bytes, relative error) of a real gradient in three dtypes."""
    torch.manual_seed(0)
    model = GPT(layers=1, width=16, context=16)
    x = torch.randint(0, 256, (2, 16))
    model(x, x).backward()
    grad = torch.cat([param.grad.flatten() for param in model.parameters()])
    found = {}
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        small = (grad / grad.abs().max()).to(dtype)
        error = (small.float() * grad.abs().max() - grad).norm() / grad.norm()
        found[str(dtype).removeprefix("torch.")] = (float(small.nbytes), error.item())
    return found


@pytest.mark.parametrize("logarithmic", [True, False])
def test_tradeoff(logarithmic, tmp_path):
    points = rounded_gradients()
    assert points["bfloat16"][1] < points["float8_e4m3fn"][1]
    figure, sentence = plots.tradeoff(
        points, "Bytes against error", "A gradient", ("bytes", "error"), "Said.", "float32", logarithmic
    )
    save(figure, tmp_path)
    names = {name for text in figure.axes[0].texts for name in text.get_text().split("\n")}
    assert sentence == "Said." and names == set(points)
    with pytest.raises(ValueError, match="no points"):
        plots.tradeoff({}, "", "", ("", ""), "")


def test_bands(tmp_path):
    """Each result is a dot of its row, and the row to compare with is shaded."""
    errors = {name: [point[1], 2 * point[1]] for name, point in rounded_gradients().items()}
    figure, sentence = plots.bands(errors, "Errors", "A gradient, twice", "error", "Said.", "bfloat16")
    save(figure, tmp_path)
    axes = figure.axes[0]
    assert sentence == "Said." and [label.get_text() for label in axes.get_yticklabels()] == list(errors)
    assert [sorted(line.get_xdata()) for line in axes.lines[1::2]] == [sorted(values) for values in errors.values()]
    with pytest.raises(ValueError, match="every row"):
        plots.bands({"empty": []}, "", "", "", "")


def test_who_computes_what(tmp_path):
    figure, sentence = plots.who_computes_what(three_ways(2, message=64))
    save(figure, tmp_path)
    assert sentence == (
        "samples: no rank waits for another; each layer: 2 ranks must wait for others, each before 1 layer; "
        "layers: 1 rank must wait for others, each before 1 layer."
    )
    with pytest.raises(ValueError, match="nothing was computed"):
        plots.who_computes_what({"samples": []})


def test_membership(tmp_path):
    attempts = [plots.Attempt(step, "ABC", {}, True) for step in range(2)]
    attempts += [plots.Attempt(2, "ABC", {}, False), plots.Attempt(2, "AC", {}, True)]
    attempts += [plots.Attempt(3, "ABC", {"B": "A"}, True), plots.Attempt(4, "ABC", {}, True)]
    figure, sentence = plots.membership(attempts, "ABC")
    save(figure, tmp_path)
    assert sentence == (
        "2 steps by A, B, C, divided by 3; then 1 attempt thrown away; 1 step by A, C, divided by 2; "
        "2 steps by A, B, C, divided by 3, B with the state of A."
    )
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts] == ["x"]  # B, in the attempt that was thrown away
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == ["÷ 3\nsteps 0 to 1", "", "÷ 2\nstep 2", "÷ 3\nsteps 3 to 4"]
    with pytest.raises(ValueError, match="no attempts"):
        plots.membership([], "ABC")


def test_rounds(tmp_path):
    walks = [[[(-3, -4), (-1, -4 + sign)], [(-1, -4), (0, -4 + sign)], [(0, -2)]] for sign in (1, -1)]
    figure, sentence = plots.rounds({"alone": walks}, "Two ranks")
    save(figure, tmp_path)
    assert sentence == "The outer steps are 2.00, 2.24 long, and point at 0°, 63°."
    assert [text.get_text() for text in figure.axes[0].texts] == ["start", "after 1 round", "after 2 rounds"]
    beyond = [[*walk[:-1], [(0, 0)], [(0, 3)]] for walk in walks]
    figure, sentence = plots.rounds({"mean": walks, "strong": beyond}, "Two ranks, two ways")
    save(figure, tmp_path)
    assert sentence == (
        "Mean: 2.00 from the best place after 2 rounds; "
        "strong: 3.00 from the best place after 3 rounds, and 0.00 after 2."
    )
    assert [axes.get_title() for axes in figure.axes] == ["mean", "strong"]
    with pytest.raises(ValueError, match="no panels"):
        plots.rounds({}, "")


def test_tokens_by_expert(tmp_path):
    figure, sentence = plots.tokens_by_expert({"freely": [6, 1, 1, 0], "evenly": [2, 2, 2, 2]}, "Tokens", capacity=2.5)
    save(figure, tmp_path)
    assert sentence == (
        "freely: the fullest expert has 3.00 times the mean, 44 % are beyond the capacity; "
        "evenly: the fullest expert has 1.00 times the mean, 0 % are beyond the capacity."
    )
    with pytest.raises(ValueError, match="no tokens"):
        plots.tokens_by_expert({"none": [0, 0]}, "Tokens", capacity=1.0)


def test_attention_map(tmp_path):
    ways, flop = {"contiguous": [0, 0, 1, 1], "zigzag": [0, 1, 1, 0]}, {"contiguous": [3, 7], "zigzag": [5, 5]}
    figure, sentence = plots.attention_map(ways, flop)
    save(figure, tmp_path)
    assert sentence == (
        "contiguous: rank 1 computes 1.40 times the mean, and 2.33 times the least; zigzag: all ranks compute the same."
    )
    assert [text.get_text() for text in figure.axes[0].texts] == list("0001111111")
    with pytest.raises(ValueError, match="the same ways"):
        plots.attention_map(ways, {})


def test_ring_turns(tmp_path):
    held, pairs = [[0, 1], [1, 0]], {"contiguous": [[3, 0], [3, 4]], "zigzag": [[3, 2], [3, 2]]}
    figure, sentence = plots.ring_turns(held)
    save(figure, tmp_path)
    assert sentence == "After 1 turn each rank has had the keys of all, one block at a time."
    assert [text.get_text() for text in figure.axes[0].texts] == list("0110")
    figure, sentence = plots.ring_turns(held, pairs)
    save(figure, tmp_path)
    assert sentence == (
        "contiguous: each rank computes 5 pairs on average, and the last rank is done after the time of 7 pairs; "
        "zigzag: each rank computes 5 pairs on average, and the last rank is done after the time of 5 pairs."
    )
    squares = [text.get_text() for text in figure.axes[0].texts]
    assert squares == [*"000", *"111", *"0000", "3", "+ 4"]
    with pytest.raises(ValueError, match="no turns"):
        plots.ring_turns(held, {})


class AllForwards(Pipeline):
    """GPipe over identity stages, whose backward passes on what comes."""

    def order(self):
        each = range(self.micro_batches)
        return [("forward", m) for m in each] + [("backward", m) for m in each]

    def forward(self, m):
        x = self.take_input(m)
        y = self.stage(x)
        self.kept[m] = x, self.loss(y, m) if self.last else y
        if not self.last:
            self.send_output(y, m)

    def backward(self, m):
        x, y = self.kept.pop(m)
        y.backward(None if self.last else self.take_grad(m))
        if not self.first:
            self.send_grad(x.grad, m)


class InTwoHalves(AllForwards):
    """With the weights' part of each backward at the end, as if there were something in it."""

    def order(self):
        return super().order() + [("weights", m) for m in range(self.micro_batches)]

    def weights(self, m):
        pass


def piped(micro_batches, kind=AllForwards):
    stage = Clocked(torch.nn.Linear(4, 4), 0.02)
    inputs = [torch.ones(2, 4)] * micro_batches
    pipe = kind(stage, inputs, lambda y, m: y.mean(), inputs[0])
    pipe.run()
    return pipe.trace, pipe.sent


def test_pipeline_runs(ranks, tmp_path):
    runs = {f"{many} at a time": [trace for trace, _ in ranks.run(piped, many, ranks=3)] for many in (1, 4)}
    assert [plots.in_flight(trace) for trace in runs["4 at a time"]] == [4, 4, 4]
    assert plots.bubble(runs["1 at a time"]) == pytest.approx(2 / 3)  # (N-1) / (M+N-1): the stage's clock, no watch
    assert plots.bubble(runs["4 at a time"]) == pytest.approx(2 / 6)
    assert [sent for _, sent in ranks.run(piped, 4, ranks=3)] == [4 * 32, 2 * 4 * 32, 4 * 32]
    figure, sentence = plots.pipeline_runs(runs)
    save(figure, tmp_path)
    assert sentence.startswith("1 at a time: a stage stands still for ") and sentence.endswith(
        "at most 4 micro-batches."
    )
    with pytest.raises(ValueError, match="no run"):
        plots.pipeline_runs({})
    halves = [trace for trace, _ in ranks.run(piped, 4, InTwoHalves, ranks=3)]
    assert [[span.end - span.start for span in trace.spans] for trace in halves] == [[pytest.approx(0.02)] * 12] * 3
    assert plots.bubble(halves) == pytest.approx(4 / 16)  # N-1 steps twice, before and behind forwards; not for weights
    assert [plots.in_flight(trace) for trace in halves] == [4, 4, 4]
    figure, _ = plots.pipeline_runs({"in two halves": halves})
    assert [text.get_text() for text in figure.legends[0].get_texts()][:3] == ["forward", "backward", "weights"]


def test_reproduced_draws_the_most_ranks_on_top_of_one():
    runs = [{"seed": seed, "losses": [2.0 + seed, 1.0], "accuracy": 0.9 + seed / 100} for seed in range(3)]
    drawn, said = plots.reproduced({1: runs, 2: runs[:1], 4: runs[:1]}, "", "Untrained: 10 %.")
    labels = [line.get_label() for line in drawn.axes[0].lines]
    assert labels == ["1 rank, seed 0", "4 ranks, seed 0", "1 rank, seed 1", "1 rank, seed 2"]
    assert said.startswith("Losses on 1 and on 4 ranks differ by 0e+00 at most. ") and "90.0 to 92.0 %" in said
