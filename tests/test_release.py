"""Where zerolab is, and how one gets it: addresses, the cell that installs, and what a release needs."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import nbformat
import pytest
import yaml
from jobs_common import ROOT, copy_checkout
from lab.test_alone import environment, outside

import zerolab
from zerolab.lab import build

ON_GITHUB, SITE = "https://github.com/someone/zerolab", "https://someone.github.io/zerolab"
WHEEL = f"zerolab-{zerolab.__version__}-py3-none-any.whl"


def program(path: str, root: Path = ROOT) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, root / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_it(checkout: Path, repository: str = ON_GITHUB, site: str = SITE) -> None:
    """As a maintainer does, in pyproject.toml."""
    settings = checkout / "pyproject.toml"
    text = re.sub(r"^# Repository = .*", f'Repository = "{repository}"', settings.read_text(), flags=re.MULTILINE)
    settings.write_text(re.sub(r"^# Documentation = .*", f'Documentation = "{site}"', text, flags=re.MULTILINE))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    return folder


# ---------------------------------------------------------------------- addresses


def test_addresses_are_as_the_setting_says():
    done = subprocess.run([sys.executable, "docs/site/address.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_one_setting_and_everything_follows(checkout, tmp_path):
    """README's clone and badges, CITATION.cff, what docs/tested.md says, the cell; and all is back without it."""
    files = ("README.md", "CITATION.cff", "docs/tested.md")
    before = {name: (checkout / name).read_text() for name in files}
    plain = (checkout / "pyproject.toml").read_text()
    command = [sys.executable, str(checkout / "docs/site/address.py")]
    assert "This copy of zerolab knows of no repository and no website" in before["docs/tested.md"]
    name_it(checkout)
    try:
        assert subprocess.run([*command, "--check"], stdout=subprocess.PIPE).returncode == 1
        subprocess.run(command, check=True)
        subprocess.run([*command, "--check"], check=True)
        readme, citation, tested = ((checkout / name).read_text() for name in files)
        assert f"git clone {ON_GITHUB} zerolab && cd zerolab" in readme and "<this repository>" not in readme
        lesson = "someone/zerolab/blob/main/lessons/00_welcome.ipynb"
        assert f"[colab]: https://colab.research.google.com/github/{lesson}" in readme
        assert f"[kaggle]: https://kaggle.com/kernels/welcome?src=https://github.com/{lesson}" in readme
        assert readme.splitlines()[2].count("[![Open in ") == 2
        assert len(readme.splitlines()) <= 120 and max(map(len, readme.splitlines())) <= 120
        cited = yaml.safe_load(citation)
        assert (cited["repository-code"], cited["url"], cited["version"]) == (ON_GITHUB, SITE, zerolab.__version__)
        assert tested.index(f"the wheel of the website, {SITE}") < tested.index(f"repository, {ON_GITHUB}")
        cell = build.installs(checkout)
        version = zerolab.__version__
        tried = re.findall(r'^        "(.*)",$', cell, re.MULTILINE)
        assert tried == [f"zerolab[lab] @ git+{ON_GITHUB}@v{version}", f"zerolab[lab]=={version}"]
    finally:
        (checkout / "pyproject.toml").write_text(plain)
    subprocess.run(command, check=True)
    assert {name: (checkout / name).read_text() for name in files} == before


