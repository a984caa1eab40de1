"""Puts an engine through the cases, on real ranks, and comes to a verdict on each.

for verdict in hear(known("fsdp2"), ranks=2): ...
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zerolab
from zerolab.trial.adapters import ENGINES
from zerolab.trial.case import FEATURES, REFUSAL, Adapter, Broken, Unsupported, in_one_line
from zerolab.trial.cases import CASES

HOLDS, WRONG, REFUSED, HANGS, DIES, UNSUPPORTED = "holds", "wrong", "refused", "hangs", "dies", "unsupported"
WORST_FIRST = (DIES, WRONG, REFUSED, UNSUPPORTED, HOLDS)
GROUP_TIMEOUT = 120.0  # of collectives: longer than any case's limit, so that a wait is a hang and no error


class Refused(ValueError):
    """There is no such engine. The message says which there are, or what is wrong with the file."""


@dataclass
class Verdict:
    """On one case with some ranks.

    verdict: "holds", "wrong" (a promise is broken), "refused" (an error), "hangs", "dies" (a process did) or
    "unsupported". what: what was seen. otherwise: what the engine promises instead, if it says so.
    """

    case: str
    ranks: int
    verdict: str
    what: str
    otherwise: str = ""

    @property
    def good(self) -> bool:
        return self.verdict in (HOLDS, UNSUPPORTED) or bool(self.otherwise)


def find(engine: str) -> None:
    """Raises Refused, in one line, if there is no such engine or it cannot be made."""
    try:
        make = load(engine)
        for package in make().packages:
            version(package)
    except Refused:
        raise
    except PackageNotFoundError as why:
        raise Refused(f"{engine} needs {why.name}: pip install {why.name}") from None
    except Exception as why:
        raise Refused(f"{engine} cannot be made: {in_one_line(why)}") from None


@functools.cache
def load(engine: str) -> Callable[[], Adapter]:
    """`name`, or the class of `path.py:Adapter`."""
    if ":" not in engine:
        if engine not in ENGINES:
            raise Refused(f"no engine {engine!r}: one of {', '.join(ENGINES)}, or FILE.py:CLASS")
        return ENGINES[engine]
    file, _, name = engine.rpartition(":")
    path = Path(file).resolve()
    if not path.is_file():
        raise Refused(f"{engine}: there is no file {file}")
    name_here = f"zerolab_trial_{path.stem}"  # not its own, which may be that of another module
    spec = importlib.util.spec_from_file_location(name_here, path)
    if spec is None or spec.loader is None:
        raise Refused(f"{engine}: {file} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name_here] = module
    if str(path.parent) not in sys.path:  # for what it imports from beside it
        sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as why:
        raise Refused(f"{engine}: {file} raises {type(why).__name__}: {why}") from None
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise Refused(f"{engine}: {file} has no class {name} that is a zerolab.trial.Adapter")
    return found


def hear(engine: str, ranks: int, names: Iterable[str] = CASES, pool: zerolab.Ranks | None = None) -> Iterator[Verdict]:
    """One verdict after the other."""
    before = os.environ.get("TORCH_FR_BUFFER_SIZE")
    os.environ["TORCH_FR_BUFFER_SIZE"] = before or "0"  # torch's flight recorder takes 1 kB of each collective
    with tempfile.TemporaryDirectory() as folder:
        own = pool or zerolab.Ranks(ranks + 1, threads=1, forked=True)
        try:
            for number, name in enumerate(names):
                place = Path(folder, str(number))
                place.mkdir()
                yield _hear(own, engine, ranks, name, place)
        finally:
            if pool is None:
                own.close()
            if before is None:
                os.environ.pop("TORCH_FR_BUFFER_SIZE", None)


def _hear(pool: zerolab.Ranks, engine: str, ranks: int, name: str, folder: Path) -> Verdict:
    case, adapter = CASES[name], load(engine)()
    otherwise = adapter.otherwise.get(name, "")
    if lacking := sorted(case.needs - adapter.supports):
        return Verdict(name, ranks, UNSUPPORTED, ", ".join(FEATURES[feature] for feature in lacking))
    if ranks < case.least:
        return Verdict(name, ranks, UNSUPPORTED, f"needs {case.least} ranks")
    verdict = Verdict(name, ranks, HOLDS, "")
    for part, size in enumerate(case.sizes(ranks)):
        try:
            found = pool.run(
                try_case, engine, name, part, str(folder), ranks=size, timeout=case.limit, group_timeout=GROUP_TIMEOUT
            )
        except zerolab.RankError as why:
            verdict = Verdict(name, ranks, *_ended(why, folder))
        else:
            worst = min(range(size), key=lambda rank: WORST_FIRST.index(found[rank][0]))
            verdict = Verdict(name, ranks, *found[worst])
            if {HOLDS, REFUSED} <= {kind for kind, _ in found}:
                verdict.what = f"rank {worst} alone: {verdict.what}"
            errors = [what.startswith(REFUSAL) for _, what in found]
            if verdict.verdict == HOLDS and len(set(errors)) > 1:
                said = f"rank {errors.index(True)} has {found[errors.index(True)][1]}"
                verdict = Verdict(name, ranks, WRONG, f"{said}; rank {errors.index(False)} has none")
        if verdict.verdict != HOLDS:
            break
    verdict.otherwise = otherwise if verdict.verdict not in (HOLDS, UNSUPPORTED) else ""
    return verdict


def _ended(why: zerolab.RankError, folder: Path) -> tuple[str, str]:
    """A rank that was late, or that died."""
    said = [f"rank {path.stem} had said: {path.read_text()}" for path in sorted(folder.glob("*.said"))]
    where = "; ".join(said) or _innermost(why.traceback)
    if "died" in str(why) or "killed" in str(why):
        return DIES, f"{str(why).splitlines()[0]}"
    return HANGS, f"rank {why.rank} waits{f' in {where}' if not said else ''}" + (f"; {where}" if said else "")


def _innermost(stack: str) -> str:
    found = re.search(r'File "(?:.*/)?([^/"]+)", line (\d+) in (\w+)', stack)
    return f"{found[3]} ({found[1]}:{found[2]})" if found else "a collective"


def try_case(engine: str, name: str, part: int, folder: str) -> tuple[str, str]:
    """On a rank: a verdict and what was seen. What the rank said stays in the folder, if others hang."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    verdict = _tried(engine, name, part, Path(folder))
    if verdict[0] != HOLDS:
        Path(folder, f"{dist.get_rank()}.said").write_text(f"{verdict[0]}: {verdict[1]}")
    return verdict


def _tried(engine: str, name: str, part: int, folder: Path) -> tuple[str, str]:
    try:
        return HOLDS, CASES[name].run(load(engine), part, folder)
    except Broken as why:
        return WRONG, str(why)
    except Unsupported as why:
        return UNSUPPORTED, FEATURES.get(str(why), str(why))
    except Exception as why:
        at = traceback.extract_tb(why.__traceback__)[-1]
        return REFUSED, f"{in_one_line(why)} ({Path(at.filename).name}:{at.lineno})"


def command(engine: str, verdict: Verdict) -> str:
    """Runs this case alone again."""
    return shlex.join(["zerolab", "trial", engine, "--ranks", str(verdict.ranks), "--only", verdict.case])


def record(engine: str, verdicts: list[Verdict]) -> dict[str, Any]:
    """What `--json` writes."""
    versions = {name: version(name) for name in load(engine)().packages}
    return {"engine": engine, "torch": torch.__version__} | versions | {"verdicts": [asdict(v) for v in verdicts]}
