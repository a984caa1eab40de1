"""The command line: `zerolab demo`, or `python -m zerolab.cli demo`.

A command is a function like `add_demo` that describes its arguments and says what to run; COMMANDS lists them.
Commands import what they need when they run, so that `zerolab --help` is quick and needs no extras.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

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
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


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
        from zerolab.apps.demo import Refused
        from zerolab.apps.demo import demo as show

        try:
            return show(args.ranks, args.steps, args.stages, args.precision, args.device, args.json, args.plot)
        except Refused as why:
            demo.error(str(why))

    demo.set_defaults(run=run)


def add_plan(commands: argparse._SubParsersAction) -> None:
    from zerolab.measure import planning
    from zerolab.measure.units import in_bytes, read_bytes

    plan = commands.add_parser(
        "plan",
        help="what each stage will hold and move, which one fits, and the largest model that does",
        description="The formulas for a run that has not begun: bytes per rank of parameters, gradients and optimizer "
        "state when backward returns, and bytes sent in a step. Exit status: 1 if no stage fits.",
    )
    size, numbers = _argument(read_bytes), _argument(planning.read_parameters)
    plan.add_argument("--params", type=numbers, required=True, help="parameters of the model: 7.5e9, 7.5B, 124M")
    plan.add_argument("--ranks", type=int, required=True, help="GPUs that share the work")
    plan.add_argument("--gpu-memory", type=size, metavar="BYTES", help="of each: 80GB, 24GiB")
    plan.add_argument("--precision", choices=list(planning.PRECISIONS), default="bf16", help="bf16: with fp32 masters")
    plan.add_argument("--optimizer", choices=list(planning.OPTIMIZERS), default="adam")
    plan.add_argument(
        "--activations", type=size, default=0, metavar="BYTES", help="what else a rank needs, such as 10GB (default 0)"
    )

    def run(args: argparse.Namespace) -> int:
        rich = _rich(plan)
        try:
            rows = planning.plan(
                args.params, args.ranks, args.gpu_memory, args.precision, args.optimizer, args.activations
            )
        except ValueError as why:
            plan.error(str(why))
        model = f"{planning.in_parameters(args.params)} parameters, {args.ranks} ranks"
        rich.print(planning.table(rows, f"{model}, {args.precision}, {args.optimizer}: bytes per rank"))
        print("Not counted: units in flight (see zerolab simulate), and the framework's own needs.")
        if args.gpu_memory is None:
            return 0
        fitting = [planning.STAGES[row.stage] for row in rows if row.fits]
        memory = in_bytes(args.gpu_memory)
        print(f"In {memory} per GPU " + (f"it fits with {', '.join(fitting)}." if fitting else "no stage fits."))
        return 0 if fitting else 1

    plan.set_defaults(run=run)


def add_simulate(commands: argparse._SubParsersAction) -> None:
    simulate = commands.add_parser(
        "simulate",
        help="run one rank of a big cluster without memory; the paper's Figure 1 and Table 1",
        description="Runs the engine itself as one rank of many, on tensors without memory: what does it hold, what "
        "does it move? Models are GPTs in bf16 with Adam, on one sequence of 1,024 tokens. Exit status: 1 if a value "
        "is more than 1 %% from the expected one (the paper's; in stage 3, 14Ψ/N).",
    )
    what = simulate.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure1", action="store_true", help="7.5B parameters on 64 ranks, in under a minute")
    what.add_argument("--table1", action="store_true", help="all 54 cells, in some minutes")
    what.add_argument("--model", choices=["7.5B", "128B", "1T"], help="one model: what is its peak made of?")
    simulate.add_argument("--ranks", type=int, default=64, help="with --model (default 64)")
    simulate.add_argument("--stage", type=int, choices=range(4), default=3, help="with --model (default 3)")
    simulate.add_argument("--json", metavar="FILE", help="write what was measured")
    simulate.add_argument("--plot", metavar="FILE", help="draw it: a model's skyline, or GPUs against GB per GPU")

    def run(args: argparse.Namespace) -> int:
        _rich(simulate)
        from zerolab.apps import paper

        if args.model:
            if args.ranks < 1:
                simulate.error(f"--ranks must be 1 or more, not {args.ranks}")
            return paper.show_model(args.model, args.stage, args.ranks, args.json, args.plot)
        cells = paper.figure_1() if args.figure1 else paper.table_1()
        return paper.show_cells(cells, args.json, args.plot)

    simulate.set_defaults(run=run)


def add_bench(commands: argparse._SubParsersAction) -> None:
    bench = commands.add_parser(
        "bench",
        help="step times and peaks beside torch's DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
        description="Every stage and the library that does the same, on the same ranks, a step each in turn. Ratios of "
        "wall and CPU time, of peak memory, and the losses, to show that they do the same work.",
    )
    bench.add_argument("--ranks", type=int, help="processes to start (default: one for each GPU, 2 without)")
    bench.add_argument("--rounds", type=int, default=40, help="steps of each that count (default 40)")
    bench.add_argument("--precision", choices=["fp32", "bf16", "both"], default="both", help="default: both")
    bench.add_argument("--json", metavar="FILE", help="write what was measured")
    bench.add_argument("--plot", metavar="FILE.png", help="draw it")

    def run(args: argparse.Namespace) -> int:
        _rich(bench)
        if (args.ranks is not None and args.ranks < 1) or args.rounds < 4:
            bench.error("--ranks must be 1 or more and --rounds 4 or more")
        from zerolab.apps import bench as module

        precisions = ["fp32", "bf16"] if args.precision == "both" else [args.precision]
        return module.bench(args.ranks, args.rounds, precisions, args.json, args.plot)

    bench.set_defaults(run=run)


def add_scaling(commands: argparse._SubParsersAction) -> None:
    scaling = commands.add_parser(
        "scaling",
        help="how time and bytes grow with units, parameters and ranks; what the engine itself costs per unit",
        description="The engine's own time per unit, apart from computing and communicating; steps on 1 to 8 ranks; "
        "bytes simulated up to 1,024. Some minutes. Exit status: 1 if a rank sent other bytes than simulated.",
    )
    scaling.add_argument("--json", metavar="FILE", help="write what was measured")
    scaling.add_argument("--plot", metavar="FILE.png", help="draw it")

    def run(args: argparse.Namespace) -> int:
        _rich(scaling)
        from zerolab.apps import scaling as module

        return module.scaling(args.json, args.plot)

    scaling.set_defaults(run=run)


def add_train(commands: argparse._SubParsersAction) -> None:
    train = commands.add_parser(
        "train",
        help="train a GPT, a CNN or an encoder at any stage, with checkpoints; the script of the course",
        description="Trains on ranks of this machine; under torchrun or srun it is `python -m zerolab.train`. "
        "SIGTERM and Ctrl-C end a step, save and stop. Exit status: 0 if it came to the end, or was stopped and saved.",
    )
    train.add_argument("--ranks", type=int, default=4, help="processes to start (default 4)")
    from zerolab.apps.train import add_arguments

    add_arguments(train)

    def run(args: argparse.Namespace) -> int:
        from zerolab.apps import train as script

        if args.ranks < 1:
            train.error(f"--ranks must be 1 or more, not {args.ranks}")
        try:
            script.check(args, args.ranks)
        except script.Refused as why:
            train.error(str(why))
        del args.run  # this function: the ranks could not import it
        try:
            problem = script.launch(args, args.ranks)
        except zerolab.RankError as why:
            print(why, file=sys.stderr)
            return 1
        if problem is not None:
            train.error(problem)
        return 0

    train.set_defaults(run=run)


def add_doctor(commands: argparse._SubParsersAction) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can do, and what to do about what it cannot",
        description="Tries what the course needs: versions, memory, files, ports, GPUs, and an all-reduce on every "
        "backend at hand, with latency and bus bandwidth as nccl-tests defines it. Nothing it tries may take longer "
        "than --timeout (a class: 5 s more for each student). Exit status: 0 all is well, 1 something needs fixing, 2 "
        "it cannot run.",
    )
    doctor.add_argument("--ranks", type=int, default=4, help="processes to start for the all-reduce (default 4)")
    doctor.add_argument(
        "--students",
        type=int,
        metavar="N",
        help="start N live ranks as notebooks do; does this machine hold N students with --ranks each?",
    )
    doctor.add_argument("--port", type=int, action="append", default=[], help="must be free; torchrun's is 29500")
    doctor.add_argument("--timeout", type=float, default=60.0, help="seconds for each thing tried (default 60)")
    doctor.add_argument("--json", metavar="FILE", help="write what was found")

    def run(args: argparse.Namespace) -> int:
        from zerolab.apps import doctor as module

        try:
            return module.doctor(args.ranks, args.port, args.timeout, args.json, args.students)
        except module.Refused as why:
            doctor.error(str(why))

    doctor.set_defaults(run=run)


def add_classroom(commands: argparse._SubParsersAction) -> None:
    classroom = commands.add_parser(
        "classroom",
        help="a JupyterLab for each student on this machine, and GPUs that are lent to who asks",
        description="Gives each student a folder, a port and a token, and keeps their labs running until Ctrl-C. "
        "Notebooks run on the CPU; lab.start(device='cuda') in one of them waits for GPUs of its own.",
    )
    _classroom_arguments(classroom)

    def run(args: argparse.Namespace) -> int:
        _rich(classroom)
        from zerolab.classroom import labs
        from zerolab.classroom import run as module

        options = {name: value for name, value in vars(args).items() if name not in ("run", "board", "plot")}
        try:
            if args.board or args.plot:
                return module.show_board(args.folder, args.plot)
            return module.classroom(**options)
        except labs.Refused as why:
            classroom.error(str(why))

    classroom.set_defaults(run=run)


def _classroom_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--students", type=int, default=20, help="how many labs (default 20)")
    parser.add_argument("--gpus", type=int, default=0, help="how many GPUs are lent (default 0: all on the CPU)")
    parser.add_argument("--ip", default="127.0.0.1", help="where the labs listen (default: this machine alone)")
    parser.add_argument("--open-to-network", action="store_true", help="needed for an --ip that others can reach")
    parser.add_argument("--port", type=int, default=8801, help="the first; the next free ones are taken (default 8801)")
    parser.add_argument("--folder", type=Path, default=Path("class"), help="of the students' work (default: class)")
    parser.add_argument("--lease-minutes", type=float, default=10.0, help="for which GPUs are lent (default 10)")
    parser.add_argument("--memory", type=float, default=4.0, metavar="GB", help="of each student (default 4)")
    parser.add_argument("--processes", type=int, default=64, help="of each student (default 64)")
    parser.add_argument("--board", action="store_true", help="only show how far the room is, without names")
    parser.add_argument("--plot", metavar="FILE.png", help="the same, and draw what the room predicted")


COMMANDS = (add_demo, add_plan, add_simulate, add_bench, add_scaling, add_train, add_doctor, add_classroom)


def _rich(parser: argparse.ArgumentParser) -> Any:
    """The module that prints tables, which comes with the extra `lab`."""
    try:
        import rich
    except ModuleNotFoundError:
        parser.error("this needs rich: pip install 'zerolab[lab]'")
    return rich


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """`read`, whose ValueError argparse shall show as it is."""

    def reader(text: str) -> Any:
        try:
            return read(text)
        except ValueError as why:
            raise argparse.ArgumentTypeError(str(why)) from None

    return reader


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers like 0,1,2,3") from None


if __name__ == "__main__":
    sys.exit(main())
