"""`zerolab train`: it learns, at every stage as one process does; it stops, goes on, and survives being killed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import unittest.mock
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs_common import PYTHONPATH, rank_ordered_mean, same
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

import zerolab
from zerolab.apps import train
from zerolab.checkpoint import read_manifest
from zerolab.cli import main
from zerolab.tasks import data
from zerolab.tasks.models import PairEncoder

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
TINY = {
    "text": "--layers 1 --width 16 --context 16 --global-batch 8",
    "images": "--layers 1 --width 8 --global-batch 16",
    "pairs": "--layers 1 --width 16 --global-batch 8",
}


def arguments(words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return parser.parse_args(words.split())


def tiny(task: str, words: str) -> str:
    return f"--task {task} {TINY[task]} {words}"


def run(*runs: str, stop_after: int | None = None) -> tuple[list[str | None], str]:
    """On a rank: train as each string says; why not, and what was printed. SIGTERM to the last in step `stop_after`."""
    hooks = []
    if stop_after is not None and torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        hooks.append(register_optimizer_step_post_hook(Terminate(stop_after)))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            return [train.attempt(arguments(words)) for words in runs], printed.getvalue()
    finally:
        for hook in hooks:
            hook.remove()


def well(ranks: zerolab.Ranks, size: int, *runs: str, **options: Any) -> str:
    """Train on `size` ranks; nothing may be refused. What the first rank printed; the others must be silent."""
    results = ranks.run(functools.partial(run, **options), *runs, ranks=size)
    assert [problems for problems, _ in results] == [[None] * len(runs)] * size
    assert [printed for _, printed in results[1:]] == [""] * (size - 1)
    return results[0][1]


class Terminate:
    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self, *ignored: Any) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGTERM)


def lines(path: Path, key: str) -> dict[int, float]:
    """{step: value} of the lines of metrics that have the key; a step that comes twice is an error."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    values = [(row["step"], row[key]) for row in found if key in row]
    assert len(dict(values)) == len(values)
    return dict(values)


def weights(task: str, checkpoint: Path) -> dict[str, Tensor]:
    args = arguments(tiny(task, ""))
    train.check(args, 1)
    model = train.make_task(args).model()
    zerolab.load_model_weights(checkpoint, model)
    return model.state_dict()


# -- it learns -------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_digits_are_those_that_scikit_learn_loads():
    from sklearn.datasets import load_digits

    found, split = load_digits(), data.digits()
    held_out = torch.arange(len(found.target)) % 5 == 4
    images = (torch.from_numpy(found.images)[:, None] * 255 / 16).round().to(torch.uint8)
    labels = torch.from_numpy(found.target).long()
    expected = data.Split(images[~held_out], labels[~held_out], images[held_out], labels[held_out])
    assert same(split._asdict(), expected._asdict()) == []


@pytest.mark.exhaustive
def test_digits_at_every_stage(ranks, tmp_path):
    """95 % of images that were never seen, after 50 steps."""
    one = "--task images --steps 50 --stage {0} --metrics {1}/{0}.jsonl".format
    well(ranks, 2, *(one(stage, tmp_path) for stage in range(4)))
    for stage in range(4):
        accuracies = lines(tmp_path / f"{stage}.jsonl", "validation_accuracy")
        assert list(accuracies) == [50] and accuracies[50] >= 0.95


@pytest.mark.exhaustive
def test_pairs_and_the_other_precisions(ranks, tmp_path):
    """Sentence pairs; digits in bf16 and in fp16; with accumulation, clipping and offload on the way."""
    runs = (
        f"--task pairs --steps 120 --global-batch 32 --lr 5e-3 --clip 1 --metrics {tmp_path}/pairs.jsonl",
        f"--task images --steps 50 --precision bf16 --stage 3 --metrics {tmp_path}/bf16.jsonl",
        f"--task images --steps 50 --precision fp16 --accumulate 2 --offload optimizer --metrics {tmp_path}/fp16.jsonl",
    )
    well(ranks, 2, *runs)
    assert lines(tmp_path / "pairs.jsonl", "validation_accuracy")[120] >= 0.75
    for name in ("bf16", "fp16"):
        assert lines(tmp_path / f"{name}.jsonl", "validation_accuracy")[50] >= 0.95


