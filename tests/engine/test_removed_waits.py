"""Every wait in comm/ and engine/ is needed: without any one of them, some run on the strict backend fails.

A wait is a call of one of the names below. Each is taken out in turn, in the ranks' memory: the function's code is
replaced with one in which the call is what it is called on. What only gloo's branch waits for is tried on gloo, with a
rank that is late. The table of what was removed, and of what failed then:

    PYTHONPATH=.:tests:tests/engine python tests/engine/test_removed_waits.py
"""

from __future__ import annotations

import ast
import importlib
import inspect
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
import strict
import torch.distributed as dist
from cases_common import sharded as sharded_case
from jobs_common import ROOT
from test_strict import everything, owned
from torch import Tensor

import zerolab
from zerolab.comm.recording import Observer, observers
from zerolab.trial.numbers import Block as ZooBlock
from zerolab.trial.numbers import Stack, words
from zerolab.trial.zoo import CASES

NAMES = {"wait", "_wait", "wait_for", "finished_within", "_finish_gather", "_advance_reductions", "advance"}
FILES = [
    *sorted((ROOT / "zerolab/engine").glob("*.py")),
    *(ROOT / f"zerolab/comm/{name}.py" for name in ("agreement", "collectives", "slices", "waiting")),
]
NEEDLESS = {
    # It returns at once: the work is completed, and either failed, which is raised here, or finished just now.
    "waiting.finished_within: work.wait()",
}


class Wait(NamedTuple):
    module: str
    function: str  # outermost, as `Class.method`
    number: int  # of the calls in the module
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.{self.function}: {self.text}"


def calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _name(node) in NAMES]


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def all_waits() -> list[Wait]:
    found = []
    for path in FILES:
        tree = ast.parse(path.read_text())
        outer = [
            (f"{c.name}.{f.name}", f)
            for c in tree.body
            if isinstance(c, ast.ClassDef)
            for f in c.body
            if isinstance(f, ast.FunctionDef)
        ]
        outer += [(f.name, f) for f in tree.body if isinstance(f, ast.FunctionDef)]
        for number, call in enumerate(calls(tree)):
            (name,) = (name for name, function in outer if call in ast.walk(function))
            found.append(Wait(f"zerolab.{path.parent.name}.{path.stem}", name, number, ast.unparse(call)))
    return found


class Remove(ast.NodeTransformer):
    """Take one call out: what it is called on stays; of a function, that it has waited. A loop that only waits goes."""

    def __init__(self, call: ast.Call) -> None:
        self.call = call

    def visit_While(self, node: ast.While) -> Any:
        if len(node.body) == 1 and isinstance(node.body[0], ast.Expr) and node.body[0].value is self.call:
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        if node is not self.call:
            return self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            return node.func.value
        return ast.copy_location(ast.Constant(True if _name(node) == "finished_within" else None), node)


@contextmanager
def without(wait: Wait | None) -> Iterator[None]:
    """Inside, this process does not make that call."""
    if wait is None:
        yield
        return
    module = importlib.import_module(wait.module)
    tree = ast.parse(Path(module.__file__).read_text())
    tree = ast.fix_missing_locations(Remove(calls(tree)[wait.number]).visit(tree))
    function: Any = module
    for name in wait.function.split("."):
        function = vars(function)[name]
    function = inspect.unwrap(function)
    before = function.__code__
    function.__code__ = _code(compile(tree, module.__file__, "exec"), wait.function)
    try:
        yield
    finally:
        function.__code__ = before


