"""A lesson without a checkout: one notebook in an empty folder, and zerolab from its wheel or not there at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest
from jobs_common import ROOT
from ports import free_ports

from zerolab.lab import build
from zerolab.lab.__main__ import copy_notebooks

pytestmark = [pytest.mark.slow]

# What Colab's list of packages had in August 2026, for Python 3.13: github.com/googlecolab/backend-info.
# ONLY_OLD: what these versions need and newer ones do not.
COLAB = [
    "ipykernel==6.17.1",
    "ipython==7.34.0",
    "ipywidgets==7.7.1",
    "jupyter_client==7.4.9",
    "nest-asyncio==1.6.0",
    "psutil==5.9.5",
    "pyzmq==26.2.1",
    "rich==13.9.4",
    "tornado==6.5.7",
    "traitlets==5.7.1",
]
ONLY_OLD = [
    "backcall==0.2.0",
    "entrypoints==0.4",
    "ipython_genutils==0.2.0",
    "pickleshare==0.7.5",
]
NOBODY = 65534

# `ZEROLAB_ALONE=. pytest tests/lab/test_alone.py` runs every notebook; else one that writes many files.
CHOSEN = os.environ.get("ZEROLAB_ALONE", "lessons/11")
ALONE = [
    (path.parent.name, path.stem)
    for kind in ("lessons", "solutions")
    for path in sorted((ROOT / kind).glob("*.ipynb"))
    if re.match(CHOSEN, f"{kind}/{path.stem}")
]

RUN = """
import sys, nbformat
from nbclient import NotebookClient
from jupyter_client.kernelspec import KernelSpec

python, file = sys.argv[1:]
class Client(NotebookClient):
    def create_kernel_manager(self):
        manager = super().create_kernel_manager()
        command = [python, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        manager._kernel_spec = KernelSpec(argv=command, display_name="alone", language="python")
        return manager

ask = "import os, ipykernel, zerolab; print(os.getuid(), ipykernel.__version__, zerolab.__file__)"
notebook = nbformat.read(file, as_version=4)
notebook.cells.append(nbformat.v4.new_code_cell(ask, id="ask"))
try:
    Client(notebook, timeout=600, resources={"metadata": {"path": "."}}).execute()
finally:
    nbformat.write(notebook, file)
    print("the cell that installs:", [cell for cell in notebook.cells if cell.id == "install"][0].outputs)
"""


def packages_of(python: str | Path) -> Path:
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run([python, "-I", "-c", script], capture_output=True, text=True, check=True)
    return Path(done.stdout.strip())


def environment(folder: Path, *before: Path, base: str = sys.executable, like: str = sys.executable) -> Path:
    """The python of an environment that has what `like` has, but zerolab, and the folders `before` in front of it."""
    others = folder / "others"
    others.mkdir(parents=True)
    for entry in packages_of(like).iterdir():
        if not re.match(r"__editable__|__pycache__|zerolab|.*\.pth$", entry.name):
            (others / entry.name).symlink_to(entry)
    subprocess.run([base, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    own = packages_of(python)
    (own / "others.pth").write_text("".join(f"{path}\n" for path in [*before, others]))
    return python


def outside(home: Path) -> dict[str, str]:
    """The environment variables of someone who has no checkout, with a home of their own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JUPYTER", "ZEROLAB"))}
    return kept | {"HOME": str(home), "IPYTHONDIR": str(home / "ipython"), "TMPDIR": str(home)}


class Outside:
    """A place without a checkout, where lessons run one after the other, each alone in an empty folder.

    The first one finds no zerolab, and its first cell installs it: from the wheel, which is all that pip finds.
    """

    def __init__(self, folder: Path, release: Path, python: Path, user: int | None = None, **more: str) -> None:
        self.folder, self.python, self.user = folder, python, user
        self.wheel = next(release.glob("*.whl"))
        wheels = folder / "wheels"
        wheels.mkdir(mode=0o755)
        shutil.copy(self.wheel, wheels)
        self.more = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)} | more
        if user is not None:
            self.give(python.parents[1])
            for path in [folder, *folder.parents]:  # pytest's are closed to others
                if path.is_relative_to(tempfile.gettempdir()) and path != Path(tempfile.gettempdir()):
                    path.chmod(path.stat().st_mode | 0o011)

    def give(self, folder: Path) -> None:
        for path in [folder, *folder.rglob("*")]:
            os.chown(path, self.user, self.user, follow_symlinks=False)

    def run(self, kind: str, name: str) -> nbformat.NotebookNode:
        """The notebook as the wheel brings it, run from top to bottom; its user owns the folder and the kernel."""
        room = self.folder / f"{kind}-{name}"
        room.mkdir()
        with zipfile.ZipFile(self.wheel) as wheel:
            (room / f"{name}.ipynb").write_bytes(wheel.read(f"zerolab/course/{kind}/{name}.ipynb"))
        if self.user is not None:
            self.give(room)
        done = subprocess.run(
            [sys.executable if self.user is None else self.python, "-c", RUN, str(self.python), f"{name}.ipynb"],
            cwd=room,
            env=outside(room) | self.more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            user=self.user,
            group=self.user,
            extra_groups=None if self.user is None else [],
        )
        assert done.returncode == 0, done.stdout
        notebook = nbformat.read(room / f"{name}.ipynb", as_version=4)
        assert Path(told(notebook)[2]).is_relative_to(self.python.parents[1]), "another zerolab"
        return notebook


