"""A lesson without a checkout: one notebook in an empty folder, and zerolab from its wheel or not there at all."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import nbformat
import pytest
from jobs_common import ROOT

from zerolab.lab import build
from zerolab.lab.__main__ import copy_notebooks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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

notebook = nbformat.read(file, as_version=4)
try:
    Client(notebook, timeout=200, resources={"metadata": {"path": "."}}).execute()
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


def run_alone(tmp_path: Path, release: Path, python: Path, user: int | None, **more: str) -> nbformat.NotebookNode:
    """Lesson 00 from its source, alone in a folder, run from top to bottom. `user` owns the folder and the kernel."""
    room = tmp_path / "room"
    room.mkdir()
    notebook = build.notebooks(ROOT / "solutions" / "00_welcome.py")["lessons"]
    nbformat.write(notebook, room / "00_welcome.ipynb")
    wheels = tmp_path / "wheels"
    wheels.mkdir(mode=0o755)
    shutil.copy(next(release.glob("*.whl")), wheels)
    # Wheels are installed where the environment is, which is the kernel's own, as on Colab.
    env = outside(room) | {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)} | more
    if user is not None:
        for folder in [room, python.parents[1]]:
            for path in [folder, *folder.rglob("*")]:
                os.chown(path, user, user, follow_symlinks=False)
        for folder in [tmp_path, *tmp_path.parents]:  # pytest's are closed to others
            if folder.is_relative_to(tempfile.gettempdir()) and folder != Path(tempfile.gettempdir()):
                folder.chmod(folder.stat().st_mode | 0o011)
    done = subprocess.run(
        [sys.executable if user is None else python, "-c", RUN, str(python), "00_welcome.ipynb"],
        cwd=room,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
    assert done.returncode == 0, done.stdout
    return nbformat.read(room / "00_welcome.ipynb", as_version=4)


def check(notebook: nbformat.NotebookNode) -> None:
    """Every cell ran; none failed but those that are meant to; the ranks are four processes, and have talked."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            failed = output.output_type == "error"
            assert not failed or "raises-exception" in cell.metadata.get("tags", []), output.get("traceback")
    printed = "".join(build._text(output) for cell in notebook.cells for output in cell.get("outputs", []))
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


def test_a_lesson_alone_as_another_user(tmp_path: Path, release: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become another user")
    same = f"python3.{sys.version_info.minor}"
    closed = [
        path for path in (packages_of(sys.executable) / "torch", Path(tempfile.gettempdir())) if not may("ls", path)
    ]
    if closed:
        pytest.skip(f"needs what another user may read: {closed[0]} is closed to others")
    pythons = (sys.executable, f"/usr/bin/{same}", f"/usr/local/bin/{same}")
    base = next((python for python in pythons if may(python, "-c", "import venv")), None)
    if base is None:
        pytest.skip(f"needs a {same} that another user may start: {sys.executable} is closed to others")
    check(run_alone(tmp_path, release, environment(tmp_path / "env", base=base), NOBODY))


def test_a_lesson_alone_with_the_packages_of_colab(tmp_path: Path, release: Path) -> None:
    """Its older ipykernel and jupyter_client, and its older widgets. There everything runs as root, as in CI."""
    colab = tmp_path / "colab"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(colab),
        *COLAB,
        *ONLY_OLD,
    ]
    needs = f"needs {COLAB[0]} and others from a package index"
    try:
        done = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=90)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{needs}, which does not answer")
    if done.returncode:
        pytest.skip(f"{needs}: {done.stdout.strip().splitlines()[-1]}")
    python = environment(tmp_path / "env", colab)
    # PIP_NO_DEPS: all that zerolab needs is there, but not all that these old versions do. MPLBACKEND: as there.
    more = {"PIP_NO_DEPS": "1", "MPLBACKEND": "module://matplotlib_inline.backend_inline"}
    check(run_alone(tmp_path, release, python, None, **more))


@pytest.mark.parametrize("name", ["python3.12", "python3.13"])
def test_a_lesson_alone_on_another_python(name: str, tmp_path: Path, release: Path) -> None:
    found = shutil.which(name)
    if found is None or Path(found).resolve() == Path(sys.executable).resolve():
        pytest.skip(f"needs {name}")
    if subprocess.run(
        [found, "-c", "import torch, safetensors, ipykernel, jupyterlab, sklearn"], stderr=subprocess.DEVNULL
    ).returncode:
        pytest.skip(f"needs torch and the extra lab in {name}")
    check(run_alone(tmp_path, release, environment(tmp_path / "env", base=found, like=found), None))


def test_zerolab_lab_without_a_checkout(tmp_path: Path, release: Path) -> None:
    python = environment(tmp_path / "env")
    env = outside(tmp_path) | {"JUPYTERLAB_DIR": f"{sysconfig.get_path('data')}/share/jupyter/lab"}
    wheel = next(release.glob("*.whl"))
    install = [python, "-m", "pip", "install", "--quiet", "--no-index", f"{wheel}[lab]"]
    subprocess.run(install, env=env, check=True, timeout=60)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    room = tmp_path / "room"
    room.mkdir()
    command = [python.parent / "zerolab", "lab", "--no-browser", "--port", str(port)]
    with (tmp_path / "log").open("w+") as log:
        lab = subprocess.Popen(command, cwd=room, env=env, stdout=log, stderr=log)
        try:
            deadline = time.monotonic() + 120
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


def test_lessons_name_no_file_beside_them() -> None:
    """What a notebook alone in its folder does not have."""
    for lesson in sorted((ROOT / "lessons").glob("*.ipynb")):
        for cell in nbformat.read(lesson, as_version=4).cells:
            if cell.cell_type == "code":
                assert not re.search(r"""["']\.\./|["'](docs|lessons|solutions|tests)/""", cell.source), cell.source
