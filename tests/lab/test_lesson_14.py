"""The training script of lesson 14 as learners run it: by the real torchrun."""

from __future__ import annotations

import json
import os

import pytest
from test_launch import wait_until

from zerolab.lab import scripts
from zerolab.lab.exercises import store
from zerolab.lab.exercises.judge import digest

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nobodys_answers(tmp_path, monkeypatch):
    monkeypatch.setenv("ZEROLAB_MY", str(tmp_path / "my"))


def run(ranks, *arguments):
    said = scripts.torchrun("14.2", ranks, *arguments)
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


@pytest.mark.exhaustive
def test_the_same_result_on_any_number_of_ranks(capsys, tmp_path):
    head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = [f'{i % 2}\t{i}\t{i}\tHe said "no {i}.\t{("Yes", "No")[i % 2]}, he said {i}.\n' for i in range(37)]
    (tmp_path / "train.tsv").write_text(head + "".join(rows))
    (tmp_path / "dev.tsv").write_text(head + "".join(rows[:11]))
    arguments = ("--steps", 3, "--seeds", 0, 1, "--data", tmp_path)  # 3 x 50 samples of 37: it goes round
    one, other = (run(ranks, "--stage", stage, *arguments) for ranks, stage in ((1, 0), (4, 3)))
    assert [each["seed"] for each in one] == [0, 1] and len(one[0]["losses"]) == 3
    assert one[0]["losses"] != one[1]["losses"]
    for a, b in zip(one, other, strict=True):
        assert a["losses"] == pytest.approx(b["losses"], rel=1e-4)
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=1e-6)
    assert "torchrun --nproc-per-node 4 ex_14_2.py --stage 3" in capsys.readouterr().out


def answered(source):
    store.write(store.file_of("14.2"), source)
    store.write_progress(store.read_progress() | {"passed": {"14.2": digest(source)}})


@pytest.mark.exhaustive
def test_whose_script_runs_and_how_it_may_end(capsys):
    """The learner's once it has passed; its error is shown; and a script that hangs leaves no process behind."""
    # One write for each line: torchrun's ranks do not buffer, and what several write at once is mixed.
    answered("import os, sys\nsys.stdout.write('mine ' + os.environ['WORLD_SIZE'] + '\\n')\n")
    assert scripts.torchrun("14.2", 2).split() == ["mine", "2"] * 2
    assert "# your script" in capsys.readouterr().out
    answered("raise ValueError('a mistake of mine')\n")
    with pytest.raises(scripts.ScriptFailed, match=r"Traceback[\s\S]*a mistake of mine"):
        scripts.torchrun("14.2", 2)
    pids = store.folder() / "pids"
    answered(f"import os, time\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\ntime.sleep(300)\n")
    with pytest.raises(scripts.ScriptFailed, match="had not ended after 20 s"):
        scripts.torchrun("14.2", 1, timeout=20)
    (pid,) = map(int, pids.read_text().split())
    wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
