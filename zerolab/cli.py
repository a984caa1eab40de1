"""The command line: `zerolab demo`, or `python -m zerolab.cli demo`.

Each command has a function such as `add_demo`, which describes its arguments and says what to run; COMMANDS lists them.
A command imports what it needs only when it runs, so `zerolab --help` is quick and needs no extras.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import zerolab
from zerolab.apps.arguments import (
    PROCESSES,
    MissingPackage,
    Parser,
    about_file,
    guarded,
    need,
    numbers,
    output,
    picture,
    positive,
    reader,
    whole,
)
from zerolab.world.processes import AlreadyRanks


def main(arguments: list[str] | None = None) -> int:
    """Run a command. Exit status: 0 good, 1 something that was measured is wrong, 2 the command cannot run."""
    return guarded("zerolab", lambda: run_command(arguments))


def run_command(arguments: list[str] | None) -> int:
    parser, _ = make_parser()
    args = parser.parse_args(arguments)
    if args.run is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except AlreadyRanks as why:
        parser.error(str(why))
    except OSError as why:  # about a file: the user's to mend
        if why.filename is None:
            raise
        parser.error(about_file(why, args))


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and each command's own."""
    parser = Parser(prog="zerolab", description="DDP and ZeRO stages 1 to 3: see them, measure them, use them.")
    parser.add_argument("--version", action="version", version=f"zerolab {zerolab.__version__}")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    return parser, commands.choices


def add_lab(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "lab",
        help="open the lessons in JupyterLab",
        description="Opens the lessons in JupyterLab, on copies in work/ that are your own. An update never costs an "
        "answer. Exit status: JupyterLab's; 1 if there are no lessons, 2 if it cannot start.",
    )
    from zerolab.lab.__main__ import add_arguments

    add_arguments(parser, whole(0, 65535))

    def run(args: argparse.Namespace) -> int:
        _need(parser, "jupyterlab")
        from zerolab.lab.__main__ import open_lab

        return open_lab(args, parser)

    parser.set_defaults(run=run)


def add_demo(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "demo",
        help="train a small GPT at every stage; compare its numbers and bytes with one process and the formulas",
        description="Trains a small GPT on English text (Python's own help pages) at each stage, and once in a single "
        "process that averages the same micro-batches. Compares every parameter bit for bit, and the bytes held and "
        "moved with the formulas. Bytes are those of the rank that has most. With NCCL, parameters may differ a "
        "little. Exit status: 0 if everything is as promised, 1 if not, 2 if it cannot run.",
    )
    parser.add_argument("--ranks", type=PROCESSES, default=4, help="processes to start (default 4)")
    parser.add_argument("--steps", type=whole(2), default=20, help="training steps, at least 2 (default 20)")
    parser.add_argument("--stages", type=numbers, default=[0, 1, 2, 3], help="which stages (default 0,1,2,3)")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16 has fp32 masters")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there is a GPU for each rank"
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="write what was measured")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw the bytes held at each stage")

    def run(args: argparse.Namespace) -> int:
        from zerolab.apps import demo
        from zerolab.lab.ladder import Refused

        try:
            return demo.run(args.ranks, args.steps, args.stages, args.precision, args.device, args.json, args.plot)
        except (MissingPackage, Refused) as why:
            return parser.error(str(why))

    parser.set_defaults(run=run)


