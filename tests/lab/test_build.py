"""make lessons: from one source to what a learner opens and to the solution."""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest
from nbformat import NotebookNode

from zerolab.lab import build
from zerolab.lab.__main__ import copy_docs, copy_lessons
from zerolab.lab.exercises.catalogue import find_exercise

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SOURCE = """\
# %% [markdown]
# # 01 · A tiny lesson

# %%
from IPython import get_ipython
from zerolab import lab
from zerolab.lab.exercises import learner as exercises

exercises.register(get_ipython())

# %% [markdown]
# ## Write it: here & now

# %% tags=["predict"]
lab.predict("01.1", 12)

# %%
# %%exercise 01.2

# %%
lab.mine("01.2")("mine", 0, 1, None)

# %% tags=["nbval-check-output"]
lab.measured("01.1", 12, "MB")
lab.reveal("01.1")

# %% tags=["answer"]
print("the answer is 12")

# %% [markdown] tags=["answer"]
# **Answers**
#
# 1. Twelve.

# %% tags=["reveals"]
print("and now it is out")

# %%
# %%time
print("a line magic stays one")

# %%
import matplotlib.pyplot as plt

_ = plt.plot([1, 2])
"""


@pytest.fixture
def course(tmp_path: Path) -> Path:
    (tmp_path / "solutions").mkdir()
    (tmp_path / "solutions" / "01_tiny.py").write_text(SOURCE)
    return tmp_path


def read(course: Path, kind: str) -> NotebookNode:
    return nbformat.read(course / kind / "01_tiny.ipynb", as_version=4)


def printed(notebook: NotebookNode) -> str:
    return "".join(build._text(output) for cell in notebook.cells for output in cell.get("outputs", []))


def test_notebooks_of_a_source(course: Path) -> None:
    made = build.notebooks(course / "solutions" / "01_tiny.py")
    solution, lesson = made["solutions"], made["lessons"]
    ids = [cell.id for cell in solution.cells]
    assert ids[:4] == ["01-a-tiny-lesson-1", "outputs", "install", "01-a-tiny-lesson-2"]
    assert ids[4:6] == ["write-it-here-now-1", "write-it-here-now-2"]
    assert "the course's" in solution.cells[1].source and "before any exercise was solved" in lesson.cells[1].source
    assert solution.cells[2].source == lesson.cells[2].source == build.installs(course)
    assert len(set(ids)) == len(ids)
    assert ids == [cell.id for cell in build.notebooks(course / "solutions" / "01_tiny.py")["solutions"].cells]

    cells = {cell.id: cell.source for cell in lesson.cells}
    assert cells["write-it-here-now-3"] == "%%exercise 01.2\n" + find_exercise("01.2").stub.rstrip()
    assert cells["exercise-01-2"].startswith("**Exercise 01.2** · ●○○ one idea · 8 lines")
    assert cells["write-it-here-now-2"] == 'lab.predict("01.1", ...)'
    assert cells["solution"] == "[The solution of this lesson](../solutions/01_tiny.ipynb)"
    (course / "solutions" / "02_small.py").write_text("# %% [markdown]\n# # 02 · A small one\n")
    last = build.notebooks(course / "solutions" / "01_tiny.py")["lessons"].cells[-1].source
    assert last.endswith("01_tiny.ipynb) · Next: [02 · A small one](02_small.ipynb)")
    assert "the answer is 12" not in str(lesson.cells)
    (folded,) = [cell.source for cell in lesson.cells if "Twelve" in cell.source]
    assert folded.startswith("<details>\n<summary>") and folded.endswith("\n\n1. Twelve.\n\n</details>")
    (open_,) = [cell.source for cell in solution.cells if "Twelve" in cell.source]
    assert open_ == "**Answers**\n\n1. Twelve."
    (checked,) = [cell for cell in lesson.cells if cell.source.startswith("lab.measured")]
    assert checked.metadata.tags == ["nbval-check-output"]
    assert solution.cells[6].source == "%%exercise 01.2\n" + find_exercise("01.2").reference.rstrip()
    assert any(cell.source.startswith("%%time\n") for cell in lesson.cells)
    nbformat.validate(solution)
    nbformat.validate(lesson)


