"""What a release needs, checked; then the release, in dist/. Nothing leaves the machine.

    make release

First what is quick: the version, the changelog, a tree without changes, pages that are as their sources say. Then the
wheel and the source distribution are built from what is committed. Each is installed into an environment with nothing
in it and put to work in an empty folder: it trains a small model at every stage and runs the first lesson. Last the
website, whose build ends where a link leads nowhere.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AS_WRITTEN = ("docs/site/address.py", "docs/write.py", "docs/trial/write.py", "-m zerolab.lab.build")


def run(*command: object, cwd: Path = ROOT) -> tuple[bool, str]:
    """Whether it ended well, and what it said."""
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=3600)
    return done.returncode == 0, done.stdout.strip()


def version() -> str:
    text = (ROOT / "zerolab" / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def missing(wanted: str, root: Path = ROOT, programs: Sequence[str] = AS_WRITTEN) -> list[str]:
    """A line for each thing that a release of this version lacks. programs: each has `--check`."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", wanted):
        found.append(f"zerolab.__version__ is {wanted!r}, and must look like 1.2.3 or 1.2.3rc1")
    heading = re.search(rf"^## {re.escape(wanted)}\b(.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)
    day = heading[1].strip(" ,()") if heading else ""
    if not heading:
        found.append(f"CHANGELOG.md has no section '## {wanted}, YYYY-MM-DD'")
    elif not re.fullmatch(r"\d{4}-\d\d-\d\d", day) or date.fromisoformat(day) > date.today():
        found.append(f"CHANGELOG.md: the section {wanted} must have its day, as in '## {wanted}, {date.today()}'")
    if changed := run("git", "status", "--porcelain", cwd=root)[1]:
        found.append(f"not committed:\n{changed}")
    tagged, commit = run("git", "rev-parse", "--verify", "--quiet", f"v{wanted}^{{commit}}", cwd=root)
    if tagged and commit != run("git", "rev-parse", "HEAD", cwd=root)[1]:
        found.append(f"the tag v{wanted} is of another commit: a release needs a new version")
    for program in programs:
        kept, said = run(sys.executable, *program.split(), "--check", cwd=root)
        if not kept:
            found.append(f"{program} --check: {said}")
    return found


def build(source: Path, out: Path) -> list[Path]:
    """The wheel and the source distribution of what is committed."""
    archive = source / "committed.tar"
    steps = [
        ("git", "archive", "--output", archive, "HEAD"),
        ("tar", "--extract", "--file", archive, "--directory", source),
        (sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source),
    ]
    for step in steps:
        done, said = run(*step)
        if not done:
            raise SystemExit(said)
    return sorted(out.glob("zerolab-*"))


def try_it(package: Path, folder: Path) -> None:
    """In an environment of its own, which `make` fills as it fills .venv, and in a folder without a checkout."""
    environment, room = folder / "venv", folder / "room"
    room.mkdir(parents=True)
    python = environment / "bin" / "python"
    lesson = "import zerolab; print(zerolab.__path__[0] + '/course/lessons/00_welcome.ipynb')"
    make = ("make", "--no-print-directory", environment / ".installed", f"VENV={environment}", "EXTRAS=lab")
    for command in [
        (*make, f"PACKAGE={package}"),
        (environment / "bin" / "zerolab", "demo", "--ranks", "2", "--steps", "2"),
        (python, "-c", lesson),
    ]:
        done, said = run(*command, cwd=ROOT if command[0] == "make" else room)
        if not done:
            raise SystemExit(f"{package.name}: {' '.join(map(str, command))}\n{said}")
    shutil.copy(said, room)
    execute = ("nbconvert", "--to", "notebook", "--execute", "--inplace", "00_welcome.ipynb")
    done, said = run(python, "-m", *execute, cwd=room)
    if not done:
        raise SystemExit(f"{package.name}: lesson 00\n{said}")


def main() -> int:
    wanted = version()
    print(f"zerolab {wanted}")
    if found := missing(wanted):
        print("".join(f"- {line}\n" for line in found) + "Nothing was built.")
        return 1
    out = ROOT / "dist"
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="zerolab-release-") as folder:
        (source := Path(folder) / "source").mkdir()
        for package in build(source, out):
            print(f"{package.name}: {package.stat().st_size / 1e6:.1f} MB; installing and trying it", flush=True)
            try_it(package, Path(folder) / package.suffix)
    done, said = run(sys.executable, "docs/site/build.py")
    print(said)
    if not done:
        return 1
    print(f"dist/ is ready. Tag it v{wanted} and push the tag: .github/workflows/release.yml publishes it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