def told(notebook: nbformat.NotebookNode) -> list[str]:
    """The kernel's user, the version of ipykernel, and where zerolab was."""
    return "".join(build._text(output) for output in notebook.cells[-1].outputs).split()  # a stream may be cut


def check(notebook: nbformat.NotebookNode, kind: str, name: str) -> None:
    """Every cell ran; none failed but those that are meant to; a solution's checks say so."""
    printed = ""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.execution_count or not cell.source.strip(), f"not run: {cell.id}"
        for output in cell.get("outputs", []):
            failed = output.output_type == "error"
            assert not failed or "raises-exception" in cell.metadata.get("tags", []), output.get("traceback")
            printed += build._text(output)
    assert kind == "lessons" or not re.search(r"^[✗○] \d\d\.\d+ ", printed, re.MULTILINE), printed
    if name == "00_welcome":
        assert "I am rank 3 of 4" in printed
        assert "application/vnd.jupyter.widget-view+json" in nbformat.writes(notebook), "no explorer was shown"


def may(*command: object) -> bool:
    """Whether the other user can do that."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, user=NOBODY, group=NOBODY, extra_groups=[], stderr=subprocess.DEVNULL)
    except OSError:
        return False
    return done.returncode == 0


def another_users_python() -> tuple[str | None, str]:
    """A Python that another user may start, who can use what this one has; or None and what is missing."""
    if os.geteuid() != 0:
        return None, "needs root, to become another user"
    for path in (packages_of(sys.executable) / "torch", Path(tempfile.gettempdir())):
        if not may("ls", path):
            return None, f"needs what another user may read: {path} is closed to others"
    same = f"python3.{sys.version_info.minor}"
    for python in (sys.executable, f"/usr/bin/{same}", f"/usr/local/bin/{same}"):
        if may(python, "-c", "import venv"):
            return python, ""
    return None, f"needs a {same} that another user may start: {sys.executable} is closed to others"


def install_what_colab_has(folder: Path) -> str:
    """What is missing for that, or nothing."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    needs = f"needs {COLAB[0]} and others from a package index"
    try:
        done = subprocess.run(
            [*install, *COLAB, *ONLY_OLD], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90
        )
    except subprocess.TimeoutExpired:
        return f"{needs}, which does not answer"
    return f"{needs}: {done.stdout.strip().splitlines()[-1]}" if done.returncode else ""