def alone(words: str, size: int, steps: int | None = None) -> tuple[dict[int, float], dict[str, Tensor]]:
    """The losses and weights of one process that does not use the engine, and plays all ranks of a world of `size`.

    steps: stop after so many of the run's.
    """
    args = arguments(words)
    train.check(args, size)
    task = train.make_task(args)
    torch.manual_seed(args.seed)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    losses = {}
    for step in range(args.steps if steps is None else steps):
        optimizer.param_groups[0]["lr"] = train.learning_rate(args, step)
        shares = train.samples(args.seed, step, args.global_batch, len(task.data.inputs)).tensor_split(size)
        grads, mean = [], 0.0
        for rank, share in enumerate(shares):
            torch.manual_seed(train.seed_of(args.seed, "dropout", step, rank))
            model.zero_grad()
            x, y = task.data.inputs[share].long(), task.data.targets[share].long()
            loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten(), reduction="none").mean()
            loss = loss / (args.global_batch / (size * len(share)))  # divided by 1.0 where all have equally many
            loss.backward()
            grads.append([p.grad for p in model.parameters()])
            mean += loss.item()
        for param, *each in zip(model.parameters(), *grads, strict=True):
            param.grad = rank_ordered_mean(each)
        optimizer.step()
        losses[step + 1] = mean / size
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("task", "batch"), [("text", 9), ("text", 8), pytest.param("pairs", 9, marks=pytest.mark.exhaustive)]
)
def test_every_stage_is_one_process(ranks, tmp_path, task, batch):
    """Loss for loss and weight for weight, bit for bit, also with dropout (pairs) and with shares of 3, 3 and 2."""
    one = tiny(task, "--steps 6 --stage {0} --metrics {1}/{0}.jsonl --checkpoint {1}/{0}").format
    runs = [one(stage, tmp_path).replace("--global-batch 8", f"--global-batch {batch}") for stage in range(4)]
    well(ranks, 3, *runs)
    losses, expected = ranks.run(alone, runs[0], 3, ranks=1)[0]
    for stage in range(4):
        assert lines(tmp_path / f"{stage}.jsonl", "loss") == losses
        assert same(weights(task, tmp_path / f"{stage}/step-000006"), expected) == []
    if task == "text":
        assert losses[6] < losses[1] - 0.01


# -- it stops and goes on --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options"),
    [("images", "--precision fp16 --stage 2"), pytest.param("pairs", "--stage 3", marks=pytest.mark.exhaustive)],
)
def test_a_stop_costs_nothing(ranks, tmp_path, task, options):
    """SIGTERM on one rank: all save and stop. The same command goes on, and ends with the same bits."""
    one = tiny(task, options + " --steps 8 --save-every 3 --checkpoint {0} --metrics {0}.jsonl").format
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    well(ranks, 2, one(whole))
    last = stopped / "step-000005"
    said = well(ranks, 2, one(stopped), stop_after=5)
    assert said.endswith(f"\nstopped after step 5 of 8; saved {last}; the same command resumes there\n")
    assert sorted(path.name for path in stopped.iterdir()) == ["step-000003", "step-000005"]

    resumed, about, rest = well(ranks, 2, one(stopped)).split("\n", 2)
    assert resumed == f"resuming from {last}" and about.endswith(", steps 6 to 8") and rest.startswith("step 8: loss ")
    assert well(ranks, 2, one(stopped)).endswith("nothing to do: the run has completed 8 steps, and --steps is 8\n")
    assert read_manifest(stopped / "step-000008")[1] == read_manifest(whole / "step-000008")[1]  # with all checksums
    assert lines(Path(f"{stopped}.jsonl"), "loss") == lines(Path(f"{whole}.jsonl"), "loss")


