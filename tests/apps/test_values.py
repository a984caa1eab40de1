"""Every option of every command with bad values: one line that names the option and exit status 2, or it is legal.

The options come from the parsers, so a new one is tried by itself. Nothing long begins: `begin` stands where ranks,
simulations and servers would start. `zerolab train` really trains, for a step, on a rank that is there already.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any, NoReturn

import pytest
from jobs_common import worlds

import zerolab
from zerolab.apps import bench, doctor, paper, scaling, train
from zerolab.classroom.labs import Classroom
from zerolab.cli import main, make_parser

TINY = "--task text --layers 1 --width 8 --context 8 --global-batch 2 --steps 1 --ranks 1"

# How each command is asked for little, as {command: arguments}; a new command needs its line here.
COMMANDS = {
    "lab": "--work {0}/work",
    "demo": "--ranks 2 --device cpu",
    "plan": "--params 1B --ranks 2",
    "simulate": "--model 7.5B",
    "bench": "--ranks 2",
    "scaling": "",
    "trial": "zero3",
    "train": TINY,
    "doctor": "--ranks 2",
    "classroom": "--students 1 --folder {0}/class",
}

KINDS = (
    "missing folder", "folder", "file", "empty file", "junk file", "read-only", "below a file", "long", "empty",
    "text", "negative", "zero", "huge", "nan", "lines",
)  # fmt: skip

NAMES = {"text", "negative", "zero", "huge", "nan", "lines"}  # of a file or a folder in this one
FILES = {"file", "empty file", "junk file"}
LEGAL = {  # the bad values that an option takes; all others are refused
    "--json": NAMES | FILES,
    "--report": NAMES | FILES,
    "--plot": FILES,
    "--work": NAMES | {"folder", "missing folder"},
    "--folder": NAMES | {"folder", "missing folder"},
    "--checkpoint": NAMES | {"folder", "missing folder"},
    "--metrics": NAMES | {"empty file"},
    "--stages": {"zero"},
    "--stage": {"zero"},
    "--activations": {"zero"},
    "--data": {"junk file"},  # of bytes the GPT learns, too
    "--gpus": {"zero"},
    "--seed": {"negative", "zero"},
}
LEGAL_HERE = {
    "lab": {"--port": {"zero"}},
    "doctor": {"--timeout": {"huge"}},
    "train": {"--lr": {"huge"}, "--clip": {"huge"}},
}


def bad_value(kind: str, folder: Path) -> str:
    if kind == "folder":
        (folder / "folder.png").mkdir()
    if kind in ("file", "below a file", "empty file", "junk file"):
        (folder / f"{kind}.png").write_bytes(
            {"empty file": b"", "junk file": bytes(range(256)) * 20}.get(kind, b"text\n")
        )
    values = {
        "missing folder": folder / "none/file.png",
        "read-only": "/proc/none/file.png",
        "long": "x" * 300 + ".png",
    }
    values |= {"below a file": folder / "below a file.png/file.png", "empty": "", "text": "many", "lines": "a\nb"}
    values |= {"negative": "-1", "zero": "0", "huge": "9" * 30, "nan": "nan"}
    return str(values.get(kind, folder / f"{kind}.png"))


pytestmark = pytest.mark.slow


class Begun(BaseException):
    """The command was content with its arguments, and would have begun to work."""


def begin(*ignored: Any, **also_ignored: Any) -> NoReturn:
    raise Begun


@pytest.fixture
def nothing_long(monkeypatch: pytest.MonkeyPatch, ranks: zerolab.Ranks) -> None:
    monkeypatch.setattr(os, "execv", begin)  # lab
    monkeypatch.setattr(zerolab, "Ranks", begin)  # demo, bench
    monkeypatch.setattr(paper, "simulate_gpt", begin)
    monkeypatch.setattr(scaling, "measure", begin)
    monkeypatch.setattr(doctor, "check_python", begin)
    monkeypatch.setattr(Classroom, "look", begin)
    monkeypatch.setattr(train, "launch", lambda args, size: ranks.run(train_in, os.getcwd(), args, ranks=1)[0])
    assert bench.zerolab is zerolab


def train_in(folder: str, args: argparse.Namespace) -> str | None:
    before = os.getcwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return train.attempt(args)
    finally:
        os.chdir(before)


def options_of(command: str) -> list[argparse.Action]:
    _, parsers = make_parser()
    return [action for action in parsers[command]._actions if action.option_strings and action.nargs != 0]


def attempt(capsys: pytest.CaptureFixture[str], words: list[str], option: str) -> str:
    """Run a command: "" if it accepts the value, "refused" for one good line, else what is wrong."""
    try:
        status: Any = main(words)
    except Begun:
        status = 0
    except SystemExit as end:
        status = end.code
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[-300:]}"
    said = capsys.readouterr().err
    if status in (0, 1):
        return said
    return "refused" if status == 2 and said.count("\n") == 1 and option in said else f"exit {status}: {said!r}"


@pytest.mark.parametrize("every", worlds(2, others=[1]))
@pytest.mark.parametrize("command", COMMANDS)
def test_bad_values(nothing_long, capsys, tmp_path, monkeypatch, command, every):
    """Each option with every kind, or with every second: the next option with the others."""
    wrong = []
    for i, action in enumerate(options_of(command)):
        option = action.option_strings[-1]
        legal = LEGAL_HERE.get(command, {}).get(option, LEGAL.get(option, set()))
        for kind in KINDS[i % every :: every]:
            folder = Path(tempfile.mkdtemp(dir=tmp_path))  # its name does not name the option
            (folder / "here").mkdir()
            (folder / "class/student-01/work/my").mkdir(parents=True)
            monkeypatch.chdir(folder / "here")
            words = [word.format(folder) for word in COMMANDS[command].split()]
            found = attempt(capsys, [command, *words, option, bad_value(kind, folder)], option)
            if found != ("" if kind in legal else "refused"):
                wrong.append(f"{option} {kind}: {found or 'accepted'}")
    assert not wrong, "\n".join(wrong)


def test_a_home_where_nothing_can_be_written(nothing_long, capsys, tmp_path, monkeypatch):
    """JupyterLab keeps its sockets there, and would end in a traceback."""
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    with pytest.raises(SystemExit, match="2"):
        main(["lab", "--work", str(tmp_path / "work")])
    assert capsys.readouterr().err == "zerolab: /proc/none: No such file or directory\n"


def test_a_file_where_a_folder_is_needed(nothing_long, capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["lab", "--work", str(tmp_path / "file")])
    assert capsys.readouterr().err == f"zerolab: --work {tmp_path}/file: is a file, where a folder is needed\n"


def test_every_command_is_tried():
    assert set(COMMANDS) == set(make_parser()[1])
