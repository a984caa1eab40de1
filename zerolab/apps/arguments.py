"""What the commands share: a parser that answers in one line, readers of arguments, checks for packages and files."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


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
    for name, value in vars(args).items():
        if isinstance(value, str | Path):
            path = Path(os.path.abspath(value))
            if file.is_relative_to(path) or path.is_relative_to(file):
                return f"--{name.replace('_', '-')} {value}: {file}: {why.strerror}"
    return f"{file}: {why.strerror}"


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