def test_other_ranks_see_the_same_samples(ranks, tmp_path):
    """Two ranks, then four or three with two micro-batches each at another stage. Four have two samples each; three
    have 2+1, 2+1 and 1+1, and every sample counts the same. Other samples give other losses by far."""
    one = tiny("text", "--steps 8 --save-every 4 --checkpoint {0} --metrics {0}.jsonl --stage {1}").format
    two = tmp_path / "2"
    well(ranks, 2, one(two, 2))
    before, norms = lines(Path(f"{two}.jsonl"), "loss"), lines(Path(f"{two}.jsonl"), "grad_norm")
    assert abs(before[5] - before[6]) > 1e-3  # what other samples do
    for size in (4, 3):
        other = tmp_path / str(size)
        shutil.copytree(two / "step-000004", other / "step-000004")
        well(ranks, size, one(other, 3) + " --accumulate 2")
        losses = lines(Path(f"{other}.jsonl"), "loss")
        assert list(losses) == [5, 6, 7, 8]
        assert losses == pytest.approx({step: before[step] for step in losses}, abs=1e-5)
        found = lines(Path(f"{other}.jsonl"), "grad_norm")
        assert found == pytest.approx({step: norms[step] for step in found}, rel=1e-3)
        a, b = weights("text", two / "step-000008"), weights("text", other / "step-000008")
        assert all(torch.allclose(a[name], b[name], atol=1e-4) for name in a)


def test_a_run_with_default_settings_goes_on_on_any_number_of_ranks(ranks, tmp_path):
    words = "--task text --layers 1 --width 8 --context 8 --save-every 1 --checkpoint " + str(tmp_path)
    for step, size in enumerate((2, 3, 1, 4), 1):
        said = well(ranks, size, f"{words} --steps {step}")
        assert "fp32, 32 samples per step, " in said and ("resuming from" in said) == (step > 1)


def test_samples_depend_on_seed_and_step_alone():
    seen = torch.cat([train.samples(3, step, 4, 10) for step in range(5)])
    assert sorted(seen[:10].tolist()) == sorted(seen[10:].tolist()) == list(range(10))  # two epochs, each complete
    assert seen[:10].tolist() != seen[10:].tolist()
    assert torch.cat([train.samples(3, step, 20, 10) for step in range(1)]).tolist() == seen.tolist()
    assert train.samples(4, 0, 10, 10).tolist() != seen[:10].tolist()


class Beside:
    """A hook that tries in a step of the last rank to begin a second run, which that rank keeps back from its own."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint, self.refused = checkpoint, ""

    def __call__(self, *ignored: Any) -> None:
        try:
            with train.Lock(self.checkpoint):
                self.refused = "not refused"
        except train.Refused as why:
            self.refused = str(why)


def run_with_another_beside(words: str, checkpoint: str) -> tuple[str | None, str, int]:
    """On a rank: why the run did not end well, why a second one could not begin meanwhile, and the process."""
    beside = Beside(checkpoint)
    hook = register_optimizer_step_post_hook(beside)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return train.attempt(arguments(words)), beside.refused, os.getpid()
    finally:
        hook.remove()


def test_two_runs_do_not_share_a_folder(ranks, tmp_path):
    """The second is refused at once; a lock file that a killed run has left does not count; the last removes it."""
    folder = tmp_path / "new/run"
    words = tiny("text", f"--steps 2 --checkpoint {folder}")
    one, two = ranks.run(run_with_another_beside, words, str(folder), ranks=2)
    assert one[0] is two[0] is None
    for refused in (one[1], two[1]):
        assert refused.startswith(f"--checkpoint {folder}: another run saves there (process {one[2]} on ")
        assert "\n" not in refused
    assert [path.name for path in folder.iterdir()] == ["step-000002"]

    (folder / ".lock").write_text("process 1 on a host that is gone")
    well(ranks, 2, words)
    with train.Lock(str(folder)):
        for problem in ranks.run(refusals, 0, words, words, ranks=2):
            assert problem is not None and problem.startswith(f"--checkpoint {folder}: another run saves there (proc")
    assert [path.name for path in folder.iterdir()] == ["step-000002"]


def test_a_lock_goes_with_its_process(tmp_path):
    """Killed, it leaves the file and no lock."""
    code = f"from zerolab.apps import train; held = train.Lock({str(tmp_path)!r}); print('held'); input()"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": PYTHONPATH}, stdin=pipe, stdout=pipe, text=True
    )
    try:
        assert process.stdout.readline() == "held\n"
        with pytest.raises(train.Refused, match=f"process {process.pid} on"):
            train.Lock(str(tmp_path))
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / ".lock").exists()
    with train.Lock(str(tmp_path)):
        pass
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_refused_at_the_start(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    cases = {"/proc/run": "cannot write there: No such file", f"{tmp_path}/file": "cannot write there: File exists"}
    for folder, says in cases.items():
        words = tiny("text", f"--steps 2 --checkpoint {folder}")
        for problem in ranks.run(refusals, 0, words, words, ranks=2):
            assert problem is not None and problem.startswith(f"--checkpoint {folder}: {says}")
    words, elsewhere = (tiny("text", f"--steps 2 --checkpoint {tmp_path}/{name}") for name in ("a/b", "c"))
    for problem in ranks.run(refusals, 0, words, elsewhere, ranks=2):
        says = "rank 0 has this folder, and all must see the same file system"
        assert problem == f"rank 1: --checkpoint {tmp_path}/c: {says}"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]  # nor is an empty folder left


def run_on_a_full_disk(words: str) -> str | None:
    """On a rank: train where files may have a kilobyte."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return train.attempt(arguments(words))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_is_named(ranks, tmp_path):
    words = tiny("text", f"--steps 2 --checkpoint {tmp_path}/run")
    for problem in ranks.run(run_on_a_full_disk, words, ranks=2):
        assert problem is not None and "File too large" in problem and f"{tmp_path}/run/step-000002.tmp-" in problem
    assert not list(tmp_path.iterdir())