@pytest.mark.exhaustive
def test_build_then_nothing_then_what_changed(
    course: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "PACKAGE", course / "package")
    assert build.main(["--root", str(course)]) == 0
    said = capsys.readouterr().out
    assert "solutions/01_tiny.ipynb in" in said and "lessons/01_tiny.ipynb in" in said
    solution, lesson = read(course, "solutions"), read(course, "lessons")
    assert "measured 12 MB; you said 12 MB: exactly right" in printed(solution)
    assert "the answer is 12" in printed(solution) and "the answer" not in printed(lesson)
    assert "and now it is out" in printed(solution) and "and now it is out" not in printed(lesson)
    assert 'first lab.predict("01.1", what you expect)' in printed(lesson)
    assert "01.2 ring all-gather: not written yet" in printed(lesson)
    assert "the course's code, 01.2 is not written yet" in printed(lesson)
    for notebook in (solution, lesson):
        counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
        assert counts == list(range(1, len(counts) + 1))
        assert "iopub" not in nbformat.writes(notebook) and "widgets" not in notebook.metadata
        assert "image/png" in nbformat.writes(notebook)
    assert not (course / "solutions" / "my").exists() and not (course / "lessons" / "my").exists()

    assert build.main(["--root", str(course)]) == build.main(["--root", str(course), "--check"]) == 0
    assert capsys.readouterr().out == "the notebooks are up to date\n" * 2

    source = course / "solutions" / "01_tiny.py"
    source.write_text(edited := SOURCE.replace("1. Twelve", "1. A dozen"))
    monkeypatch.setattr(build, "execute", lambda *_: pytest.fail("only text has changed"))
    (course / "package").mkdir()
    (course / "package" / "older.py").write_text("pass\n")
    assert build.main(["--root", str(course), "--text"]) == 0 and build.drift(course) == []
    for notebook, kind in ((solution, "solutions"), (lesson, "lessons")):
        assert "A dozen" in nbformat.writes(read(course, kind)) and printed(read(course, kind)) == printed(notebook)
    capsys.readouterr()

    source.write_text(edited.replace("the answer is 12", "the answer is 13"))  # which the lesson does not hold
    assert build.main(["--root", str(course), "--check"]) == 1
    said = capsys.readouterr().out
    assert "solutions/01_tiny.ipynb does not match its source: cell write-it-here-now-6 differs" in said
    assert "lessons/" not in said
    assert build.main(["--root", str(course), "--text"]) == 1
    assert "solutions/01_tiny.ipynb: its code has changed too" in capsys.readouterr().err
    ran: list[Path] = []
    monkeypatch.setattr(build, "execute", lambda notebook, folder: ran.append(folder))
    (course / "package" / "older.py").unlink()
    build.update(source)
    assert [folder.name for folder in ran] == ["solutions"]
    build.update(source, force=True)
    assert [folder.name for folder in ran] == ["solutions", "solutions", "lessons"]
    (course / "package" / "engine.py").write_text("pass\n")
    build.update(source)
    assert [folder.name for folder in ran[3:]] == ["solutions", "lessons"]


def test_drift(course: Path, capsys: pytest.CaptureFixture) -> None:
    assert build.drift(course) == ["solutions/01_tiny.ipynb is missing", "lessons/01_tiny.ipynb is missing"]
    for kind, notebook in build.notebooks(course / "solutions" / "01_tiny.py").items():
        (course / kind).mkdir(exist_ok=True)
        nbformat.write(notebook, course / kind / "01_tiny.ipynb")
    nbformat.write(nbformat.v4.new_notebook(), course / "lessons" / "02_old.ipynb")
    found = build.drift(course)
    assert found[:2] == [
        "solutions/01_tiny.ipynb does not match its source: cell install was not run",
        "lessons/01_tiny.ipynb does not match its source: cell install was not run",
    ]
    assert found[2:] == ["lessons/02_old.ipynb has no source"]
    assert build.main(["--root", str(course / "lessons")]) == 2
    assert "no sources solutions/NN_name.py" in capsys.readouterr().err


