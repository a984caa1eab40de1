"""The command line: `zerolab demo`, or `python -m zerolab.cli demo`.

A command is a function like `add_demo` that describes its arguments and says what to run; COMMANDS lists them.
Commands import what they need when they run, so that `zerolab --help` is quick and needs no extras.
"""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

import zerolab


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 good, 1 something that was measured is wrong, 2 it cannot be done."""
    parser = Parser(prog="zerolab", description="DDP and ZeRO stages 1 to 3: see them, measure them, use them.")
    parser.add_argument("--version", action="version", version=f"zerolab {zerolab.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    args = parser.parse_args(arguments)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        return 130  # as shells say it


def add_demo(commands: argparse._SubParsersAction) -> None:
    demo = commands.add_parser(
        "demo",
        help="train a small GPT at every stage; compare numbers and bytes with one process and the formulas",
        description="Trains a small GPT on English text (from Python's own help) at each stage, and once in one "
        "process that averages the same micro-batches. Compares every parameter bit for bit, and bytes held and "
        "moved with the formulas. Bytes are those of the rank that has most. With NCCL, parameters may differ a "
        "little. Exit status: 0 if all is as it should be, 1 if not, 2 if it cannot run.",
    )
    demo.add_argument("--ranks", type=int, default=4, help="processes to start (default 4)")
    demo.add_argument("--steps", type=int, default=20, help="training steps, at least 2 (default 20)")
    demo.add_argument("--stages", type=_numbers, default=[0, 1, 2, 3], help="which stages (default 0,1,2,3)")
    demo.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: with fp32 masters")
    demo.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if each rank can have its GPU"
    )
    demo.add_argument("--json", metavar="FILE", help="write what was measured")
    demo.add_argument("--plot", metavar="FILE.png", help="draw the bytes held at each stage")

    def run(args: argparse.Namespace) -> int:
        from zerolab.lab.demo import Refused
        from zerolab.lab.demo import demo as show

        try:
            return show(args.ranks, args.steps, args.stages, args.precision, args.device, args.json, args.plot)
        except Refused as why:
            demo.error(str(why))

    demo.set_defaults(run=run)


COMMANDS = (add_demo,)


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,1,2,3") from None


if __name__ == "__main__":
    sys.exit(main())
