"""The package as a whole: its environments, its wheel, and which way its imports point."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zerolab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def run(*command: str | Path, cwd: Path = ROOT, **kwargs) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=110, **kwargs
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


# --- environments: pyproject.toml, constraints.txt and environment.yml agree ---


def constraint_lines() -> list[str]:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines())
    return [line for line in lines if line]


def pins() -> dict[str, Version]:
    return {canonicalize_name(name): Version(v) for name, v in (x.split("==") for x in constraint_lines())}


def test_constraints_are_exact_pins():
    lines = constraint_lines()
    for line in lines:
        requirement = Requirement(line)
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[^*,;\s]+", line), f"not an exact pin: {line}"
        assert not Version(str(requirement.specifier)[2:]).local, f"a local version is one index's own: {line}"
        assert not re.match(r"(cuda|nvidia|triton)", line), f"torch's CUDA build brings its own: {line}"
    assert len(pins()) == len(lines), "a package is pinned twice"
    assert pins()["torch"] == Version("2.13.0")


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["test"]])
def test_every_requirement_is_pinned(line):
    requirement = Requirement(line)
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned, f"constraints.txt does not pin {requirement.name}"
    assert pinned in requirement.specifier, f"pinned {requirement.name}=={pinned}, wanted {line}"


def test_package_itself_needs_little():
    assert PROJECT["dependencies"] == ["torch>=2.11", "safetensors"]


def test_conda_environment():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PROJECT["name"]
    (pip,) = (d["pip"] for d in environment["dependencies"] if isinstance(d, dict))
    specs = {r.name: r.specifier for r in map(Requirement, environment["dependencies"][:-1])}
    assert set(specs) == {"python", "pip"}
    oldest = Version(re.search(r">=([\d.]+)", str(specs["python"]))[1])
    assert oldest in SpecifierSet(PROJECT["requires-python"])

    options = dict(line.split(maxsplit=1) for line in pip)
    assert set(options) == {"-c", "-e"} and len(pip) == 2
    assert (ROOT / options["-c"]).samefile(ROOT / "constraints.txt")
    extras = re.fullmatch(r"\.\[([a-z,]+)\]", options["-e"])[1].split(",")
    assert extras == ["lab", "test"] and set(extras) <= set(EXTRAS)


# --- the wheel ---


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy: a build/ left in the checkout would leak deleted modules into the wheel."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        shutil.copy(ROOT / name, source)
    shutil.copytree(PACKAGE, source / "zerolab", ignore=shutil.ignore_patterns("__pycache__"))
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", cwd=source)
    (built,) = source.glob("dist/*.whl")
    return built


def test_wheel_holds_the_whole_package(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert modules - inside == set(), "left out of the wheel: a folder without __init__.py?"
    assert inside - modules >= {"zerolab/py.typed", "zerolab/lab/slurm/srun.sbatch"}
    assert {name.partition("/")[0] for name in inside} == {"zerolab"}


def runtime_distributions() -> set[str]:
    """torch, safetensors and what they need themselves, here and now."""
    found, todo = set(), [Requirement(line).name for line in PROJECT["dependencies"]]
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or [])
            todo += [r.name for r in needs if not r.marker or r.marker.evaluate({"extra": ""})]
    return found


def test_wheel_imports_with_torch_and_safetensors_only(wheel, tmp_path):
    site, needs = tmp_path / "site", tmp_path / "needs"
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
    needs.mkdir()
    for name in runtime_distributions():
        distribution = metadata.distribution(name)
        for top in {Path(file).parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (needs / top).exists():
                (needs / top).symlink_to(distribution.locate_file(top))

    # -S leaves out this environment's site-packages, -I PYTHONPATH and the working directory.
    program = f"""
import sys
sys.path += [{str(site)!r}, {str(needs)!r}]
import zerolab
print(zerolab.__file__)
"""
    printed = run(sys.executable, "-I", "-S", "-c", program, cwd=tmp_path).splitlines()
    assert Path(printed[-1]) == site / "zerolab" / "__init__.py"


# --- imports point one way: lab -> measure -> the engine ---


def imported_modules(path: Path) -> Iterator[str]:
    """Absolute names of everything that a file imports, wherever in the file it does."""
    package = ".".join(path.relative_to(ROOT).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package itself, each further dot its parent
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def forbidden_imports(path: Path) -> list[str]:
    """What a file imports from a room above its own; cli.py and train.py are the top and may import anything."""
    room = path.relative_to(PACKAGE).parts[0]
    upper = ["zerolab.lab", "zerolab.apps", "zerolab.classroom"]
    rooms_above = {key: [] for key in ["cli.py", "train.py", "classroom", "apps", "lab"]} | {"measure": upper}
    above = rooms_above.get(room, ["zerolab.measure", *upper])
    return [name for name in imported_modules(path) if any(f"{name}.".startswith(f"{a}.") for a in above)]


def test_imports_point_one_way():
    found = {str(path.relative_to(ROOT)): forbidden_imports(path) for path in PACKAGE.rglob("*.py")}
    assert found and not {path: names for path, names in found.items() if names}


@pytest.mark.parametrize(
    "room, line, allowed",
    [
        ("unit.py", "from .comm import Comm", True),
        ("unit.py", "from . import measure", False),
        ("unit.py", "def f():\n    from zerolab.lab.plots import bars", False),
        ("unit.py", "import zerolab.measure.ledger as ledger", False),
        ("unit.py", "from .measures import x", True),
        ("measure/memory.py", "from ..unit import Unit", True),
        ("measure/memory.py", "from .. import lab", False),
        ("measure/memory.py", "from .lab import x", True),
        ("lab/plots.py", "from ..measure import ledger", True),
        ("cli.py", "from .lab import plots", True),
    ],
)
def test_the_import_check_sees_them_all(room, line, allowed, tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "PACKAGE", tmp_path / "zerolab")
    path = tmp_path / "zerolab" / room
    path.parent.mkdir(parents=True)
    path.write_text(line)
    assert (forbidden_imports(path) == []) == allowed


# --- the files ---


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs the git checkout")
def test_no_file_names_a_machine_or_a_registry():
    machine = re.compile(r"(?<![\w.~*$}-])/(work|root|home)/")
    registry = re.compile(r"\b(pypi|pythonhosted|download\.pytorch|anaconda|npmjs)\.org\b")
    found = []
    for name in run("git", "ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue  # deleted but not yet committed, or binary
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if machine.search(line) or registry.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_ci_runs_make_test():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_gpu_tests_need_torch_and_pytest_only():
    """`make gpu` builds nothing: a machine with a GPU may have no more than these, and no network."""
    files = [path for path in (ROOT / "tests").rglob("test_*.py") if re.search(r"(mark\.|@)gpu\b", path.read_text())]
    extras = [Requirement(line).name for lines in EXTRAS.values() for line in lines]
    missing = {name.replace("-", "_").lower() for name in extras} - {"pytest", "zerolab"} | {"safetensors", "psutil"}
    program = f"""
import sys
sys.modules.update(dict.fromkeys({sorted(missing)}))
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-W", "ignore::pytest.PytestConfigWarning", "-m", "gpu", *sys.argv[1:]]))
"""
    alone = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert "test_gpu.py::" in run(sys.executable, "-c", program, *files, env=alone)
