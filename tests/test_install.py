"""Which torch `make` installs, from package indexes that are folders here: pip and the Makefile are the real ones."""

from __future__ import annotations

import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(not shutil.which("make"), reason="needs make"),
]

# A project that needs torch and builds itself without setuptools, which the indexes do not have.
PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "zerolab"
version = "0.1.0"
"""
BACKEND = """
import shutil

def build_editable(folder, config_settings=None, metadata_directory=None):
    return shutil.copy("zerolab-0.1.0-py3-none-any.whl", folder).rpartition("/")[2]
"""


def write_wheel(folder: Path, name: str, version: str, more: str = "") -> Path:
    """A wheel with nothing in it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{more}\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{about}/RECORD", "")
    return wheel


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def indexes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where two indexes are: /usual has torch 2.13.0 and a newer one, /cpu has both as local versions."""
    folder = tmp_path_factory.mktemp("indexes")
    for version in ("2.13.0", "2.14.0"):
        write_wheel(folder / "usual/torch", "torch", version)
        write_wheel(folder / "cpu/torch", "torch", f"{version}+cpu")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "backend.py").write_text(BACKEND)
    write_wheel(tmp_path, "zerolab", "0.1.0", "Requires-Dist: torch>=2.11")
    return tmp_path


def install(checkout: Path, usual: str, cpu: str, *arguments: str, path: str = "") -> tuple[str, str]:
    """The version of torch that is there after `make`, and what make said."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "MAKE", "TORCH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": usual, "NO_PROXY": "127.0.0.1"}
    env |= {"PATH": path + os.environ["PATH"]}
    variables = [f"PYTHON={sys.executable}", "VENV=venv", "EXTRAS=lab", f"CPU_WHEELS={cpu}"]
    command = ["make", "--no-print-directory", "venv/.installed", *variables, *arguments]
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    (found,) = (checkout / "venv").rglob("torch-*.dist-info")
    return found.name.removeprefix("torch-").removesuffix(".dist-info"), done.stdout


@pytest.mark.parametrize("wanted, version", [("cpu", "2.13.0+cpu"), ("cuda", "2.13.0")])
def test_the_variable_decides(wanted: str, version: str, checkout: Path, indexes: str) -> None:
    found, told = install(checkout, f"{indexes}/usual", f"{indexes}/cpu", f"TORCH={wanted}")
    assert found == version  # and not the newer one, which constraints.txt rules out
    assert f"(TORCH={wanted})" in told and "done" in told


def test_a_device_decides(checkout: Path, indexes: str) -> None:
    """Without one the CPU wheel is taken; `nvidia-smi` alone is sign enough of one."""
    if sys.platform == "linux" and not shutil.which("nvidia-smi") and not list(Path("/dev").glob("nvidia[0-9]*")):
        assert install(checkout, f"{indexes}/usual", f"{indexes}/cpu")[0] == "2.13.0+cpu"
        (checkout / "venv" / ".installed").unlink()
    tool = checkout / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    assert install(checkout, f"{indexes}/usual", f"{indexes}/cpu", path=f"{tool.parent}:")[0] == "2.13.0"


def test_an_index_that_is_silent_is_given_up(checkout: Path, indexes: str) -> None:
    """As where only the usual index can be reached: its torch is taken, and a line says so."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        found, told = install(checkout, f"{indexes}/usual", f"http://127.0.0.1:{silent.getsockname()[1]}", "TORCH=cpu")
    assert found == "2.13.0" and "does not answer: torch comes from the package index" in told


def test_pip_prefers_the_local_version(checkout: Path, indexes: str) -> None:
    """What environment.yml and the pages rely on: with both indexes, a constraint to 2.13.0 takes 2.13.0+cpu."""
    command = [sys.executable, "-m", "pip", "--isolated", "download", "--no-deps", "--dest", str(checkout / "got")]
    command += ["--index-url", f"{indexes}/usual", "--extra-index-url", f"{indexes}/cpu", "torch==2.13.0"]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    assert [wheel.name for wheel in (checkout / "got").iterdir()] == ["torch-2.13.0+cpu-py3-none-any.whl"]
