"""Builds the notebooks from the only source that people write, `solutions/NN_name.py` (py:percent):

    solutions/NN_name.ipynb     complete, executed
    lessons/NN_name.ipynb       what a learner opens: stubs in place of the answers, executed

    python -m zerolab.lab.build            # those whose source has changed, or the package (make lessons)
    python -m zerolab.lab.build 01 03      # only these lessons
    python -m zerolab.lab.build --force    # all of them (make lessons FORCE=1)
    python -m zerolab.lab.build --text     # runs nothing: only text has changed
    python -m zerolab.lab.build --check    # runs nothing: do the notebooks match the sources?

A cell `%%exercise NN.k` is empty in the source: the solution gets the catalogue's reference, the lesson its stub, and
above it a line that says how hard it is. In the lesson `predict("NN.k", value)` becomes `predict("NN.k", ...)`. Of the
cells tagged `answer`, code is left out and text is folded, one click away. Cells tagged `reveals` run but keep no
output, since it would give a prediction away, and `lab.progress()` keeps none, since it is of whoever built it. nbval
compares the output of cells tagged `nbval-check-output`. A note below the title says whose outputs one sees. The first
code cell installs zerolab where it is missing; `zerolab lab` leaves it out. The last cell leads to the solution and to
the next lesson.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from nbformat import NotebookNode

import zerolab
from zerolab.lab.__main__ import INSTALL
from zerolab.lab.exercises.catalogue import find_exercise

PACKAGE = Path(__file__).parents[1]
PICTURE_LIMIT = 60_000  # bytes
NOTEBOOK_LIMIT = 1_000_000  # bytes
CELL_TIMEOUT = 600  # seconds, for what hangs: no cell takes one on an idle machine
WIDGET = "application/vnd.jupyter.widget-view+json"
SOLVED = "*The outputs below are the course's. Run the cells (Shift-Enter runs one), and they become yours.*"
UNSOLVED = (
    "*The outputs below are the course's, from before any exercise was solved. Run the cells (Shift-Enter runs one), "
    "and they become yours. A cell that begins with `%%exercise` becomes a file, so it needs its own imports.*"
)
INSTALLS = """\
# Where zerolab is missing, as on Colab or Kaggle, this installs it. Elsewhere it does nothing.
import importlib.util, subprocess, sys