def add_plan(commands: argparse._SubParsersAction) -> None:
    from zerolab.measure.planning import OPTIMIZERS, PRECISIONS, read_parameters
    from zerolab.measure.units import read_bytes

    def size(text: str) -> float:
        count = read_bytes(text)
        if text.strip().isdecimal() and 0 < count < 1e6:
            raise ValueError(f"{text} is {text} bytes: do you mean {text}GB?")
        if count > 1e18:
            raise ValueError(f"{text} is more than any machine has")
        return count

    def some(text: str) -> float:
        if (count := size(text)) == 0:
            raise ValueError("must be more than 0")
        return count

    parser = commands.add_parser(
        "plan",
        help="what each stage will hold and move, which ones fit, and the largest model that does",
        description="Applies the formulas to a run that has not begun: bytes per rank of parameters, gradients and "
        "optimizer state when backward returns, and bytes sent in a step. Exit status: 1 if no stage fits.",
    )
    parser.add_argument(
        "--params", type=reader(read_parameters), required=True, help="parameters of the model: 7.5e9, 7.5B, 124M"
    )
    parser.add_argument("--ranks", type=whole(1), required=True, help="GPUs that share the work")
    parser.add_argument("--gpu-memory", type=reader(some), metavar="BYTES", help="memory of each GPU: 80GB, 24GiB")
    parser.add_argument("--precision", choices=list(PRECISIONS), default="bf16", help="bf16 has fp32 masters")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adam")
    parser.add_argument(
        "--activations",
        type=reader(size),
        default=0,
        metavar="BYTES",
        help="what else a rank needs, such as 10GB (default 0)",
    )
    parser.add_argument("--offload", action="store_true", help="masters and the optimizer's state stay on the host")
    parser.add_argument(
        "--replicas", type=whole(1), default=1, help="groups of ranks that share a model each, a mesh (default 1)"
    )

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich")
        from zerolab.apps import plan

        sizes = (args.params, args.ranks, args.gpu_memory, args.precision, args.optimizer, args.activations)
        try:
            return plan.run(*sizes, args.offload, args.replicas)
        except ValueError as why:
            return parser.error(str(why))

    parser.set_defaults(run=run)


