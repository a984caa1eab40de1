"""What the commands share: a parser that answers in one line, readers of arguments, checks for packages and files."""

from __future__ import annotations

import argparse
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


class MissingPackage(Exception):
    """A package of the extra `lab` is not installed. The message says how to install it."""


def need(*packages: str) -> None:
    """Raises MissingPackage if one of these packages cannot be imported."""
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingPackage(f"this needs {package}: pip install 'zerolab[lab]'") from None


def reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read` as an argument's type. Parsers then show the message of its ValueError unchanged."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as why:
            raise argparse.ArgumentTypeError(str(why)) from None

    return argument


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