if importlib.util.find_spec("zerolab") is None:
    for source in [
        SOURCES,
    ]:
        print(f"{source}: installing it", end=" ... ", flush=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--retries=1"]
        pip += ["install", "--quiet", source]
        done = subprocess.run(pip, capture_output=True, text=True)
        if done.returncode == 0:
            print("done")
            break
        print((done.stderr.strip() or "failed").splitlines()[-1])
    else:
        raise ModuleNotFoundError(
            "zerolab could not be installed. From a copy of its repository, it is"
            " `pip install './zerolab[lab]'`; then run this cell again."
        )"""
EXERCISE = re.compile(r"%%exercise +(\d\d\.\d+)\s*(?:\n|$)")
PREDICTION = re.compile(r"""(predict\(\s*["'][\d.]+["'],\s*).+(\)\s*(?:#.*)?)$""", re.MULTILINE)


class BuildError(Exception):
    """A notebook cannot be built, or does not match its source."""


# ---------------------------------------------------------------------- from source to notebooks


def notebooks(source: Path) -> dict[str, NotebookNode]:
    """The two notebooks of a source, "solutions" and "lessons", not yet executed."""
    # Without the format, jupytext guesses, may be misled by magics, and turns every %%ranks into a comment.
    complete = jupytext.read(source, fmt="py:percent")
    complete.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    for cell, id in zip(complete.cells, _ids(complete.cells), strict=True):
        cell.id = id
        tags = list(cell.metadata.get("tags", []))
        cell.metadata = nbformat.from_dict({"tags": tags} if tags else {})
    for cell in _code(complete):
        if found := EXERCISE.match(cell.source):
            if cell.source[found.end() :].strip():
                raise BuildError(f"{source.name}: the answer to {found[1]} is in the catalogue; leave its cell empty")
            cell.source = f"%%exercise {found[1]}\n{find_exercise(found[1]).reference.rstrip()}"
    lesson = copy.deepcopy(complete)
    complete.cells[0].source = re.sub(r"^(# \d\d · .+)", r"\1 (solved)", complete.cells[0].source)
    lesson.cells = [_for_learners(cell) for cell in lesson.cells if cell.cell_type != "code" or not _is_answer(cell)]
    for number, cell in reversed(list(enumerate(lesson.cells))):
        if cell.cell_type == "code" and (found := EXERCISE.match(cell.source)):
            about = nbformat.v4.new_markdown_cell(
                find_exercise(found[1]).about, id=f"exercise-{found[1]}".replace(".", "-")
            )
            lesson.cells.insert(number, about)
    for notebook, note in ((complete, SOLVED), (lesson, UNSOLVED)):
        notebook.cells[1:1] = [
            nbformat.v4.new_markdown_cell(note, id="outputs"),
            nbformat.v4.new_code_cell(installs(source.parents[1]), id=INSTALL),
        ]
    link = f"[The solution of this lesson](../solutions/{source.stem}.ipynb)"
    if following := next((path for path in sources(source.parents[1]) if path.name > source.name), None):
        title = re.search(r"^# # (.+)$", following.read_text(), re.MULTILINE)
        link += f" · Next: [{title[1] if title else following.stem}]({following.stem}.ipynb)"
    lesson.cells.append(nbformat.v4.new_markdown_cell(link, id="solution"))
    return {"solutions": complete, "lessons": lesson}


def installs(root: Path) -> str:
    """The first code cell: it tries the repository at this version's tag, if pyproject.toml names one, and the index.

    The website's copies try the website's wheel before these: docs/site/build.py.
    """
    settings = root / "pyproject.toml"
    urls = tomllib.loads(settings.read_text())["project"].get("urls", {}) if settings.exists() else {}
    found = [f"zerolab[lab]=={zerolab.__version__}"]
    if repository := urls.get("Repository"):
        found.insert(0, f"zerolab[lab] @ git+{repository}@v{zerolab.__version__}")
    return INSTALLS.replace("SOURCES", ",\n        ".join(json.dumps(source) for source in found))


def _ids(cells: list[NotebookNode]) -> Iterator[str]:
    """Ids from the heading above and the place below it, such as "root-against-ring-2"; other edits keep them."""
    seen: Counter[str] = Counter()
    heading = "start"
    for cell in cells:
        if cell.cell_type == "markdown" and (found := re.search(r"^#+ +(.+)$", cell.source, re.MULTILINE)):
            heading = re.sub(r"[^a-z0-9]+", "-", found[1].lower()).strip("-")[:50] or "start"
        seen[heading] += 1
        yield f"{heading}-{seen[heading]}"


def _is_answer(cell: NotebookNode) -> bool:
    return "answer" in cell.metadata.get("tags", [])


def _for_learners(cell: NotebookNode) -> NotebookNode:
    if _is_answer(cell):
        text = cell.source.removeprefix("**Answers**").strip()
        cell.source = f"<details>\n<summary><b>Answers</b> (click to unfold)</summary>\n\n{text}\n\n</details>"
    elif cell.cell_type == "code":
        if found := EXERCISE.match(cell.source):
            cell.source = f"%%exercise {found[1]}\n{find_exercise(found[1]).stub.rstrip()}"
        cell.source = PREDICTION.sub(r"\1...\2", cell.source)
    return cell


def _code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def _ran(notebook: NotebookNode) -> list[tuple[str, dict]]:
    """What outputs depend on: not the cell that installs, which does nothing where notebooks are built."""
    return [(cell.source, cell.metadata) for cell in _code(notebook) if cell.id != INSTALL]


def digest(notebook: NotebookNode) -> str:
    """A digest of everything that the outputs depend on: the code and the package."""
    sources = hashlib.sha256(repr(_ran(notebook)).encode())
    for file in sorted(PACKAGE.rglob("*.py")):
        sources.update(str(file.relative_to(PACKAGE)).encode() + file.read_bytes())
    return sources.hexdigest()[:16]


# ---------------------------------------------------------------------- running


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in a new kernel in `folder`, with nobody's answers or progress."""
    with tempfile.TemporaryDirectory(prefix="zerolab-") as fresh:
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            extra_arguments=["--log-level=ERROR"],  # for the kernel's own log
            resources={"metadata": {"path": str(folder)}},
        )
        env = os.environ | {"ZEROLAB_MY": str(Path(fresh) / "my"), "PYTHONHASHSEED": "0"}
        try:
            client.execute(env=env)
        except (CellExecutionError, CellTimeoutError, DeadKernelError) as error:
            raise BuildError(f"a cell failed: {error}") from None


def clean(notebook: NotebookNode, kind: str) -> None:
    """Keep only those outputs that a reader wants and that are the same in every run of the same code."""
    notebook.metadata.pop("widgets", None)
    for cell in _code(notebook):
        outputs: list[NotebookNode] = []
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = nbformat.from_dict({})
            if WIDGET in output.get("data", {}):
                del output.data[WIDGET]
                if set(output.data) <= {"text/plain"}:
                    continue  # the name of a widget without the widget
            if output.output_type == "stream" and outputs and outputs[-1].get("name") == output.name:
                outputs[-1].text += output.text  # where a stream was cut is chance
            else:
                outputs.append(output)
        for output in outputs:
            if output.output_type == "stream":
                output.text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)  # what a progress bar overwrote
                output.text = re.sub(r"^another notebook \(process .*\n", "", output.text, flags=re.MULTILINE)
        cell.outputs = [output for output in outputs if output.get("text") != ""]
        if _is_for_one_reader(cell, kind):
            cell.outputs = []


def _is_for_one_reader(cell: NotebookNode, kind: str) -> bool:
    """Its output would give a prediction away, or says how far somebody has come, and of how much."""
    reveals = kind == "lessons" and "reveals" in cell.metadata.get("tags", [])
    return reveals or cell.source.rstrip().endswith("lab.progress()")


def _text(output: NotebookNode) -> str:
    return output.get("text", "") or output.get("data", {}).get("text/plain", "")


def inspect(notebook: NotebookNode, kind: str) -> None:
    """Raises BuildError if the outputs are not fit to keep."""
    for cell in _code(notebook):
        if _is_for_one_reader(cell, kind) and cell.outputs:
            raise BuildError(
                f"cell {cell.id} of {kind} is tagged `reveals`, or shows progress, but its output was kept"
            )
        for output in cell.outputs:
            for mime, data in output.get("data", {}).items():
                size = len(data) * 3 // 4 if mime in ("image/png", "image/jpeg") else len(str(data))
                if mime.startswith("image/") and size > PICTURE_LIMIT:
                    raise BuildError(f"the picture of cell {cell.id} has {size:,} bytes, more than {PICTURE_LIMIT:,}")
            for line in _text(output).splitlines():
                passed = re.match(r"[✓✗○] \d\d\.\d+ .*    ", line)
                if passed and "check(" in cell.source and (line[0] == "✓") != (kind == "solutions"):
                    raise BuildError(f"cell {cell.id} of {kind} says: {line}")
    size = len(nbformat.writes(notebook).encode())
    if size > NOTEBOOK_LIMIT:
        raise BuildError(f"the notebook has {size:,} bytes, more than {NOTEBOOK_LIMIT:,}")


# ---------------------------------------------------------------------- the command


def update(source: Path, force: bool = False, text: bool = False) -> list[str]:
    """Write the notebooks of `source` (root/solutions/NN_name.py) that are out of date. Returns a line for each.

    text: run nothing, and keep the outputs that there are, although the package may have changed since.
    """
    lines = []
    for kind, notebook in notebooks(source).items():
        target = source.parents[1] / kind / f"{source.stem}.ipynb"
        current = digest(notebook)
        kept = _read(target) if target.exists() and not force else None
        same = kept is not None and _ran(kept) == _ran(notebook)
        if text and not same:
            raise BuildError(f"{kind}/{target.name}: its code has changed too, so it must run: leave out --text")
        if text and kept is not None:
            current = kept.metadata.get("zerolab")  # its outputs are as old as they were
        elif kept is not None and not (same and kept.metadata.get("zerolab") == current):
            kept = None
        if kept is not None and not _difference(notebook, kept):
            continue
        target.parent.mkdir(exist_ok=True)
        begin = time.monotonic()
        try:
            if kept is not None:
                notebook.metadata = kept.metadata
                for cell, ran in zip(_code(notebook), _code(kept), strict=True):
                    cell.outputs, cell.execution_count = ran.outputs, ran.execution_count
            else:
                execute(notebook, target.parent)
                clean(notebook, kind)
            inspect(notebook, kind)
        except BuildError as error:
            raise BuildError(f"{kind}/{target.name}: {error}") from None
        notebook.metadata["zerolab"] = current
        new = target.with_name(target.name + ".new")
        nbformat.write(notebook, new)
        new.replace(target)
        lines.append(f"{kind}/{target.name} in {time.monotonic() - begin:.0f} s, {target.stat().st_size / 1000:.0f} kB")
        print(lines[-1], flush=True)
    return lines


def _read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def drift(root: Path) -> list[str]:
    """A line for each notebook under `root` that does not match its source."""
    found, wanted = [], set()
    for source in sources(root):
        for kind, notebook in notebooks(source).items():
            target = root / kind / f"{source.stem}.ipynb"
            wanted.add(target)
            name = f"{kind}/{target.name}"
            if not target.exists():
                found.append(f"{name} is missing")
                continue
            kept = _read(target)
            if changed := _difference(notebook, kept):
                found.append(f"{name} does not match its source: {changed}")
                continue
            try:
                inspect(kept, kind)
            except BuildError as error:
                found.append(f"{name}: {error}")
    for kind in ("solutions", "lessons"):
        found += [f"{kind}/{p.name} has no source" for p in sorted((root / kind).glob("*.ipynb")) if p not in wanted]
    return found


def _difference(wanted: NotebookNode, kept: NotebookNode) -> str:
    if [cell.id for cell in wanted.cells] != [cell.id for cell in kept.cells]:
        return "cells were added, moved or removed"
    for new, old in zip(wanted.cells, kept.cells, strict=True):
        if (new.cell_type, new.source, new.metadata) != (old.cell_type, old.source, old.metadata):
            return f"cell {new.id} differs"
        if old.cell_type == "code" and old.source.strip() and old.execution_count is None:
            return f"cell {new.id} was not run"
    return ""


def sources(root: Path) -> list[Path]:
    return sorted((root / "solutions").glob("[0-9][0-9]_*.py"))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m zerolab.lab.build", description="build the notebooks of the course"
    )
    parser.add_argument("lessons", nargs="*", metavar="NN", help="numbers of lessons (default: all)")
    parser.add_argument("--force", action="store_true", help="also build those that are up to date")
    parser.add_argument("--text", action="store_true", help="run nothing: only text has changed, and outputs stay")
    parser.add_argument("--check", action="store_true", help="run nothing: do the notebooks match the sources?")
    parser.add_argument("--root", type=Path, default=Path(), help="where solutions/ and lessons/ are")
    options = parser.parse_args(arguments)
    chosen = [path for path in sources(options.root) if not options.lessons or path.name[:2] in options.lessons]
    if not chosen:
        print(f"no sources solutions/NN_name.py in {options.root.resolve()}", file=sys.stderr)
        return 2
    try:
        if options.check:
            found = drift(options.root)
            print("\n".join(found + ["make lessons rebuilds them"]) if found else "the notebooks are up to date")
            return 1 if found else 0
        built = [line for source in chosen for line in update(source, options.force, options.text)]
    except (BuildError, KeyError) as error:
        print(error.args[0], file=sys.stderr)
        return 1
    if not built:
        print("the notebooks are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