def add_simulate(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "simulate",
        help="run one rank of a big cluster on tensors without memory; the paper's Figure 1 and Table 1",
        description="Runs the engine itself as one rank of many, on tensors without memory: what does it hold, and "
        "what does it move? The models are GPTs in bf16 with Adam, on one sequence of 1,024 tokens. Exit status: 1 if "
        "a value is more than 1 % off the expected one (the paper's; in stage 3, 14Ψ/N).",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--figure1", action="store_true", help="7.5B parameters on 64 ranks, in under a minute")
    what.add_argument("--table1", action="store_true", help="all 54 cells, in a few minutes")
    what.add_argument("--model", choices=["7.5B", "128B", "1T"], help="one model: what is its peak made of?")
    parser.add_argument("--ranks", type=whole(1), help="with --model (default 64)")
    parser.add_argument("--stage", type=int, choices=range(4), help="with --model (default 3)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write what was measured")
    parser.add_argument(
        "--plot", type=picture, metavar="FILE.png", help="draw it: a model's skyline, or GPUs against GB per GPU"
    )

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich", *_drawing(args))
        from zerolab.apps import paper

        if args.model:
            ranks, stage = 64 if args.ranks is None else args.ranks, 3 if args.stage is None else args.stage
            return paper.show_model(args.model, stage, ranks, args.json, args.plot)
        for option in ("ranks", "stage"):
            if getattr(args, option) is not None:
                parser.error(f"--{option} goes with --model, not with --figure1 or --table1")
        cells = paper.figure_1() if args.figure1 else paper.table_1()
        return paper.show_cells(cells, args.json, args.plot)

    parser.set_defaults(run=run)


def add_bench(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "bench",
        help="step times and peaks beside torch's DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed",
        description="Runs every stage and the library that does the same on the same ranks, one step each in turn. "
        "Prints the ratios of wall time, CPU time and peak memory, and the losses, to show that both do the same work.",
    )
    parser.add_argument(
        "--ranks", type=PROCESSES, help="processes to start (default: one for each GPU, 2 without GPUs)"
    )
    parser.add_argument("--rounds", type=whole(4), default=40, help="measured steps of each system (default 40)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "both"], default="both", help="default: both")
    parser.add_argument("--json", type=output, metavar="FILE", help="write what was measured")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw it")

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich", *_drawing(args))
        from zerolab.apps import bench

        precisions = ["fp32", "bf16"] if args.precision == "both" else [args.precision]
        return bench.run(args.ranks, args.rounds, precisions, args.json, args.plot)

    parser.set_defaults(run=run)


def add_trial(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "trial",
        help="put any sharded engine on trial: its numbers, its bytes, its errors; zerolab's, torch's, or your own",
        description="Runs an engine through more than a hundred cases on real ranks of this machine: numbers against "
        "one process in float64, bytes against the formulas, and what happens when ranks disagree. Exit status: 1 if "
        "it breaks a promise.",
    )
    parser.add_argument(
        "engine",
        nargs="?",
        metavar="ENGINE",
        help="ddp, zero1, zero2, zero3, torch-ddp, torch-zero1, fsdp2, fsdp2-keep, deepspeed0 to deepspeed3, "
        "accelerate, or FILE.py:CLASS, a zerolab.trial.Adapter",
    )
    parser.add_argument("--ranks", type=numbers, default=[2], help="one after the other, such as 1,2,3 (default 2)")
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="this case, or all that begin so; may be given several times"
    )
    parser.add_argument("--list", action="store_true", help="show the cases, and run none")
    parser.add_argument("--json", type=output, metavar="FILE", help="write the verdicts")
    parser.add_argument("--report", type=output, metavar="FILE.md", help="write them as tables in Markdown")

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich", "tqdm")
        from zerolab.apps import trial

        if args.list:
            trial.print_cases()
            return 0
        if args.engine is None:
            parser.error("which ENGINE? zerolab trial --help lists them")
        if bad := [size for size in args.ranks if not 1 <= size <= 64]:
            parser.error(f"argument --ranks: must be from 1 to 64, not {bad[0]}")
        try:
            return trial.run(args.engine, args.ranks, args.only, args.json, args.report)
        except trial.Refused as why:
            return parser.error(str(why))

    parser.set_defaults(run=run)


def add_scaling(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "scaling",
        help="how time and bytes grow with units, parameters and ranks; what the engine itself costs per unit",
        description="Measures the engine's own time per unit, apart from computing and communicating; times steps on "
        "1 to 8 ranks; simulates the bytes for up to 1,024. Takes a few minutes. Exit status: 1 if a rank did not send "
        "the simulated number of bytes.",
    )
    parser.add_argument("--json", type=output, metavar="FILE", help="write what was measured")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="draw it")

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich", "matplotlib")
        from zerolab.apps import scaling

        return scaling.run(args.json, args.plot)

    parser.set_defaults(run=run)


def add_train(commands: argparse._SubParsersAction) -> None:
    from zerolab.apps.train import add_arguments

    parser = commands.add_parser(
        "train",
        help="train a GPT, a CNN or an encoder at any stage, with checkpoints; the script of the course",
        description="Trains on ranks of this machine; under torchrun or srun, use `python -m zerolab.train`. "
        "SIGTERM and Ctrl-C finish the step, save and stop. Exit status: 0 if it finished, or was stopped and saved.",
    )
    parser.add_argument("--ranks", type=PROCESSES, default=4, help="processes to start (default 4)")
    add_arguments(parser)

    def run(args: argparse.Namespace) -> int:
        from zerolab.apps import train

        try:
            train.check(args, args.ranks)
        except train.Refused as why:
            parser.error(str(why))
        del args.run  # this function, which the ranks could not import
        try:
            problem = train.launch(args, args.ranks)
        except AlreadyRanks:
            parser.error("torchrun or srun has started ranks already: let it start `python -m zerolab.train`")
        except zerolab.RankError as why:
            print(why, file=sys.stderr)
            return 1
        if problem is not None:
            parser.error(problem)
        return 0

    parser.set_defaults(run=run)