def stopped_early(words: str) -> tuple[list[str | None], str]:
    """On a rank: SIGTERM comes after the lock was taken, and before the first step."""
    resume = train.Run.resume

    def then_resume(self: train.Run) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return resume(self)

    with unittest.mock.patch.object(train.Run, "resume", then_resume):
        return run(words)


def test_a_signal_before_the_first_step(ranks, tmp_path):
    words = tiny("text", f"--steps 5 --checkpoint {tmp_path}/run")
    ((problems, said), _) = ranks.run(stopped_early, words, ranks=2)
    assert problems == [None] and "stopped after step 1 of 5; saved" in said
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000001"], "nor is a lock left"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("begun", ["", "SIGTERM", "SIGKILL"])
def test_a_signal_before_the_ranks_take_note_of_it(monkeypatch, capsys, number, begun):
    """Ranks that have not come so far are ended by it; where there are none yet, none begin."""

    def launch(*ignored: Any, **also_ignored: Any) -> list[None]:
        os.kill(os.getpid(), number)
        if not begun:
            return [None]
        raise zerolab.RankError(f"rank 0 of 2 was killed by {begun}, in step 500", 0, "")

    child = unittest.mock.Mock()
    monkeypatch.setattr(train.multiprocessing, "active_children", lambda: [child] * bool(begun))
    monkeypatch.setattr(zerolab, "launch", launch)
    if begun == "SIGKILL":  # the memory was full while the signal was on its way
        assert main(["train", "--ranks", "2"]) == 1
        assert "was killed by SIGKILL, in step 500" in capsys.readouterr().err
    else:
        with pytest.raises(SystemExit, match=str(128 + number)):
            main(["train", "--ranks", "2"])
        assert capsys.readouterr().err == f"zerolab train: ended by {number.name}\n"
    assert child.terminate.called == bool(begun)


def run_into(words: str, file: str) -> tuple[str | None, str]:
    """On a rank: train with `file` as standard output; why not, and what is still held back for it."""
    with open(file, "w") as stream, contextlib.redirect_stdout(stream):
        return train.attempt(arguments(words))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(("file", "metrics"), [("/dev/full", "/dev/null"), ("/dev/null", "/dev/full")])
def test_where_nothing_more_can_be_written_the_run_is_saved(ranks, tmp_path, file, metrics):
    name = "standard output" if file == "/dev/full" else "--metrics /dev/full"
    words = tiny("text", f"--steps 5 --checkpoint {tmp_path}/run --metrics {metrics}")
    problem, other = ranks.run(run_into, words, file, ranks=2)
    step = 1 if file == "/dev/full" else 2  # the ranks tell each other at the end of a step
    saved = f"saved {tmp_path}/run/step-{step:06}; the same command resumes there"
    assert problem == f"{name}: No space left on device: stopped after step {step} of 5; {saved}" and other is None
    well(ranks, 2, words.replace("/dev/full", "/dev/null"))


