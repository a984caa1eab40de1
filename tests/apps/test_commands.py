"""What the commands have in common: help, files that cannot be written, arguments without sense, and Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from jobs_common import PYTHONPATH

import zerolab
from zerolab.cli import main
from zerolab.trial import hearing


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command refuses to begin."""
    with pytest.raises(SystemExit, match="2"):
        main([*arguments])
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def test_without_a_command_there_is_help(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    assert "simulate" in printed.out and printed.err == ""


def test_percent_signs_in_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["simulate", "--help"])
    assert "more than 1 % off" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "command", ["demo", "simulate --figure1", "simulate --model 1T", "bench", "scaling", "doctor", "classroom --board"]
)
@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(capsys, tmp_path, command, option):
    if (command, option) in (("doctor", "--plot"), ("classroom --board", "--json")):
        return
    missing, folder = tmp_path / "missing/file.png", tmp_path / "folder.png"
    folder.mkdir()
    assert f"{option}: cannot write {missing}: No such file" in refusal(capsys, *command.split(), option, str(missing))
    assert f"{option}: cannot write {folder}: it is a folder" in refusal(capsys, *command.split(), option, str(folder))
    if option == "--plot":
        said = refusal(capsys, *command.split(), option, str(tmp_path / "file.txt"))
        assert "the name must end in .png, .svg or .pdf" in said
    assert list(tmp_path.iterdir()) == [folder]


def test_files_that_are_there_are_left_as_they_are(capsys, tmp_path):
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    refusal(capsys, "demo", "--json", str(kept), "--ranks", "0")
    assert kept.read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("simulate --figure1 --ranks 3", "--ranks goes with --model, not with --figure1"),
        ("simulate --table1 --stage 0", "--stage goes with --model"),
        ("plan --params 7.5e9 --ranks 0", "--ranks: must be 1 or more, not 0\n"),
        ("plan --params 7.5B --ranks 2 --gpu-memory 80", "80 is 80 bytes: do you mean 80GB?"),
        ("plan --params 7.5B --ranks 2 --activations 10", "10 is 10 bytes: do you mean 10GB?"),
        ("plan --params 7.5 --ranks 64", "7.5 is 7.5 parameters: do you mean 7.5B or 7.5M?"),
        ("demo --ranks 100000", "--ranks: must be from 1 to 64, not 100000"),
        ("train --ranks 65", "--ranks: must be from 1 to 64, not 65"),
        ("bench --ranks 65", "--ranks: must be from 1 to 64, not 65"),
        ("doctor --ranks 65", "--ranks: must be from 1 to 64, not 65"),
    ],
)
def test_arguments_that_would_be_misunderstood(capsys, monkeypatch, arguments, says):
    monkeypatch.setattr(zerolab.Ranks, "_start", None)  # what is not refused starts no processes here
    assert says in refusal(capsys, *arguments.split())


def test_bytes_as_such(capsys):
    """Of the 80 GB, nothing is left to guess; nor is it with 0 bytes of activations."""
    for memory in ("80GB", "80000000000", "80e9"):
        main(["plan", "--params", "124M", "--ranks", "2", "--gpu-memory", memory, "--activations", "0"])
        assert "In 80.0 GB per GPU it fits with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("train --ranks 2", "let it start `python -m zerolab.train`"),
        ("demo --device cpu --ranks 2", "this process is rank 1 of 2 already"),
    ],
)
def test_torchrun_does_not_start_what_starts_ranks(capsys, monkeypatch, command, says):
    world = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert says in refusal(capsys, *command.split())


def test_an_interrupted_trial_says_what_it_has_heard(lent, capsys, monkeypatch):
    def heard(engine, size, names, pool):
        yield from hearing.hear(engine, size, names, pool)
        raise KeyboardInterrupt

    monkeypatch.setattr("zerolab.apps.trial.hearing", SimpleNamespace(**vars(hearing) | {"hear": heard}))
    assert main(["trial", "zero2", "--ranks", "1,2", "--only", "plain"]) == 130
    assert capsys.readouterr().out.splitlines() == ["zero2, 1 rank: 1 holds"]


ENDS = """
import json, os, sys
from zerolab.cli import main

def end(words, out):
    begin, end = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(end, 2)
        os.close(begin)
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(os.open("/dev/full", os.O_WRONLY) if out == "full" else writer if out == "gone" else end, 1)
        sys.stdout.reconfigure(line_buffering=out == "full")  # an error comes with a line, or at the end
        sys.exit(main(words.split()))
    os.close(end)
    with open(begin, errors="replace") as file:
        said = file.read()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said

print(json.dumps([end(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_an_output_that_takes_no_more():
    """A full disk, a reader that has gone, an encoding without Greek: whoever prints, argparse, rich or print."""
    pytest.importorskip("rich")
    plan = "plan --params 1B --ranks 2 --optimizer muon"
    commands = ["--help", "--version", plan]
    cases = [(words, out) for words in commands for out in ("full", "gone")] + [(plan, "ascii")]
    done = subprocess.run(
        [sys.executable, "-c", ENDS, json.dumps(cases)],
        env=os.environ | {"PYTHONPATH": PYTHONPATH, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    *ends, (status, said) = json.loads(done.stdout)
    full, gone = (2, "zerolab: standard output: No space left on device\n"), (141, "")
    assert [tuple(each) for each in ends] == [full, gone] * len(commands)
    assert status == 0 and "Traceback" not in said and "12\\u03a8(N-1)/N\\xb2 bytes more" in said


@pytest.mark.slow
def test_control_c_while_the_package_is_imported():
    code = "import sys; from zerolab_command import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", code],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        for line in process.stderr:
            if " torch." in line:  # within the long import
                break
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=600)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT  # which a shell reports as 130
    assert out == "" and "Traceback" not in err and "zerolab.cli" not in err