def test_a_cell_that_fails_is_named_and_nothing_written(course: Path, capsys: pytest.CaptureFixture) -> None:
    (course / "solutions" / "01_tiny.py").write_text("# %%\nprint(1)\n\n# %%\nno_such_name\n")
    assert build.main(["--root", str(course), "01"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("solutions/01_tiny.ipynb: a cell failed") and "no_such_name" in said
    assert not (course / "solutions" / "01_tiny.ipynb").exists()


def test_the_notebooks_of_the_course_say_what_their_sources_say() -> None:
    assert build.drift(Path(__file__).parents[2]) == []


def test_an_unknown_exercise_is_named(course: Path, capsys: pytest.CaptureFixture) -> None:
    (course / "solutions" / "01_tiny.py").write_text("# %%\n# %%exercise 01.9\n")
    assert build.main(["--root", str(course)]) == 1
    assert "there is no exercise '01.9'" in capsys.readouterr().err


def test_an_answer_in_a_source_is_refused(course: Path, capsys: pytest.CaptureFixture) -> None:
    (course / "solutions" / "01_tiny.py").write_text("# %%\n# %%exercise 01.2\npass\n")
    assert build.main(["--root", str(course)]) == 1
    assert "01_tiny.py: the answer to 01.2 is in the catalogue" in capsys.readouterr().err


# ---------------------------------------------------------------------- what is kept of the outputs


def with_outputs(*outputs: NotebookNode, source: str = "") -> NotebookNode:
    cell = nbformat.v4.new_code_cell(source, outputs=list(outputs), id="it")
    return nbformat.v4.new_notebook(cells=[cell])


def stream(text: str, name: str = "stdout") -> NotebookNode:
    return nbformat.v4.new_output("stream", name=name, text=text)


def test_clean() -> None:
    widget = nbformat.v4.new_output("display_data", {build.WIDGET: {}, "text/plain": "IntSlider()"})
    picture = nbformat.v4.new_output("display_data", {build.WIDGET: {}, "image/png": "AAAA", "text/plain": "<Figure>"})
    picture.metadata = {"needs_background": "light"}
    notebook = with_outputs(stream("a\n"), stream("10%\r90%\r"), stream("100%\n"), widget, picture)
    notebook.metadata.widgets = {"state": {}}
    build.clean(notebook, "solutions")
    first, second = notebook.cells[0].outputs
    assert first.text == "a\n100%\n"
    assert second.data == {"image/png": "AAAA", "text/plain": "<Figure>"} and second.metadata == {}
    assert "widgets" not in notebook.metadata


def test_pictures_and_notebooks_have_a_limit() -> None:
    def picture(size: int) -> NotebookNode:
        return nbformat.v4.new_output("display_data", {"image/png": base64.b64encode(bytes(size)).decode()})

    build.inspect(with_outputs(picture(59_000)), "lessons")
    with pytest.raises(build.BuildError, match=r"the picture of cell it has .* bytes, more than 60,000"):
        build.inspect(with_outputs(picture(61_000)), "lessons")
    with pytest.raises(build.BuildError, match=r"the notebook has .* bytes, more than 1,000,000"):
        build.inspect(with_outputs(stream("x" * 1_000_001)), "lessons")


def card(text: str) -> NotebookNode:
    return nbformat.v4.new_output("display_data", {"text/plain": text, "text/html": "<div></div>"})


@pytest.mark.parametrize("shown", [stream, card])
@pytest.mark.parametrize("kind", ["solutions", "lessons"])
def test_checks_say_what_they_must(kind: str, shown: Callable[[str], NotebookNode]) -> None:
    right = {"solutions": "✓ 01.1 ring    N=1 ok\n", "lessons": "○ 01.1 ring    not done yet\n"}
    for other, text in right.items():
        notebook = with_outputs(shown(text), source='lab.check("01.1")')
        if other == kind:
            build.inspect(notebook, kind)
        else:
            with pytest.raises(build.BuildError, match=f"cell it of {kind} says: {re.escape(text.strip())}"):
                build.inspect(notebook, kind)


def test_lessons_import_the_lab_the_engine_and_its_measurements_only() -> None:
    """`zerolab.lab` is the one name for everything that the lab has: where it keeps it is its own affair."""
    from zerolab import lab

    found = []
    for source in build.sources(ROOT):
        for module, names in re.findall(r"^(?:# )?from (zerolab[\w.]*) import (.+)$", source.read_text(), re.MULTILINE):
            if not re.fullmatch(r"zerolab(\.lab(\.plots)?|\.measure(\.\w+)?)?", module):
                found.append(f"{source.name}: {module}")
            elif module == "zerolab.lab":
                wanted = {name.partition(" as ")[0] for name in names.split(", ")}
                found += [
                    f"{source.name}: lab.{name}"
                    for name in sorted(wanted - {"plots", "crash", "production", *lab.__all__})
                ]
    assert len(build.sources(ROOT)) > 8 and found == []


def test_code_fits_a_laptop_s_window() -> None:
    """At 1280 pixels with the file browser open, JupyterLab shows 92 columns."""
    for lesson in sorted((ROOT / "lessons").glob("*.ipynb")):
        for cell in nbformat.read(lesson, 4).cells:
            if cell.cell_type == "code" and cell.id != "install":
                assert max(map(len, cell.source.splitlines()), default=0) <= 92, f"{lesson.name}: {cell.id}"


def test_no_link_leads_to_what_changes_under_it() -> None:
    """A branch or the newest documentation may say something else tomorrow than what the text says of it."""
    moving = re.compile(r"https?://\S*/(?:main|master|HEAD|stable|latest)/\S*")
    pages = [*ROOT.glob("solutions/*.py"), *ROOT.glob("docs/*.md")]
    assert len(pages) > 40 and not [
        f"{page.name}: {link}" for page in pages for link in moving.findall(page.read_text())
    ]


def test_every_link_of_a_learner_s_copies_leads_somewhere(tmp_path: Path) -> None:
    """In JupyterLab, whose root is the folder of the copies: `..` there leads nowhere else."""
    copy_docs(tmp_path)
    for kind, folder in (("lessons", tmp_path), ("solutions", tmp_path / "solutions")):
        copy_lessons(ROOT / kind, folder)
    texts = {page: page.read_text() for page in (tmp_path / "docs").glob("*.md")}
    named = {page: {line.lstrip("# ") for line in text.splitlines() if line[:1] == "#"} for page, text in texts.items()}
    for path in [*tmp_path.glob("*.ipynb"), *tmp_path.glob("solutions/*.ipynb")]:
        texts[path] = "\n".join(c.source for c in nbformat.read(path, 4).cells if c.cell_type == "markdown")
    seen, dead = 0, []
    for path, text in texts.items():
        for link in re.findall(
            r"\[[^\]]*\]\((?!https?:)([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        ):
            name, _, heading = link.partition("#")
            there = Path(os.path.normpath("/" / path.relative_to(tmp_path).parent / name).lstrip("/"))
            target = tmp_path / there if name else path
            ids = {text.replace("`", "").replace(" ", "-") for text in named.get(target, ())}
            if not target.is_file() or (heading and unquote(heading) not in ids):
                dead.append(f"{path.relative_to(tmp_path)}: {link}")
            seen += 1
    assert not dead and seen > 400
