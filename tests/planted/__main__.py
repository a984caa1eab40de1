"""Plant each defect in a copy of the checkout, and see which test of `make test` notices.

    make test-planted                                # all of them
    make test-planted ARGS="--sample 5"              # five, drawn by the commit: what .ci/run does
    make test-planted ARGS="'sums in bf16'"          # by name

Fails if a defect is not noticed within two minutes.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from tests.jobs_common import ROOT, copy_checkout

from .defects import DEFECTS, Defect

LIMIT = 120.0  # seconds


class Outcome(NamedTuple):
    """What noticed a defect, "" if nothing did, and after how many seconds."""

    test: str
    seconds: float
    output: str


def plant(defect: Defect, root: Path) -> None:
    """Make the edit in the checkout at `root`. Raises ValueError if its place is not there exactly once."""
    file = root / "zerolab" / defect.file
    source = file.read_text()
    if source.count(defect.old) != 1:
        raise ValueError(f"{defect.name}: its place is {source.count(defect.old)} times in zerolab/{defect.file}")
    file.write_text(source.replace(defect.old, defect.new))


def run(defect: Defect) -> Outcome:
    """Try the defect's tests on a copy in which it is planted, until one of them fails."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        copy_checkout(copy)
        plant(defect, copy)
        files = [f"tests/{name}" for name in defect.tests.split()]
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=short", "-p", "no:cacheprovider"]
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, "-m", "not exhaustive", *files],
            cwd=copy,
            env=os.environ | {"PYTHONPATH": str(copy)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Outcome("", LIMIT, output)
        failed = re.search(r"^FAILED tests/(\S+(?: \S+)*?)(?: - |$)", output, re.MULTILINE)
        noticed = failed[1] if process.returncode == 1 and failed else ""
        return Outcome(noticed, time.monotonic() - begin, output)


def chosen(options: argparse.Namespace) -> list[Defect]:
    if options.names:
        by_name = {defect.name: defect for defect in DEFECTS}
        if unknown := sorted(set(options.names) - by_name.keys()):
            sys.exit(f"there is no defect {unknown[0]!r}; there are: " + "; ".join(sorted(by_name)))
        return [by_name[name] for name in options.names]
    if not options.sample:
        return DEFECTS
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return random.Random(commit.strip()).sample(DEFECTS, options.sample)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of defects")
    parser.add_argument("--sample", type=int, help="so many, drawn by the commit")
    parser.add_argument("--jobs", type=int, default=2, help="how many side by side")
    options = parser.parse_args()
    defects = chosen(options)
    missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {pool.submit(run, defect): defect for defect in defects}
        for number, done in enumerate(as_completed(runs), 1):
            defect, outcome = runs[done], done.result()
            missed += not outcome.test
            what = outcome.test or f"NOT NOTICED by {defect.tests}"
            print(f"[{number}/{len(defects)}] {outcome.seconds:5.1f} s  {defect.name}: {what}", flush=True)
            if not outcome.test:
                print("\n".join(f"    {line}" for line in outcome.output.splitlines()[-15:]), flush=True)
    print(f"{len(defects) - missed} of {len(defects)} defects noticed")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main())