def test_what_a_run_says(ranks, tmp_path):
    """What it trains, before the first step; then how it goes, where there is no terminal for a bar."""
    words = "--task text --layers 1 --width 16 --context 16 --steps 4 --validate-every 3"
    first, *rest = talkative(ranks, 3, words + " --global-batch 33")
    count = sum(value.numel() for value in train.make_task(arguments(words)).model().parameters())
    assert first == (
        f"text: a model of {count:,} parameters, stage 2 (Zero2) on 3 ranks, fp32, "
        "33 samples per step (usually 32), steps 1 to 4"
    )
    assert [re.sub(r"\d\.[\d.]+|(?<=, )[\d.e+]+(?= steps)", "x", line) for line in rest] == [
        "step 1 of 4: loss x, x steps per second",
        "step 2 of 4: loss x, x steps per second",
        "step 3: loss x, validation_loss x, validation_accuracy x",
        "step 4: loss x, validation_loss x, validation_accuracy x",
    ]
    (first, *_) = talkative(ranks, 1, tiny("text", "--steps 1 --stage 0"))
    assert first.endswith("stage 0 (DDP) on 1 rank, fp32, 8 samples per step (usually 32), steps 1 to 1")


def talk(words: str) -> tuple[list[str | None], str]:
    before, train.SAY_EVERY = train.SAY_EVERY, 0.0
    try:
        return run(words)
    finally:
        train.SAY_EVERY = before


def talkative(ranks: zerolab.Ranks, size: int, words: str) -> list[str]:
    """What the first rank says if it says something at each step; the others say nothing."""
    results = ranks.run(talk, words, ranks=size)
    assert all(problems == [None] for problems, _ in results), results
    assert [said for _, said in results[1:]] == [""] * (size - 1)
    return results[0][1].splitlines()


def test_any_number_of_ranks_shares_the_default_batch():
    for words, size, batch in (("", 4, 32), ("", 3, 32), ("", 5, 32), ("--accumulate 16", 4, 64), ("", 100, 100)):
        args = arguments(words)
        train.check(args, size)
        assert args.global_batch == batch


def test_a_damaged_checkpoint_is_passed_over(ranks, tmp_path):
    """Bytes changed in the newest, the manifest gone from the one before: both are named, the third is taken."""
    run_of = tiny("text", f"--steps 4 --save-every 1 --keep 4 --stage 2 --checkpoint {tmp_path}/run")
    well(ranks, 2, run_of)
    folders = [tmp_path / f"run/step-00000{step}" for step in range(5)]
    before = read_manifest(folders[4])[1]
    file = next(folders[4].glob("rank-00001*"))
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    (folders[3] / "manifest.json").unlink()
    said = well(ranks, 2, run_of).splitlines()
    assert said[0].startswith(f"skipping {folders[4]}: rank 1: {file}: ") and "is damaged" in said[0]
    assert said[1].startswith(f"skipping {folders[3]}: ") and "not a zerolab checkpoint" in said[1]
    assert said[2] == f"resuming from {folders[2]}"
    assert read_manifest(folders[4])[1] == before and (folders[3] / "manifest.json").is_file()

    for folder in folders[1:]:
        (folder / "manifest.json").write_text("{}")
    for problems, _ in ranks.run(run, run_of, ranks=2):
        assert problems == [f"no checkpoint in {tmp_path}/run can be loaded; to start over, move them away"]


