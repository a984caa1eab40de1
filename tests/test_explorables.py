"""The website's explorables: what they compute is the package's formula, and they stay locked until a prediction.

Each is opened from a file, in Chromium, without the site around it. tests/test_site.py opens the pages themselves.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from zerolab.comm.recording import bytes_sent
from zerolab.lab.lessons import lesson15
from zerolab.lab.lessons.lesson10 import arena
from zerolab.lab.plots.style import COLOURS, LABELS
from zerolab.measure import KINDS, formulas, knee, phases_of, predicted_step
from zerolab.measure.allocations import Buffer, Event, Timeline
from zerolab.measure.planning import OPTIMIZERS, OWNED, PRECISIONS, in_parameters, plan, read_parameters
from zerolab.measure.spans import length
from zerolab.measure.units import in_bytes, read_bytes

pytest.importorskip("griffe")  # build.py imports it
playwright = pytest.importorskip("playwright.sync_api")
expect = playwright.expect

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
NAMES = sorted(path.stem for path in (SITE / "explorables").glob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
# Without these Chromium looks for hosts of its maker's at every start.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian's package chromium)"),
    pytest.mark.slow,
]


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, Path]:
    """A page for each explorable with nothing else on it, and the scripts beside it as the site has them."""
    folder = tmp_path_factory.mktemp("explorables")
    program = f"""