def _code(code: CodeType, name: str) -> Any:
    """That function's code, somewhere inside `code`."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return next((c for c in inner if c.co_qualname == name), None) or next(
        filter(None, (_code(c, name) for c in inner)), None
    )


# -- the runs ---------------------------------------------------------------------------------------------------------


def in_turns() -> list[Tensor]:
    """overlap=False: nothing is under way while backward computes."""
    zero = zerolab.shard(Stack(), 2, units=[ZooBlock])
    zero.overlap = False
    for block in zero.model.blocks:
        block.up.register_full_backward_hook(alone_at_work)
    zero.model(words(zero.rank, 0, 2, 5)).sum().backward()
    return []


def alone_at_work(*_: Any) -> None:
    if strict.under_way():
        raise strict.Broken("a reduction is under way while backward computes, although overlap is False")


RUNS = {
    "stage 3": lambda folder: everything(3, {}, folder),
    "stage 0": lambda folder: everything(0, {}, folder),
    "stage 2 in a mesh": lambda folder: everything(2, {"mesh": (2, 1)}, folder),
    "stage 3, late gradients": lambda folder: list(sharded_case(CASES["shared across checkpoints"], 3)[0].values()),
    "stage 2 without overlap": lambda folder: in_turns(),
    "Muon in stage 1": lambda folder: owned(1),
}


def what_fails(wait: Wait | None, expected: dict[str, list[Tensor]], folder: str) -> str:
    """The first run on the strict backend that fails without the wait, and how; empty if none does."""
    for name, run in RUNS.items():
        problem = ""
        try:
            with at_most(5.0 if wait else 30.0), strict.world(late=1) as here, without(wait):
                results = run(folder)
            if not all(map(_equal, results, expected[name])):
                problem = "other numbers"
            elif max(here.most["reduce_scatter"], here.most["all_reduce"]) > 1:
                problem = "two reductions under way"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}".splitlines()[0][:90]
        for said in filter(None, agreed(problem)):
            return f"{name}: {said}"
    return ""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """An endless loop is an error."""

    def ring(*_: Any) -> None:
        raise TimeoutError("it does not end")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def agreed(problem: str) -> list[str]:
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return problems


def _equal(one: Tensor, other: Tensor) -> bool:
    return bool(((one - other).abs() <= 1e-6).all())


def expectations(folder: str) -> dict[str, list[Tensor]]:
    results = {}
    for name, run in RUNS.items():
        with strict.world():
            results[name] = run(folder)
    return results


def on_strict(waits: list[Wait], folder: str) -> list[tuple[str, float]]:
    strict.FOREVER = 2.0
    expected = expectations(folder)
    assert what_fails(None, expected, folder) == ""
    rows = []
    for wait in waits:
        begin = time.monotonic()
        rows.append((what_fails(wait, expected, folder), time.monotonic() - begin))
    return rows


class Late(Observer):
    def before(self, op: str, payload: int, size: int) -> float:
        if dist.get_rank() == 1:
            time.sleep(0.003)
        return 0.0


def on_gloo(wait: Wait, folder: str) -> None:
    """Raises if the run fails without the wait."""
    expected = everything(3, {}, folder)
    observers.append(Late())
    with without(wait):
        results = everything(3, {}, folder)
    assert all(map(_equal, results, expected)), "other numbers"


def table(ranks: Any, folder: str) -> dict[str, str]:
    """For each wait, what fails without it."""
    waits = [wait for wait in all_waits() if str(wait) not in NEEDLESS]
    rows = ranks.run(on_strict, waits, folder, ranks=2, timeout=300, group_timeout=10)[0]
    found = {}
    for wait, (problem, seconds) in zip(waits, rows, strict=True):
        if not problem:
            try:
                with zerolab.Ranks(2, threads=1, forked=True) as fresh:
                    fresh.run(on_gloo, wait, folder, timeout=30, group_timeout=10)
            except zerolab.RankError as error:
                problem = f"on gloo: {str(error).splitlines()[0]}"[:110]
        found[f"{wait} [{wait.number}]"] = problem
        print(f"{wait!s:95} {seconds:4.1f} s  {problem or 'NOTHING FAILS'}")
    return found


@pytest.mark.exhaustive
def test_no_wait_can_be_removed(ranks, tmp_path: Path):
    found = table(ranks, str(tmp_path / "checkpoint"))
    assert len(found) >= 15
    assert [wait for wait, problem in found.items() if not problem] == []


if __name__ == "__main__":
    import tempfile

    with zerolab.Ranks(2, threads=1) as pool, tempfile.TemporaryDirectory() as place:
        table(pool, f"{place}/checkpoint")