def add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="what this machine can do, and what to do about what it cannot",
        description="Tries what the course needs: versions, memory, files, ports, GPUs, and an all-reduce on every "
        "available backend, with its latency and its bus bandwidth as nccl-tests defines it. No trial may take longer "
        "than --timeout (for a class, 5 s more per student). Exit status: 0 all is well, 1 something needs fixing, 2 "
        "the doctor cannot run.",
    )
    parser.add_argument("--ranks", type=PROCESSES, default=4, help="processes to start for the all-reduce (default 4)")
    parser.add_argument(
        "--students",
        type=whole(1),
        metavar="N",
        help="start N live ranks as notebooks do; could this machine hold N students with --ranks ranks each?",
    )
    parser.add_argument(
        "--port", type=whole(1, 65535), action="append", default=[], help="must be free; torchrun's is 29500"
    )
    parser.add_argument("--timeout", type=positive, default=60.0, help="seconds for each trial (default 60)")
    parser.add_argument("--json", type=output, metavar="FILE", help="write what was found")

    def run(args: argparse.Namespace) -> int:
        from zerolab.apps import doctor

        try:
            return doctor.run(args.ranks, args.port, args.timeout, args.json, args.students)
        except doctor.Refused as why:
            return parser.error(str(why))

    parser.set_defaults(run=run)


def add_classroom(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "classroom",
        help="a JupyterLab for each student on this machine, and GPUs that are lent to those who ask",
        description="Gives each student a folder, a port and a token, and keeps their labs running until Ctrl-C. "
        "Notebooks run on the CPU; lab.start(device='cuda') in one of them waits for GPUs of its own.",
    )
    _classroom_arguments(parser)

    def run(args: argparse.Namespace) -> int:
        _need(parser, "rich", *_drawing(args))
        from zerolab.classroom import labs
        from zerolab.classroom import run as classroom

        options = {name: value for name, value in vars(args).items() if name not in ("run", "board", "plot")}
        try:
            if args.board or args.plot:
                return classroom.show_board(args.folder, args.plot)
            return classroom.hold(**options)
        except labs.Refused as why:
            return parser.error(str(why))

    parser.set_defaults(run=run)


def _classroom_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--students", type=int, default=20, help="number of labs (default 20)")
    parser.add_argument(
        "--gpus", type=whole(0, 1000), default=0, help="number of GPUs to lend (default 0: all on the CPU)"
    )
    parser.add_argument("--ip", default="127.0.0.1", help="where the labs listen (default: this machine alone)")
    parser.add_argument("--open-to-network", action="store_true", help="needed for an --ip that others can reach")
    parser.add_argument("--port", type=int, default=8801, help="the first; then the next free ones (default 8801)")
    parser.add_argument("--folder", type=Path, default=Path("class"), help="for the students' work (default: class)")
    parser.add_argument("--lease-minutes", type=float, default=10.0, help="how long GPUs are lent (default 10)")
    parser.add_argument("--memory", type=positive, default=4.0, metavar="GB", help="limit for each student (default 4)")
    parser.add_argument("--processes", type=int, default=64, help="limit for each student (default 64)")
    parser.add_argument(
        "--solutions", action="store_true", help="open all solutions (default: those in FOLDER/solutions)"
    )
    parser.add_argument(
        "--no-answers", action="store_true", help="keep the answers to the lessons' questions from the students"
    )
    parser.add_argument("--board", action="store_true", help="only show how far the class is, without names")
    parser.add_argument("--plot", type=picture, metavar="FILE.png", help="the same, and draw what the class predicted")


COMMANDS = (
    add_lab,
    add_demo,
    add_plan,
    add_simulate,
    add_bench,
    add_scaling,
    add_trial,
    add_train,
    add_doctor,
    add_classroom,
)


def _drawing(args: argparse.Namespace) -> list[str]:
    return ["matplotlib"] if args.plot else []


def _need(parser: argparse.ArgumentParser, *packages: str) -> None:
    """Tables are printed with rich and pictures drawn with matplotlib, which come with the extra `lab`."""
    try:
        need(*packages)
    except MissingPackage as why:
        parser.error(str(why))


if __name__ == "__main__":
    sys.exit(main())