class Found(NamedTuple):
    outside: Outside
    no_user: str  # what is missing for another user
    no_colab: str  # what is missing for what Colab has


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, release: Path) -> Found:
    """As another user, and with Colab's older packages, where both can be had; else with what can be had."""
    folder = tmp_path_factory.mktemp("alone")
    base, no_user = another_users_python()
    no_colab = install_what_colab_has(folder / "colab")
    before = [] if no_colab else [folder / "colab"]
    python = environment(folder / "env", *before, base=base or sys.executable)
    # PIP_NO_DEPS: all that zerolab needs is there, but not all that these old versions do. MPLBACKEND: as there.
    more = {} if no_colab else {"PIP_NO_DEPS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    return Found(Outside(folder, release, python, NOBODY if base else None, **more), no_user, no_colab)


@pytest.fixture(scope="module")
def welcome(found: Found) -> nbformat.NotebookNode:
    return found.outside.run("lessons", "00_welcome")


@pytest.mark.exhaustive
def test_a_lesson_alone(welcome: nbformat.NotebookNode) -> None:
    check(welcome, "lessons", "00_welcome")


@pytest.mark.exhaustive
def test_it_was_another_user(found: Found, welcome: nbformat.NotebookNode) -> None:
    if found.no_user:
        pytest.skip(found.no_user)
    assert told(welcome)[0] == str(NOBODY)


@pytest.mark.exhaustive
def test_it_had_the_packages_of_colab(found: Found, welcome: nbformat.NotebookNode) -> None:
    """Its older ipykernel and jupyter_client, and its older widgets."""
    if found.no_colab:
        pytest.skip(found.no_colab)
    assert told(welcome)[1] == COLAB[0].partition("==")[2]


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind,name", ALONE)
def test_other_lessons_alone(kind: str, name: str, found: Found) -> None:
    check(found.outside.run(kind, name), kind, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["python3.12", "python3.13"])
def test_a_lesson_alone_on_another_python(name: str, tmp_path: Path, release: Path) -> None:
    found = shutil.which(name)
    if found is None or Path(found).resolve() == Path(sys.executable).resolve():
        pytest.skip(f"needs {name}")
    if subprocess.run(
        [found, "-c", "import torch, safetensors, ipykernel, jupyterlab, sklearn"], stderr=subprocess.DEVNULL
    ).returncode:
        pytest.skip(f"needs torch and the extra lab in {name}")
    outside = Outside(tmp_path, release, environment(tmp_path / "env", base=found, like=found))
    for kind, lesson in [("lessons", "00_welcome"), *ALONE]:
        check(outside.run(kind, lesson), kind, lesson)


@pytest.mark.exhaustive
def test_zerolab_lab_without_a_checkout(tmp_path: Path, release: Path) -> None:
    python = environment(tmp_path / "env")
    env = outside(tmp_path) | {"JUPYTERLAB_DIR": f"{sysconfig.get_path('data')}/share/jupyter/lab"}
    wheel = next(release.glob("*.whl"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", f"{wheel}[lab]"]
    subprocess.run(install, env=env, check=True, timeout=6000)
    (port,) = free_ports(1)
    room = tmp_path / "room"
    room.mkdir()
    command = [python.parent / "zerolab", "lab", "--no-browser", "--port", str(port)]
    with (tmp_path / "log").open("w+") as log:
        lab = subprocess.Popen(command, cwd=room, env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 600
            while not (found := re.search(r"/lab/tree/(\S+)\?token=", (tmp_path / "log").read_text())):
                assert lab.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
                time.sleep(0.1)
        finally:
            lab.terminate()
            lab.wait(20)
    assert found[1] == "00_welcome.ipynb"
    for kind, copies in (("lessons", room / "work"), ("solutions", room / "work" / "solutions")):
        assert [path.name for path in sorted(copies.glob("*.ipynb"))] == sorted(
            path.name for path in (ROOT / kind).glob("*.ipynb")
        )


def test_copies_leave_out_the_cell_that_installs(tmp_path: Path) -> None:
    notebook = build.notebooks(ROOT / "solutions" / "00_welcome.py")["lessons"]
    given = {"00_welcome.ipynb": nbformat.writes(notebook).encode()}
    for _ in range(2):
        assert copy_notebooks(given, tmp_path) == []
    (kept,) = [path for path in tmp_path.glob("*.ipynb")]
    cells = json.loads(kept.read_text())["cells"]
    assert [cell["id"] for cell in cells] == [cell.id for cell in notebook.cells if cell.id != "install"]
    assert kept.read_text() == nbformat.writes(nbformat.read(kept, as_version=4)) + "\n"  # only the cell is gone


def test_notebooks_need_no_more_than_the_wheel(release: Path) -> None:
    with zipfile.ZipFile(next(release.glob("*.whl"))) as wheel:
        inside = set(wheel.namelist())
    for path in sorted([*ROOT.glob("lessons/*.ipynb"), *ROOT.glob("solutions/*.ipynb")]):
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        assert cells[0].id == "install", path
        for source in (cell.source for cell in cells):
            beside = re.search(r"""["']\.\./|["'](docs|lessons|solutions|tests)/|zerolab\.__file__""", source)
            assert not beside, f"{path}: a notebook alone in its folder does not have that:\n{source}"
            for module in re.findall(r"^ *(?:from|import) (zerolab[\w.]*)", source, re.MULTILINE):
                file = module.replace(".", "/")
                assert {f"{file}.py", f"{file}/__init__.py"} & inside, f"{path}: {module}"
            for package, name in re.findall(r"""files\(["']([\w.]+)["']\) / ["']([^"']+)""", source):
                assert f"{package.replace('.', '/')}/{name}" in inside, f"{path}: {name}"
