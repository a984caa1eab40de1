"""What the commands share: how each ends, a parser that answers in one line, readers of arguments, checks for files."""

from __future__ import annotations

import argparse
import errno
import importlib.util
import io
import math
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn


class NoOutput(Exception):
    """Standard output takes no more. It is no OSError: argparse ignores those, and rich has a status of its own."""

    def __init__(self, why: OSError) -> None:
        super().__init__(f"standard output: {why.strerror}")
        self.errno, self.strerror = why.errno, why.strerror


class Output:
    """Standard output, whose errors say that they are its own."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> Any:
        return self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    @staticmethod
    def _try(act: Callable[..., Any], *args: Any) -> Any:
        try:
            return act(*args)
        except OSError as why:
            raise NoOutput(why) from why


def give_up(stream: Any) -> None:
    """What `stream` still holds goes nowhere; otherwise the end of the process would try it again, with a traceback."""
    with suppress(OSError, ValueError):  # of a stream that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def guarded(prog: str, run: Callable[[], int]) -> int:
    """The exit status of `run()`, a whole command. What may end any command ends it without a traceback.

    130 is Ctrl-C, and 141 that the reader of its output has gone (`| head` has seen enough), as shells report both. 2
    with one line: the output cannot be written. Signs that the output's encoding lacks are written as \\u03a8.
    """
    stream = sys.stdout  # None if it is closed
    if isinstance(stream, io.TextIOWrapper):
        with suppress(OSError, ValueError):  # it is closed, or takes no more
            stream.reconfigure(errors="backslashreplace")
    output: Any = Output(stream)
    if stream is not None:
        sys.stdout = output
    try:
        try:
            return run()
        finally:
            if stream is not None:
                output.flush()
    except KeyboardInterrupt:
        return 130
    except NoOutput as why:
        give_up(stream)
        if why.errno == errno.EPIPE:
            return 141
        with suppress(OSError):  # both go to the same full disk
            print(f"{prog}: {why}", file=sys.stderr)
        return 2
    finally:
        sys.stdout = stream


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line. An empty one is always wrong: mostly a variable that is not set."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        args = sys.argv[1:] if args is None else list(args)
        for before, argument in zip(["", *args], args):
            option, _, value = argument.partition("=")
            if not value and (option == "" or (option.startswith("--") and argument.endswith("="))):
                self.error(f"argument {option or before}: is empty")
        return super().parse_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, " ".join(f"{self.prog}: {message}".split("\n")) + "\n")


def about_file(why: OSError, args: argparse.Namespace) -> str:
    """An error about a file in one line, after the option that names this file, or a folder above or below it."""
    file = Path(os.path.abspath(os.fsdecode(why.filename)))
    stands = isinstance(why, FileExistsError | NotADirectoryError) and file.is_file()
    what = "is a file, where a folder is needed" if stands else why.strerror
    for name, value in vars(args).items():
        if isinstance(value, str | Path):
            path = Path(os.path.abspath(value))
            if file.is_relative_to(path) or path.is_relative_to(file):
                where = "" if file == path else f"{file}: "
                return f"--{name.replace('_', '-')} {value}: {where}{what}"
    return f"{file}: {what}"


class MissingPackage(Exception):
    """A package of the extra `lab` is not installed. The message says how to install it."""


def need(*packages: str) -> None:
    """Raises MissingPackage if one of these packages is not there. Imports none: JupyterLab alone takes seconds."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(f"this needs {package}: pip install 'zerolab[lab]'")


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read` as an argument's type. Parsers then show the message of its ValueError unchanged."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as why:
            raise argparse.ArgumentTypeError(str(why)) from None

    return argument


MOST = 2**31 - 1  # of anything that is counted: more does not fit torch's 64 bits once multiplied


def whole(least: int, most: int = MOST) -> Callable[[str], int]:
    """A whole number from `least` to `most`, as an argument's type."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a whole number") from None
        if not least <= value <= most:
            bounds = f"{least} or more" if value < least and most == MOST else f"from {least} to {most}"
            raise ValueError(f"must be {bounds}, not {text}")
        return value

    return reader(read)


PROCESSES = whole(1, 64)  # ranks that are started on this machine, each with 100 MB and more


def positive(text: str) -> float:
    """A finite number above 0, as an argument's type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, not {text}")
    return value


def numbers(text: str) -> list[int]:
    """`0,1,3` as a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,1,2,3") from None


def output(text: str) -> str:
    """A file that a command will write at its end, as an argument's type: refused before the work if it cannot be."""
    path = Path(text)
    try:
        if path.is_file():
            path.open("ab").close()
        elif path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        elif not path.exists():  # a terminal or a pipe is left alone
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as why:
        raise argparse.ArgumentTypeError(f"cannot write {text}: {why.strerror}") from None
    return text


def picture(text: str) -> str:
    """As `output`, for a file that matplotlib draws."""
    if Path(text).suffix not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{text}: the name must end in .png, .svg or .pdf")
    return output(text)
