"""What the commands share: a parser that answers in one line, readers of arguments, and a check for packages."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
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