def test_a_damaged_checkpoint_costs_no_good_one(ranks, tmp_path):
    """The newest of two is cut off after a stop; the run goes on from the other one, and keeps two that load."""
    one = tiny("text", f"--steps 12 --save-every 4 --keep 2 --checkpoint {tmp_path}")
    well(ranks, 2, one, stop_after=6)
    file = next(tmp_path.glob("step-000006/rank-00000*"))
    os.truncate(file, file.stat().st_size // 2)
    said = well(ranks, 2, one, stop_after=4)  # in step 8
    assert said.startswith(f"skipping {tmp_path}/step-000006: ") and f"resuming from {tmp_path}/step-000004\n" in said
    names = [f"step-00000{step}" for step in (4, 6, 8)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    well(ranks, 2, one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000008", "step-000012"]


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--stage 4", "invalid choice: 4"),
        ("--steps 0", "--steps: must be 1 or more, not 0"),
        ("--ranks 0", "--ranks: must be from 1 to 64, not 0"),
        ("--ranks 3 --global-batch 2", "2 is enough for at most 2 ranks with 1 micro-batch each, not for 3"),
        ("--global-batch 32 --accumulate 16", "32 is enough for at most 2 ranks with 16 micro-batches each, not for 4"),
        ("--accumulate 0", "--accumulate: must be 1 or more"),
        ("--lr nan", "--lr: must be a number above 0"),
        ("--clip 0", "--clip: must be a number above 0"),
        ("--width 30", "--width must be a multiple of 4"),
        ("--stage 0 --offload optimizer", "--offload needs stage 1, 2 or 3"),
        ("--precision fp8", "invalid choice: 'fp8'"),
        ("--keep 0", "--keep: must be 1 or more"),
        ("--nonsense", "unrecognized arguments"),
    ],
)
def test_a_bad_argument_is_one_line(capsys, words, says):
    with pytest.raises(SystemExit, match="2"):
        main(["train", *words.split()])
    printed = capsys.readouterr()
    assert printed.out == "" and says in printed.err and printed.err.count("\n") == 1


def refusals(rank: int, words: str, words_of_rank_1: str) -> str | None:
    return train.attempt(arguments(words_of_rank_1 if torch.distributed.get_rank() == 1 else words))


def test_a_bad_argument_is_one_line_under_torchrun_too(capsys, monkeypatch):
    for rank, count in ((0, 1), (1, 0)):
        monkeypatch.setenv("RANK", str(rank))
        with pytest.raises(SystemExit, match="2"):
            train.main(["--stage", "x"])
        assert capsys.readouterr().err.count("\n") == count


def test_an_error_does_not_wait_for_the_other_ranks(monkeypatch):
    """On NCCL, to leave the group is to wait for ranks that may wait for this one: its traceback would never show."""
    left = []
    monkeypatch.setattr(zerolab, "init", lambda: None)
    monkeypatch.setattr(train.dist, "destroy_process_group", lambda: left.append("left"))
    for result, leaves in ((ValueError("a bad batch"), []), (None, ["left"])):
        monkeypatch.setattr(train, "run_rank", unittest.mock.Mock(side_effect=[result]))
        with pytest.raises(ValueError, match="a bad batch") if result else contextlib.nullcontext():
            assert train.main([]) == 0
        assert left == leaves


def test_what_cannot_begin_is_one_line_on_all_ranks(ranks, tmp_path):
    """Also if only one rank finds it. Nobody waits for the others, and nothing is changed."""
    text, other = tmp_path / "text", tmp_path / "other"
    text.write_text("To be or not to be, that is the question. " * 20)
    other.write_text("To be or not to be, that is the answer. " * 20)
    one = tiny("text", f"--steps 2 --checkpoint {tmp_path}/run --data ")
    well(ranks, 2, one + str(text))
    (tmp_path / "notes").write_text("not mine\n")
    here = tmp_path / "run/step-000002"
    cases = [
        (f"{one}{tmp_path}/none", "", f"--data: {tmp_path}/none cannot be read: No such file or directory"),
        (one + str(text), f"{one}{tmp_path}/none", f"rank 1: --data: {tmp_path}/none cannot be read"),
        (one + str(text), one + str(other), "rank 1 has different data from rank 0"),
        (f"{one}{text} --context 90", "", f"--data: {text} has 840 bytes: too few for --context 90"),
        (
            f"{one}{text} --metrics {tmp_path}/notes",
            "",
            f"--metrics {tmp_path}/notes: the file has lines that are not metrics",
        ),
        (f"{one}{text} --resume never", "", f"--resume never, but {here} is there already"),
        (f"{one}{text} --resume {tmp_path}/none", "", f"--resume {tmp_path}/none: rank 0: {tmp_path}/none is not a"),
        (one + str(other), "", f"{here} was trained with different data"),
        (f"{one}{text} --seed 1", "", f"{here} was trained with --seed 0, not 1: the run would see different samples"),
        (f"{one}{text} --global-batch 6", "", f"{here} was trained with --global-batch 8, not 6"),
        (f"{one}{text} --width 32", "", f"no checkpoint in {tmp_path}/run can be loaded"),
    ]
    for words, words_of_rank_1, says in cases:
        for problem in ranks.run(refusals, 0, words, words_of_rank_1 or words, ranks=2):
            assert problem is not None and problem.startswith(says) and "\n" not in problem, (problem, says)
    assert (tmp_path / "notes").read_text() == "not mine\n"
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-000002"]


def test_metrics_of_steps_that_come_again_are_dropped(tmp_path):
    path, mine = tmp_path / "run.jsonl", tmp_path / "run.jsonl.tmp"
    path.symlink_to("there.jsonl")
    mine.touch()
    for begin, kept in ((0, []), (2, [1, 2]), (2, [1, 2])):
        with train.Metrics(str(path), begin) as metrics:
            assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == kept
            for step in range(begin + 1, 5):
                metrics.write(step=step, loss=float("nan"))
                assert path.read_text().endswith(f'{{"step": {step}, "loss": null}}\n')  # at once
        with open(path, "a") as file:
            file.write('{"step": 5, "lo')  # killed while it wrote
    assert path.is_symlink() and sorted(tmp_path.iterdir()) == [path, mine, tmp_path / "there.jsonl"]


def test_metrics_into_somebodys_output_do_not_replace_it(tmp_path):
    path = tmp_path / "log"
    with open(path, "a") as log, train.Metrics(f"/proc/self/fd/{log.fileno()}", 0) as metrics:
        metrics.write(step=1, loss=0.5)
        log.write("said\n")
    assert sorted(path.read_text().splitlines()) == ["said", '{"step": 1, "loss": 0.5}']


def test_metrics_on_a_terminal():
    """Only files are replaced: /dev/null must stay what it is."""
    main_end, end = os.openpty()
    with train.Metrics(os.ttyname(end), 0) as metrics:
        metrics.write(step=1)
    assert os.isatty(end) and os.read(main_end, 100) == b'{"step": 1}\r\n'
    os.close(main_end)
    os.close(end)


# -- data ------------------------------------------------------------------------------------------------------------


def cifar(folder: Path, name: str, count: int, extra: bytes = b"") -> None:
    records = b"".join(bytes([i % 10]) + bytes((i + j) % 256 for j in range(3072)) for i in range(count))
    (folder / name).write_bytes(records + extra)


def test_cifar10_by_path(tmp_path):
    for number in range(1, 6):
        cifar(tmp_path, f"data_batch_{number}.bin", 12)
    with pytest.raises(data.DataError, match=r"has no test_batch\.bin"):
        data.cifar10(str(tmp_path))
    cifar(tmp_path, "test_batch.bin", 11)
    split = data.cifar10(str(tmp_path))
    assert [tuple(t.shape) for t in split] == [(60, 3, 32, 32), (60,), (11, 3, 32, 32), (11,)]
    assert split.targets[12:15].tolist() == [0, 1, 2]
    assert split.inputs[13, 1, 2, 3] == (1 + 1024 + 2 * 32 + 3) % 256  # the image, the colour, the row, the column
    cifar(tmp_path, "data_batch_3.bin", 12, b"!")
    with pytest.raises(data.DataError, match=r"data_batch_3\.bin has 36877 bytes.*: it was cut off"):
        data.cifar10(str(tmp_path))
    cifar(tmp_path, "data_batch_3.bin", 12, b"\x0a" * 3073)
    with pytest.raises(data.DataError, match=r"data_batch_3\.bin has a label above 9"):
        data.cifar10(str(tmp_path))


def test_cifar10_in_pickles_is_refused(tmp_path):
    (tmp_path / "data_batch_1").write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR.")
    with pytest.raises(data.DataError, match=r"is a pickle, and reading a pickle runs the code in it.*binary version"):
        data.cifar10(str(tmp_path))
    assert not (tmp_path / "ran").exists()


def test_mrpc_by_path(tmp_path):
    head = "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\r\n"
    rows = [f'{i % 2}\t{i}\t{i}\tHe said "no {i}.\tNo, he said{" and said" * 30}.\r\n' for i in range(20)]
    file = tmp_path / "msr_paraphrase_train.txt"
    file.write_text(head + "".join(rows), newline="")
    split = data.pairs(str(file), 8)
    assert [tuple(t.shape) for t in split] == [(18, 2, 8), (18,), (2, 2, 8), (2,)]
    assert split.targets[:4].tolist() == [0, 1, 0, 1]
    first = split.inputs[0].tolist()
    assert first[0][6:] == [0, 0] and all(first[0][:6]) and first[0][0] == first[1][2] and all(first[1])  # he
    with pytest.raises(data.DataError, match="has neither"):
        data.pairs(str(tmp_path), 8)
    (tmp_path / "msr_paraphrase_test.txt").write_text(head + "".join(rows[:15]), newline="")
    assert [len(t) for t in data.pairs(str(tmp_path), 8)] == [20, 20, 15, 15]
    file.write_text(head + rows[0] + "2\t1\t1\ta\tb\r\n", newline="")
    with pytest.raises(data.DataError, match="line 3: the answer is '2', none of 1, 0"):
        data.pairs(str(file), 8)
    file.write_text(head + rows[0] + "1\t1\t1\ta\r\n", newline="")
    with pytest.raises(data.DataError, match="line 3: 4 columns, and the first line has 5"):
        data.pairs(str(file), 8)


GLUE = {
    "MRPC": ("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{a}\t{i}\t{i}\t{one}\t{two}", ("1", "0")),
    "QQP": ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "{i}\t1\t2\t{one}\t{two}\t{a}", ("1", "0")),
    "RTE": ("index\tsentence1\tsentence2\tlabel", "{i}\t{one}\t{two}\t{a}", ("entailment", "not_entailment")),
    "QNLI": ("index\tquestion\tsentence\tlabel", "{i}\t{one}\t{two}\t{a}", ("entailment", "not_entailment")),
    "WNLI": ("index\tsentence1\tsentence2\tlabel", "{i}\t{one}\t{two}\t{a}", ("1", "0")),
}