import json, pathlib, build
build.copy_scripts(pathlib.Path({str(folder)!r}))
print(json.dumps({{name: build.explorable(name, ".") for name in {[*NAMES, "ladder"]}}}))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    pages = {}
    for name, block in json.loads(done.stdout).items():
        html = block.partition("{raw} html\n")[2].removesuffix("```")
        pages[name] = folder / f"{name}.html"
        pages[name].write_text(f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title>{html}')
    return pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as play:
        expect.set_options(timeout=100_000)  # a busy machine may take its time
        chromium = play.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser, files) -> Iterator[Callable[..., Any]]:
    """visit(name, hash=""): the page as wide as a phone, locked. At the end, nothing has gone wrong on it."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 360, "height": 700}, reduced_motion="reduce")
    context.set_default_timeout(100_000)

    def go(name: str, hash: str = "") -> Any:
        page = context.new_page()
        page.on("console", lambda said: complaints.append(said.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda asked: asked.url.startswith("file:") or complaints.append(asked.url))
        page.goto(files[name].as_uri() + hash)
        return page

    yield go
    context.close()
    assert complaints == []


def unlock(page: Any) -> Any:
    page.get_by_role("button", name="Skip").click()
    page.locator(".opened").wait_for()
    return page


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("name", NAMES)
def test_a_prediction_unlocks_it(name, visit):
    page = visit(name)
    place, answer = page.locator(".explorable"), page.locator(".prediction input")
    expect(place.locator(".opened")).to_have_count(0)
    answer.fill("no idea")
    answer.press("Enter")
    expect(place.get_by_role("status")).to_contain_text("or skip")
    expect(place.locator(".opened")).to_have_count(0)
    answer.fill("1,5")
    answer.press("Enter")
    expect(place.get_by_role("status").first).to_contain_text("; you said 1,5: ")
    expect(place.locator(".opened")).to_be_focused()


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_a_phone_and_every_control_has_a_name(name, visit):
    page = unlock(visit(name))
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for control in page.locator(".explorable").locator("input, select, button").all():
        named = control.evaluate("e => e.labels?.length || e.getAttribute('aria-label') || e.textContent.trim()")
        assert named, control.evaluate("e => e.outerHTML")


def test_kinds_look_as_in_the_pictures(visit):
    page = visit("fits")
    assert page.evaluate("zerolab.COLOURS") == COLOURS
    assert page.evaluate("zerolab.LABELS") == LABELS


# ---------------------------------------------------------------- does it fit?


def some_settings(choose: random.Random) -> dict[str, Any]:
    replicas = choose.choice([1, 1, 1, 2, 3, 8])
    memory = choose.choice([24e9, 80e9, 141e9, choose.uniform(1e9, 1e12)])
    optimizer = choose.choice(list(OPTIMIZERS))
    return {
        "parameters": choose.choice([round(10 ** choose.uniform(0, 14)), choose.randrange(1, 10**14), 7_500_000_000]),
        "ranks": replicas * choose.choice([1, 2, 3, 7, 64, round(10 ** choose.uniform(0, 5))]),
        "replicas": replicas,
        "memory": memory,
        "activations": choose.choice([0, 0, memory * choose.random()]),
        "precision": choose.choice(list(PRECISIONS)),
        "optimizer": optimizer,
        "offload": optimizer not in OWNED and choose.random() < 0.3,
    }


def by_the_package(settings: dict[str, Any]) -> list[dict[str, Any] | None]:
    rows = [vars(row) | {"total": row.total} for row in plan(**settings)]
    return [None] * (4 - len(rows)) + rows  # stage 0 has no offload


def test_bytes_are_those_of_the_formulas(visit):
    page, choose = visit("fits"), random.Random(36)
    asked = [some_settings(choose) for _ in range(300)]
    told = page.evaluate("asked => asked.map(zerolab.fits.plan)", asked)
    for settings, rows in zip(asked, told, strict=True):
        assert rows == by_the_package(settings), settings
    assert sum(settings["offload"] for settings in asked) > 30
    assert sum(settings["replicas"] > 1 for settings in asked) > 30


def test_numbers_are_read_and_written_as_in_python(visit):
    page, choose = visit("fits"), random.Random(36)
    counts = [10 ** choose.uniform(-1, 17) for _ in range(200)]
    counts += [0, 0.125, 2.5, 999.5, 1000, 1125, 12_250, 122_500, 999_499, 999_500, 1e18]  # ties, and the next unit
    assert page.evaluate("counts => counts.map(zerolab.fits.inBytes)", counts) == [in_bytes(c) for c in counts]
    assert page.evaluate("counts => counts.map(zerolab.fits.inParameters)", counts) == [
        in_parameters(c) for c in counts
    ]
    texts = ["7.5B", "124M", "1T", "7.5e9", "350", "1.5k"]
    assert page.evaluate("texts => texts.map(zerolab.fits.readParameters)", texts) == [
        read_parameters(t) for t in texts
    ]
    texts = ["80GB", "512 MB", "24 GiB", "1e9", "1.5tb", "0"]
    assert page.evaluate("texts => texts.map(zerolab.fits.readBytes)", texts) == [read_bytes(t) for t in texts]


@pytest.mark.parametrize(
    "label, value, said",
    [
        ("parameters", "many", '"many" is not a number of parameters'),
        ("parameters", "7.5", "7.5 is 7.5 parameters: do you mean 7.5B or 7.5M?"),
        ("memory of a GPU", "a lot", '"a lot" is not a number of bytes'),
        ("activations per rank", "90 GB", "activations of 90.0 GB leave nothing of 80.0 GB"),
        ("ranks", "", "ranks must be a whole number"),
        ("replicas (mesh)", "3", "3 replicas do not divide 64 ranks"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(label, value, said, visit):
    page = unlock(visit("fits"))
    page.get_by_label(label).fill(value)
    expect(page.locator(".opened").get_by_role("status")).to_contain_text(said)
    expect(page.locator("svg.fits")).to_be_visible()  # the last good picture


def test_a_link_keeps_the_settings(visit):
    page = unlock(visit("fits"))
    page.get_by_label("parameters").fill("70B")
    page.get_by_label("stage").select_option("3")
    page.get_by_label("offload").select_option("yes")
    said = page.locator(".opened").get_by_role("status")
    expect(said).to_contain_text("With Zero3 a rank holds 2.19 GB")
    link = page.get_by_role("link", name="Link to these settings").get_attribute("href")
    again = unlock(visit("fits", "#" + link.partition("#")[2]))
    assert again.locator(".opened").get_by_role("status").text_content() == said.text_content()


# ---------------------------------------------------------------- a ring


def replay(course: dict[str, Any]) -> None:
    """Send every message again: in a round each rank sends one and gets one, and holds what the page says."""
    held = course["held"][0]
    for messages, after in zip(course["messages"], course["held"][1:], strict=True):
        for way in ("from", "to"):
            ranks = [message[way] for message in messages]
            assert len(ranks) == len(set(ranks))
        arrived = [(message, [held[message["from"]][chunk] for chunk in message["chunks"]]) for message in messages]
        held = [list(values) for values in held]
        for message, values in arrived:
            for chunk, value in zip(message["chunks"], values, strict=True):
                held[message["to"]][chunk] = value + (held[message["to"]][chunk] if message["add"] else 0)
        assert held == after


def test_numbers_add_up_and_bytes_are_counted(visit):
    page, choose = visit("ring"), random.Random(36)
    asked = [
        (choose.choice(["root", "tree", "ring", "all-to-all"]), choose.randint(2, 8), choose.randrange(4, 10**10))
        for _ in range(300)
    ]
    told = page.evaluate(
        """asked => asked.map(([method, ranks, bytes]) => {
            const course = zerolab.ring.run(method, ranks, bytes);
            return [course, zerolab.ring.totals(course)];
        })""",
        asked,
    )
    for (method, ranks, size), (course, totals) in zip(asked, told, strict=True):
        replay(course)
        sums = [sum(column) for column in zip(*course["held"][0], strict=True)]
        assert course["held"][-1] == [sums] * ranks
        payload = ranks * course["chunk"]
        assert 0 <= payload - size < 4 * ranks + 4
        sent = [sum(row) for row in course["sent"]]
        assert course["sent"] == count(course, ranks)
        if method in ("ring", "all-to-all"):
            assert sent == [bytes_sent("all_reduce", payload, ranks)] * ranks
        else:  # every other rank's gradient goes up once, and the sum comes down once for each of them
            assert sum(sent) == 2 * (ranks - 1) * payload
        if method == "root":
            assert sent == [(ranks - 1) * payload] + [payload] * (ranks - 1)
        rounds = {"root": ranks - 1, "tree": (ranks - 1).bit_length()}.get(method, ranks - 1)
        assert totals["rounds"] == 2 * rounds
        assert totals["out"] == max(sent)


def count(course: dict[str, Any], ranks: int) -> list[list[int]]:
    """Bytes from each rank to each other, from the messages."""
    sent = [[0] * ranks for _ in range(ranks)]
    for message in (message for messages in course["messages"] for message in messages):
        sent[message["from"]][message["to"]] += course["chunk"] * len(message["chunks"])
    return sent


def test_it_goes_step_by_step_with_the_keyboard(visit):
    page = unlock(visit("ring"))
    page.get_by_label("ranks", exact=True).select_option("4")
    said, slider = page.locator(".opened").get_by_role("status"), page.get_by_role("slider")
    slider.focus()
    slider.press("ArrowRight")
    expect(said).to_contain_text("Round 1 of 6. Rank 0 sends chunk 0 (2.00 MB) to rank 1")
    slider.press("End")
    expect(said).to_contain_text("Every rank has the sum.")
    expect(page.get_by_role("button", name="Next")).to_be_disabled()
    page.get_by_label("way", exact=True).select_option("tree")
    expect(said).to_contain_text("Before the first round")
    page.get_by_role("button", name="Next").click()
    expect(said).to_contain_text("Round 1 of 4. Rank 1 sends all its chunks (8.00 MB) to rank 0")
    page.get_by_text("What each link has carried so far").click()
    links = page.locator(".opened details li")
    expect(links).to_have_text(["rank 1 to rank 0: 8.00 MB", "rank 3 to rank 2: 8.00 MB"])
    page.get_by_role("button", name="Play").click()
    expect(said).to_contain_text("Every rank has the sum.")  # it stops at the end by itself
    expect(page.get_by_role("button", name="Play")).to_be_visible()


# ---------------------------------------------------------------- overlap


def some_step(choose: random.Random) -> dict[str, Any]:
    sizes = [choose.randrange(1, 10 ** choose.randint(2, 9)) for _ in range(choose.randint(2, 9))]
    return {
        "stage": choose.randrange(4),
        "units": [[size, choose.choice([0.0, choose.uniform(0, 2e-9 * size), choose.random() / 4])] for size in sizes],
        "ranks": choose.choice([2, 3, 7, 8, 64, 1000]),
        "bandwidth": 10 ** choose.uniform(6, 12),
        "latency": choose.choice([0.0, 10 ** choose.uniform(-6, -3)]),
        "prefetch": choose.random() < 0.7,
    }


def test_every_moment_is_that_of_the_predicted_step(visit):
    page, choose = visit("overlap"), random.Random(36)
    asked = [some_step(choose) for _ in range(300)]
    told = page.evaluate(
        """asked => asked.map(({stage, units, ranks, bandwidth, latency, prefetch}) => {
            const step = zerolab.overlap.predicted(stage, units, ranks, bandwidth, latency, prefetch);
            const knee = zerolab.overlap.knee(step, ranks, latency);
            return JSON.stringify({...step, ...zerolab.overlap.totals(step), knee});
        })""",
        asked,
    )
    for settings, written in zip(asked, told, strict=True):
        said = json.loads(written)
        units = {str(number): unit for number, unit in enumerate(settings["units"])}
        step = predicted_step(**(settings | {"units": units}), precision=PRECISIONS["bf16"])
        for span, bar in zip(step.spans, said["spans"], strict=True):
            assert bar == {"phase": span.phase, "unit": int(span.unit), "begin": span.start, "end": span.end}, settings
        for call, bar in zip(step.calls, said["calls"], strict=True):
            known = {"op": call.op, "unit": int(call.unit), "phase": call.phase, "sent": call.sent}
            assert bar == bar | known | {"start": call.start, "end": call.end}, settings
        assert said["end"] == step.calls[-1].end
        assert said["still"] == pytest.approx(length(step.waits), abs=1e-9)
        assert said["score"] == pytest.approx(step.overlap, abs=1e-6)
        found = knee(phases_of(step, settings["latency"]))
        assert said["knee"] == (None if found == math.inf else pytest.approx(found, rel=1e-9)), settings


def test_a_link_gets_faster_and_the_rank_stands_still_for_less(visit):
    page = unlock(visit("overlap"))
    said, slider = page.locator(".opened").get_by_role("status"), page.get_by_role("slider")
    expect(said).to_contain_text("Zero3 with prefetch at 50.0 GB/s: a step takes 174.3 ms.")
    expect(said).to_contain_text("The link is above the knee, 44.2 GB/s")
    page.get_by_label("prefetch").select_option("no")
    expect(said).to_contain_text("each gather starts only when it is needed")
    slider.focus()
    slider.press("ArrowLeft")
    expect(said).to_contain_text("at 40.0 GB/s")
    expect(slider).to_have_attribute("aria-valuetext", "40.0 GB/s")
    expect(said).to_contain_text("The link is below the knee")
    page.get_by_label("stage", exact=True).select_option("0")
    expect(page.get_by_label("prefetch")).to_be_disabled()
    expect(page.locator(".legend")).to_contain_text("all-reduce")
    page.get_by_label("latency").select_option("1e-3")
    page.get_by_label("ranks").select_option("512")
    expect(said).to_contain_text("There is no knee")


# ---------------------------------------------------------------- a pipeline

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble")
LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def order_of_torch(schedule: str, rank: int, n: int, m: int) -> list[list[Any]]:
    """What torch.distributed.pipelining lets this rank do; of GPipe and 1F1B, what lesson 15's pipeline does."""
    if schedule in ("gpipe", "1f1b"):
        rooms: dict[str, Any] = {}
        exec(lesson15.PIPELINE, rooms)  # the exercise's reference
        pipe = SimpleNamespace(rank=rank, size=n, micro_batches=m)
        each = [("forward", k) for k in range(m)] + [("backward", k) for k in range(m)]
        steps = rooms["MyPipeline"].order(pipe) if schedule == "1f1b" else each
        return [[what[0].upper(), 0, batch] for what, batch in steps]
    kind = schedules.ScheduleInterleaved1F1B if schedule == "interleaved" else schedules.ScheduleInterleavedZeroBubble
    plan = object.__new__(kind)  # without its stages, which need a process group
    plan.n_local_stages, plan.pp_group_size, plan._n_microbatches = (2 if schedule == "interleaved" else 1), n, m
    plan.microbatches_per_round = n
    steps = [step for step in plan._calculate_single_rank_operations(rank) if step is not None]
    return [[LETTERS[step.computation_type.name], step.stage_index // n, step.microbatch_index] for step in steps]


def bubble_of(schedule: str, n: int, m: int) -> Fraction:
    """The closed forms: GPipe's and 1F1B's, interleaved (2104.04473), zero bubble's ZB-H1 (2401.10241)."""
    longer = {"interleaved": 2, "zero-bubble": 3}.get(schedule, 1)
    return Fraction(n - 1, longer * m + n - 1)


def test_a_pipeline_s_orders_are_torch_s_and_its_bubbles_the_papers(visit):
    page, choose = visit("pipeline"), random.Random(36)
    asked = [(name, n := choose.randint(2, 8), n * choose.randint(1, 4)) for name in SCHEDULES for _ in range(75)]
    told = page.evaluate(
        """asked => asked.map(([name, n, m]) => {
            const orders = [...Array(n).keys()].map(rank => zerolab.pipeline.order(name, rank, n, m));
            const spans = zerolab.pipeline.run(name, n, m);
            const done = spans.map(of => of.map(({what, part, batch}) => `${what} ${part} ${batch}`).join());
            const times = spans.map(of => of.map(({begin, end}) => `${begin} ${end}`).join());
            return [JSON.stringify(orders), done, times, zerolab.pipeline.totals(name, n, m)];
        })""",
        asked,
    )
    for (name, n, m), (written, done, times, totals) in zip(asked, told, strict=True):
        orders = json.loads(written)
        assert orders == [order_of_torch(name, rank, n, m) for rank in range(n)], (name, n, m)
        assert done == [",".join(f"{what} {part} {batch}" for what, part, batch in of) for of in orders]
        assert totals["bubble"] == pytest.approx(float(bubble_of(name, n, m)), abs=1e-12), (name, n, m)
        parts, most = 1 + (name == "interleaved"), {"gpipe": [m] * n, "1f1b": [min(m, n - rank) for rank in range(n)]}
        assert totals["sends"] == parts * n - 1 and totals["kept"] == most.get(name, totals["kept"])
        spans = [[[*map(float, span.split())] for span in of.split(",")] for of in times]
        steps = [(what, part * n + rank, batch) for rank, of in enumerate(orders) for what, part, batch in of]
        ends = dict(zip(steps, (end for of in spans for _, end in of), strict=True))
        for rank, of in enumerate(orders):
            before = 0.0
            for (what, part, batch), (begin, end) in zip(of, spans[rank], strict=True):
                # as soon as its rank has done what came before, and what it needs is there
                assert begin == max(before, ends.get(needed(what, part * n + rank, batch, n * parts), 0.0))
                before = end


def needed(what: str, stage: int, batch: int, stages: int) -> tuple[str, int, int]:
    """The step whose result this one needs: of the stage before or behind, or an earlier one of its own."""
    if what == "F":
        return "F", stage - 1, batch
    if what == "W":
        return "I", stage, batch
    return ("F", stage, batch) if stage == stages - 1 else (what, stage + 1, batch)


def test_a_pipeline_tick_by_tick(visit):
    page = unlock(visit("pipeline"))
    said, slider = page.locator(".opened").get_by_role("status"), page.get_by_role("slider")
    expect(said).to_contain_text("GPipe: 90 ticks, of which ranks stand still for 46.7 % on average.")  # as predicted
    for label, value in (("schedule", "1f1b"), ("ranks", "4"), ("micro-batches per rank", "2")):
        page.get_by_label(label, exact=True).select_option(value)
    expect(said).to_contain_text("1F1B: 66 ticks, of which ranks stand still for 27.3 % on average.")
    slider.focus()
    slider.press("ArrowRight")
    expect(said).to_contain_text("Tick 1 of 66. Rank 0: forward of micro-batch 0. Of 4 ranks 3 stand still.")
    page.get_by_label("schedule", exact=True).select_option("zero-bubble")
    expect(said).to_contain_text("zero bubble: 54 ticks, of which ranks stand still for 11.1 % on average.")
    expect(page.locator(".legend")).to_contain_text("gradient of the weights")


# ---------------------------------------------------------------- a step

RECORDING = json.loads((SITE / "explorables" / "step.json").read_text())


def told_by_the_recorder(what: str) -> str:
    """An expression about docs/site/record.py, in a process of its own."""
    program = f"import record; print({what})"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def recorded_again(names: list[str]) -> dict[str, Any]:
    """What it would write of these courses."""
    return json.loads(told_by_the_recorder(f"record.written(record.record({names}))"))


def spelled_out(recording: dict[str, Any]) -> dict[str, Any]:
    """The courses with the lines of code in them, as the numbers of the lines depend on what was recorded with them."""
    lines = [*recording["lines"], None]
    return {
        name: course | {"moments": [[*m[:2], lines[-1 if m[2] is None else m[2]], m[3]] for m in course["moments"]]}
        for name, course in recording["courses"].items()
    }


@pytest.mark.exhaustive
@pytest.mark.parametrize("names", [["3 bf16"], ["0 bf16", "1 fp32", "2 bf16"]], ids=str)
def test_a_step_is_as_it_was_recorded(names):
    """The same bytes in the same order. If the package has changed: `python docs/site/record.py`."""
    again, kept = spelled_out(recorded_again(names)), spelled_out(RECORDING)
    assert again == {name: kept[name] for name in names}


@pytest.mark.parametrize("name", RECORDING["courses"])
def test_what_was_recorded_agrees_with_the_formulas(name):
    stage, precision = int(name[0]), PRECISIONS[name[2:]]
    course, parameters = RECORDING["courses"][name], RECORDING["parameters"]
    ends = [number for number, moment in enumerate(course["moments"]) if moment[0] == "step"]
    before_step = dict(zip(RECORDING["kinds"], course["moments"][ends[0] - 1][3], strict=True))
    assert tuple(RECORDING["kinds"]) == KINDS
    for kind, size in formulas.state_bytes(stage, 4, parameters, precision).items():
        assert before_step[kind] == pytest.approx(size, rel=0.001)  # Adam's step counters, and a loss
    root = next(payload for op, unit, payload, *_ in course["calls"] if unit == "root")
    root //= 4 if name.endswith("fp32") else 2
    sent = sum(call[3] for call in course["calls"])
    assert sent == formulas.moved_bytes(stage, 4, parameters, root if stage == 3 else 0, precision)


def test_every_moment_has_its_place_in_every_stage(visit):
    page = visit("step")
    for precision in PRECISIONS:
        courses = [f"{stage} {precision}" for stage in range(4)]
        passages = page.evaluate(
            "names => names.map(name => zerolab.step.passages(zerolab.recording.courses[name]))", courses
        )
        assert len({tuple(dict.fromkeys(names)) for names in passages}) == 1
    found = page.evaluate("zerolab.step.lines.map(line => ({...zerolab.step.method(line), text: line[2]}))")
    assert all(method["lines"][method["at"]].strip() == method["text"] for method in found)


def test_the_stage_changes_and_the_moment_stays(visit):
    page = unlock(visit("step"))
    said, slider = page.locator(".opened").get_by_role("status"), page.get_by_role("slider")
    slider.focus()
    slider.press("ArrowRight")
    expect(said).to_contain_text("Moment 2 of ")
    calls = RECORDING["courses"]["3 fp32"]["calls"]
    slider.fill(next(str(first) for op, unit, *_, first, _ in calls if (op, unit) == ("reduce_scatter", "blocks.2")))
    expect(said).to_contain_text("post_backward of blocks.2")
    expect(page.locator("mark")).to_contain_text("return self.comm.reduce_scatter")
    expect(page.locator(".units .at-work .call")).to_contain_text("reduce-scatter 793 kB")
    for stage, name in enumerate(["DDP", "Zero1", "Zero2"]):
        button = page.get_by_role("button", name=name)
        shown = button.text_content().removeprefix(f"{stage} {name} ")
        button.click()
        expect(button).to_have_attribute("aria-pressed", "true")
        expect(said).to_contain_text("post_backward of blocks.2")
        expect(said).to_contain_text(f"Rank 0 holds {shown}.")
    page.get_by_label("precision").select_option("bf16")
    expect(said).to_contain_text("post_backward of blocks.2")


# ---------------------------------------------------------------- an allocator

ALLOCATIONS = json.loads((SITE / "explorables" / "allocator.json").read_text())
BUFFERS = [Buffer(*ALLOCATIONS["owners"][owner], "", "", ("", 0, "")) for owner in ALLOCATIONS["buffers"]]
EVENTS = [Event(0.0, phase, unit, *event) for phase, unit, of in ALLOCATIONS["stretches"] for event in of]
STEP = Timeline(0, 1, 0, BUFFERS, EVENTS, ALLOCATIONS["before"], closed=True)


def some_events(choose: random.Random) -> Timeline:
    """Buffers that come, are resized and go."""
    line = Timeline(0, 1, 0, closed=True)
    line.buffers = [Buffer(choose.choice(KINDS), "", "", "", ("", 0, "")) for _ in range(choose.randint(1, 12))]
    for _ in range(choose.randint(1, 60)):
        size = choose.choice([0, 0, choose.randint(1, 40_000)])
        line.events.append(Event(0.0, "forward", "", choose.randrange(len(line.buffers)), size))
    return line


def replayed(line: Timeline, size: int, apart: list[str]) -> dict[str, Any]:
    """What lesson 10's allocator does with it. Where it runs out of memory: what it says, and after which event."""
    try:
        ways = arena.replay(line, size, apart)
    except arena.OutOfMemory as error:
        places = [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)]
        return {"failed": str(error), "moment": max(place.get("moment", 0) for place in places)}
    return {
        "failed": "",
        "moment": ways.moment,
        "needed": ways.needed,
        "lost": ways.lost,
        "top": ways.arena.top,
        "holes": [list(hole) for hole in ways.arena.holes],
        "pieces": [list(piece) for piece in sorted(ways.pieces, key=lambda piece: piece.begin)],
    }


@pytest.mark.exhaustive
def test_an_allocator_s_addresses_are_lesson_10_s(visit):
    page, choose = visit("allocator"), random.Random(36)
    lines = [STEP] * 8 + [some_events(choose) for _ in range(292)]
    asked = []
    for line in lines:
        apart = choose.choice([[], ["gradients"], choose.sample(KINDS, 2)])
        needed = arena.replay(line, apart=apart).arena.size
        asked.append((line, needed, round(needed * choose.choice([1, choose.uniform(0.7, 1), 1.1])), apart))
    told = page.evaluate(
        """asked => asked.map(([events, size, apart]) => {
            const { replay, needs, peak, mostLost } = zerolab.allocator;
            const course = replay(events || zerolab.allocator.recorded, size, apart);
            const end = { failed: course.failed, moment: Math.max(0, course.moments.length - 1) };
            const pieces = course.pieces.map(({ kind, start, bytes, begin, end }) => [kind, start, bytes, begin, end]);
            const holes = course.memory.holes;
            const all = { needed: peak(course), lost: mostLost(course), top: course.memory.top, holes, pieces };
            return [needs(events || zerolab.allocator.recorded, apart), course.failed ? end : { ...end, ...all }];
        })""",
        [(None if line is STEP else events_of(line), size, apart) for line, _, size, apart in asked],
    )
    for (line, needed, size, apart), (needs, course) in zip(asked, told, strict=True):
        assert needs == needed
        assert course == replayed(line, size, apart), (size, apart)
    assert 60 < sum(bool(course["failed"]) for _, course in told) < 240


def events_of(line: Timeline) -> list[dict[str, Any]]:
    return [{"buffer": e.buffer, "bytes": e.nbytes, "kind": line.buffers[e.buffer].kind} for e in line.events]


@pytest.mark.exhaustive
def test_the_allocations_are_as_they_were_recorded():
    """The same sizes in the same order. If the package has changed: `python docs/site/record.py`."""
    assert json.loads(told_by_the_recorder("record.allocations()")) == ALLOCATIONS


def test_where_first_fit_fragments(visit):
    ways = arena.replay(STEP, until="backward")
    page = visit("allocator")
    page.locator(".prediction input").fill(str(ways.arena.largest / 1e6))
    page.get_by_role("button", name="Predict").click()
    free, largest, wanted = (in_bytes(size) for size in (ways.arena.free, ways.arena.largest, 4 * 1_263_616))
    said, slider = page.locator(".opened").get_by_role("status"), page.get_by_role("slider", name="event of the step")
    expect(page.get_by_role("status").first).to_contain_text(
        f"It is {largest}; you said {ways.arena.largest / 1e6}: less than 0.1 % off"
    )
    state = f"{free} are free: {len(ways.arena.holes)} holes, the largest of {largest}"
    expect(said).to_contain_text(f"Event {ways.moment - STEP.before} of {len(EVENTS) - STEP.before}, backward of root")
    expect(said).to_contain_text(state)
    page.get_by_label("memory of the device").fill("43.3")  # more is free than wanted, as allocator.md says
    with pytest.raises(arena.OutOfMemory) as too_little:
        arena.replay(STEP, 43_300_000)
    expect(said).to_contain_text(f"Out of memory for activations of blocks.5: {too_little.value}.")
    page.get_by_label("memory of the device").fill("43.4")
    page.get_by_label("after backward, ask for").select_option("5.05 MB")
    expect(said).to_contain_text(f"Out of memory for communication of all gradients: {wanted} wanted, and {state}.")
    with pytest.raises(arena.OutOfMemory):
        ways.arena.take(4 * 1_263_616)
    page.get_by_label("memory of the device").fill("46.4")
    expect(said).to_contain_text(f"Event {ways.moment - STEP.before} of")  # where it was before it failed
    slider.press("ArrowRight")
    expect(said).to_contain_text("communication of all gradients, 5.05 MB at 41.3 MB, placed.")
    page.get_by_label("gradients", exact=True).select_option("flat buffer")
    expect(said).to_contain_text("Out of memory for activations of blocks.5")
    page.get_by_label("memory of the device").fill("48.1")
    slider.fill(str(ways.moment - STEP.before))
    apart = arena.replay(STEP, 48_100_000, ["gradients"], until="backward").arena
    expect(said).to_contain_text(f"{in_bytes(apart.free)} are free: 2 holes, the largest of {in_bytes(apart.largest)}.")
    page.get_by_label("after backward, ask for").select_option("20 MB")
    expect(said).to_contain_text(f"{in_bytes(apart.free)} are free")  # where it was before
    slider.press("ArrowRight")
    expect(said).to_contain_text("activations of a larger batch, 20.0 MB at 20.7 MB, placed.")
    page.get_by_label("gradients", exact=True).select_option("first fit")
    expect(said).to_contain_text("Out of memory for activations of a larger batch: 20.0 MB wanted")
    page.get_by_label("gradients", exact=True).select_option("flat buffer")
    expect(said).to_contain_text("Event 557 of 874")  # where it was before it failed
    slider.focus()
    slider.press("End")
    expect(said).to_contain_text("Event 874 of 874, step: activations of root, 512 B at 20.7 MB, released.")
    slider.press("Home")
    expect(said).to_contain_text("Before the step: 15.2 MB are in use, 5.45 MB are reserved, and 27.4 MB are free")


# ---------------------------------------------------------------- the front page


def test_the_ladder_stands_still_for_those_who_ask(visit):
    page = visit("ladder")
    expect(page.get_by_role("button", name="Play")).to_be_visible()  # `visit` asks for less motion
    said = page.get_by_role("img").get_attribute("aria-label")
    held = re.findall(r"([\d.]+) MB with (\w+)", said)
    assert [name for _, name in held] == ["DDP", "Zero1", "Zero2", "Zero3"]
    for stage, (size, _) in enumerate(held):
        states = formulas.state_bytes(stage, 4, RECORDING["parameters"])
        assert float(size) == pytest.approx(sum(states.values()) / 1e6, rel=0.005)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    moment = page.locator(".moment")
    stood = moment.text_content()
    page.get_by_role("button", name="Play").click()
    expect(moment).not_to_have_text(stood)
    page.get_by_role("button", name="Pause").click()
    expect(page.get_by_role("button", name="Play")).to_be_visible()


def test_the_ladder_moves_by_itself(browser, files):
    page = browser.new_page(reduced_motion="no-preference")
    page.goto(files["ladder"].as_uri())
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    expect(page.locator(".moment")).to_contain_text("after-step")  # it begins before the optimizer's step
    page.close()