# ---------------------------------------------------------------------- the cell that installs


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path, release: Path) -> Iterator[tuple[str, Path]]:
    """A website on this machine with the wheel beside its pages; its address and its folder."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(release / WHEEL, folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", folder
    server.shutdown()
    server.server_close()


def commit(folder: Path, tag: str) -> None:
    """All that there is, into a repository of its own."""
    someone = ["-c", "user.name=someone", "-c", "user.email=someone@example.org"]
    for words in (["init", "-q"], ["add", "-A"], [*someone, "commit", "-qm", "all"], ["tag", tag] if tag else []):
        if words:
            subprocess.run(["git", *words], cwd=folder, check=True)


def install(cell: str, folder: Path, **more: str) -> tuple[int, str, list[str]]:
    """Run it where zerolab is missing: the exit status, what it printed, and where pip says that zerolab came from."""
    python = environment(folder / "env")
    # All that zerolab needs is there. Without isolation, setuptools too: no index is asked for it.
    env = outside(folder) | {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"} | more
    done = subprocess.run([python, "-c", cell], env=env, cwd=folder, capture_output=True, text=True, timeout=600)
    records = (folder / "env").rglob("zerolab-*.dist-info/direct_url.json")
    return done.returncode, done.stdout + done.stderr, [json.loads(path.read_text())["url"] for path in records]


@pytest.mark.exhaustive
def test_the_website_comes_first(served, checkout, tmp_path):
    """The notebook is the site's own copy, as build.py writes it."""
    home, _ = served
    origin = ROOT / "lessons" / "00_welcome.ipynb"
    code = f"""
import pathlib, build
site = build.Site(pathlib.Path({str(tmp_path)!r}), "", {f"{home}/{WHEEL}"!r})
print(site.copy(pathlib.Path({str(origin)!r})))
"""
    env = os.environ | {"PYTHONPATH": str(ROOT / "docs" / "site")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    copy = nbformat.read(tmp_path / done.stdout.strip(), as_version=4)
    stored = nbformat.read(origin, as_version=4)
    changed = [(new, old) for new, old in zip(copy.cells, stored.cells, strict=True) if new != old]
    ((new, _),) = changed
    assert new.id == "install"
    status, said, urls = install(new.source, tmp_path)
    assert (status, urls) == (0, [f"{home}/{WHEEL}"]), said
    assert said == f"zerolab[lab] @ {home}/{WHEEL}: installing it ... done\n"


@pytest.mark.exhaustive
def test_then_the_repository_at_its_tag(checkout, tmp_path):
    """git clones from a folder here, which it is told to take for the address on GitHub."""
    repository = tmp_path / "repository"
    shutil.copytree(checkout, repository)
    commit(repository, f"v{zerolab.__version__}")
    (repository / "setup.py").write_text("raise SystemExit('what comes after the tag is not for this notebook')")
    commit(repository, "")
    name_it(repository, site="")
    here = {"GIT_CONFIG_KEY_0": f"url.file://{repository}.insteadOf", "GIT_CONFIG_VALUE_0": ON_GITHUB}
    status, said, urls = install(build.installs(repository), tmp_path, GIT_CONFIG_COUNT="1", **here)
    assert (status, urls) == (0, [ON_GITHUB]), said
    assert said == f"zerolab[lab] @ git+{ON_GITHUB}@v{zerolab.__version__}: installing it ... done\n"


@pytest.mark.exhaustive
def test_then_the_index(release, tmp_path):
    """What is not there is said, in pip's words, and the next place is tried."""
    (tmp_path / "pyproject.toml").write_text(f'[project.urls]\nRepository = "file://{tmp_path}/nowhere"\n')
    status, said, _ = install(build.installs(tmp_path), tmp_path, PIP_FIND_LINKS=str(release))
    first, second = said.splitlines()
    assert status == 0 and "nowhere" in first and not first.endswith("done")
    assert second == f"zerolab[lab]=={zerolab.__version__}: installing it ... done"


@pytest.mark.exhaustive
def test_nowhere(tmp_path):
    status, said, _ = install(build.installs(tmp_path), tmp_path)
    assert status == 1
    assert "No matching distribution found for zerolab" in said
    assert said.splitlines()[-1].startswith("ModuleNotFoundError: zerolab could not be installed. From a copy of its ")


def test_where_it_is_nothing_is_done(capsys):
    exec(build.installs(ROOT), {})
    assert capsys.readouterr().out == ""


# ---------------------------------------------------------------------- a release


def test_the_version_is_in_one_place():
    """pyproject.toml takes it from the package, and CITATION.cff is written from it (above)."""
    assert program(".ci/release.py").version() == zerolab.__version__
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert settings["project"]["dynamic"] == ["version"]
    assert settings["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zerolab.__version__"}


DAY = "## 0.1.0, 2026-11-01\n"


@pytest.mark.parametrize(
    "version, changes, lacks",
    [
        ("0.1.0", DAY, ""),
        ("0.1.0", "## 0.1.0 (not released)\n", "CHANGELOG.md: the section 0.1.0 must have its day"),
        ("0.1.0", "## 0.1.0, 2999-11-01\n", "CHANGELOG.md: the section 0.1.0 must have its day"),
        ("0.2.0", DAY, "CHANGELOG.md has no section '## 0.2.0"),
        ("0.2", "## 0.2, 2026-11-01\n", "zerolab.__version__ is '0.2', and must look like 1.2.3"),
    ],
)
def test_what_a_release_lacks(version, changes, lacks, tmp_path):
    missing = functools.partial(program(".ci/release.py").missing, root=tmp_path, programs=())
    (tmp_path / "CHANGELOG.md").write_text(changes)
    commit(tmp_path, f"v{version}")
    found = missing(version)
    assert len(found) == bool(lacks) and all(line.startswith(lacks) for line in found), found
    (tmp_path / "CHANGELOG.md").write_text(changes + "More.\n")
    assert any(line.startswith("not committed:\nM CHANGELOG.md") for line in missing(version))
    commit(tmp_path, "")
    assert f"the tag v{version} is of another commit: a release needs a new version" in missing(version)


@pytest.mark.exhaustive
def test_a_release_of_what_there_is(checkout, tmp_path):
    """All pages of the repository are as their sources say; what else is missing is said, and then nothing is built."""
    copy = tmp_path / "repository"
    shutil.copytree(checkout, copy)
    (copy / "CHANGELOG.md").write_text(f"## {zerolab.__version__} (not released)\n")
    commit(copy, "")
    done = subprocess.run([sys.executable, ".ci/release.py"], cwd=copy, stdout=subprocess.PIPE, text=True, timeout=600)
    title, lacks, end = done.stdout.splitlines()
    assert (done.returncode, title, end) == (1, f"zerolab {zerolab.__version__}", "Nothing was built.")
    assert lacks.startswith(f"- CHANGELOG.md: the section {zerolab.__version__} must have its day")
    assert not (copy / "dist").exists()