@pytest.mark.parametrize("task", GLUE)
def test_other_tasks_of_glue(tmp_path, task):
    """Columns go by the header; quotes and what other programs take for the end of a line are plain characters."""
    head, row, (yes, no) = GLUE[task]
    traps = ['He said "stop.', '"All quoted"', "a\u2028b\x85c", "it's 5\" wide"]
    made = [row.format(i=i, a=(yes, no)[i % 2], one=traps[i % 4], two=f"other {i}") for i in range(20)]
    (tmp_path / "train.tsv").write_text("\n".join([head, *made]) + "\n", encoding="utf-8")
    (tmp_path / "dev.tsv").write_text("\r\n".join([head, *made[:12]]), encoding="utf-8-sig", newline="")
    rows = data.glue(tmp_path / "train.tsv")
    assert rows == [((i + 1) % 2, traps[i % 4], f"other {i}") for i in range(20)]
    assert [len(t) for t in data.pairs(str(tmp_path), 8)] == [20, 20, 12, 12]


def test_what_is_no_pair_of_sentences_with_two_answers(tmp_path):
    for text, said in (
        ("sentence\tlabel\n", "line 1 names no two sentences, but sentence, label"),  # SST-2
        ("index\tsentence1\tsentence2\n0\ta\tb\n", "GLUE's test.tsv has no answers"),
        ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\tneutral\n", "line 2: the answer is 'neutral'"),  # MNLI
        ("index\tsentence1\tsentence2\tlabel\n0\ta\tb\t1\n", "has 1 pairs below its first line"),
    ):
        (tmp_path / "train.tsv").write_text(text)
        with pytest.raises(data.DataError, match=said):
            data.glue(tmp_path / "train.tsv")


def test_made_up_pairs_are_fair():
    """As many of either answer, none twice, and what is held out was never seen."""
    rows = data.made_up_pairs(1000)
    assert sum(same for same, *_ in rows) == 500
    assert len({tuple(sentences) for _, *sentences in rows}) == 1000
    assert rows == data.made_up_pairs(1000)


def test_the_pair_encoder_does_not_see_padding():
    """Words that are not there change nothing; words that are there do, wherever in the sentence."""
    torch.manual_seed(0)
    model = PairEncoder(layers=2, width=16, context=12).eval()
    pairs = torch.randint(1, 4096, (3, 2, 5))
    padded = torch.nn.functional.pad(pairs, (0, 7))
    torch.testing.assert_close(model(padded), model(pairs))
    pairs[:, 1, 0] = 1 + pairs[:, 1, 0] % 4095
    assert not torch.isclose(model(padded), model(pairs)).any()
