"""The package as a whole: its environments, its wheel, and which way its imports point."""

import ast
import email
import graphlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TypeGuard

import pytest
import yaml
from jobs_common import copy_checkout
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

import zerolab

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "zerolab"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def run(*command: str | Path, cwd: Path = ROOT, **kwargs) -> str:
    done = subprocess.run(
        command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, **kwargs
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


@pytest.mark.parametrize("line", [*PROJECT["dependencies"], *EXTRAS["lab"], *EXTRAS["test"], *EXTRAS["site"]])
def test_every_requirement_is_pinned(line):
    requirement = Requirement(line)
    pinned = pins().get(canonicalize_name(requirement.name))
    assert pinned, f"constraints.txt does not pin {requirement.name}"
    assert pinned in requirement.specifier, f"pinned {requirement.name}=={pinned}, wanted {line}"


def test_what_is_pinned_runs_on_the_oldest_python_that_is_promised():
    """Debian 12 has 3.11.2, and a pin that wanted 3.11.5 ended `make lab` there."""
    oldest, looked = PROJECT["requires-python"].removeprefix(">=") + ".0", 0
    for name, version in pins().items():
        with suppress(metadata.PackageNotFoundError):  # of an extra that is not installed
            installed = metadata.distribution(name)
            wants = SpecifierSet(installed.metadata["Requires-Python"] or "")
            assert Version(installed.version) != version or oldest in wants, f"{name}=={version} wants Python {wants}"
            looked += 1
    assert looked > 100


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
def wheel(release) -> Path:
    (built,) = release.glob("*.whl")
    return built


def course() -> set[str]:
    patterns = ("lessons/*.ipynb", "solutions/*.ipynb", "docs/*.md", "docs/*.png")
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern)}


@pytest.mark.exhaustive
def test_what_an_earlier_build_left_is_not_built_again(tmp_path):
    copy_checkout(tmp_path)
    left = tmp_path / "build/lib/zerolab/lab/gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    run(sys.executable, "setup.py", "-q", "build_py", cwd=tmp_path)
    assert (left.parent / "build.py").is_file() and not left.exists()


@pytest.mark.slow
def test_wheel_holds_the_whole_package(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {str(path.relative_to(ROOT)) for path in PACKAGE.rglob("*.py")}
    assert modules - inside == set(), "left out of the wheel: a folder without __init__.py?"
    assert inside - modules >= {"zerolab/py.typed", "zerolab/lab/slurm/srun.sbatch", "zerolab/measure/table1.json"}
    assert {name for name in inside if "/course/" in name} == {f"zerolab/course/{name}" for name in course()}
    assert {name.partition("/")[0] for name in inside} == {"zerolab", "zerolab_command.py"}


@pytest.mark.slow
def test_wheel_says_what_it_is(wheel):
    with zipfile.ZipFile(wheel) as file:
        (folder,) = {name.partition("/")[0] for name in file.namelist() if ".dist-info/" in name}
        told = email.message_from_string(file.read(f"{folder}/METADATA").decode())
        assert file.read(f"{folder}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert (told["License-Expression"], told["License-File"]) == ("MIT", "LICENSE")
    assert (told["Requires-Python"], told["Version"]) == (PROJECT["requires-python"], zerolab.__version__)
    assert told["Description-Content-Type"] == "text/markdown"
    assert told.get_payload().strip() == (ROOT / "README.md").read_text().strip()
    assert set(told.get_all("Provides-Extra")) == set(EXTRAS)


def test_source_distribution_holds_what_git_has(release):
    (built,) = release.glob("*.tar.gz")
    with tarfile.open(built) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    ours = {name for name in run("git", "ls-files", "-z").split("\0") if name and (ROOT / name).is_file()}
    assert {name for name in ours - inside if not name.startswith(".")} == set()


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


@pytest.mark.slow
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


# --- imports point one way, and in no circle ---

LEVELS = (  # lowest first; a file may import from its own level and from lower ones
    {"comm", "world", "tasks"},
    {"engine", "checkpoint"},
    {"__init__.py", "ddp.py", "zero1.py", "zero2.py", "zero3.py"},  # the ladder
    {"measure", "integrations"},
    {"trial"},
    {"lab"},
    {"apps"},
    {"classroom"},
    {"cli.py", "train.py", "__main__.py"},
)
LEVEL = {room: number for number, rooms in enumerate(LEVELS) for room in rooms}


def modules() -> dict[str, Path]:
    """Every file of the package, by the name under which it is imported."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def is_our_name(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("zerolab.")


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imported_names(path: Path, annotations: bool = False) -> Iterator[str]:
    """Absolute names of everything that a file imports, wherever in the file; for annotations alone only if asked.

    So are strings where `import_module` takes them, and in an `__init__.py`, which may look its names up when they are
    used. `from a import b` is `a.b`; `imported_modules` makes it `a` where `a` defines b.
    """
    package = path.relative_to(ROOT).parent.parts
    todo: list[ast.AST] = [ast.parse(path.read_text(), str(path))]
    while todo:
        node = todo.pop()
        todo += node.orelse if only_for_types(node) and not annotations else ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # one dot is the package itself, each further dot its parent
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args if is_our_name(argument))
        elif path.name == "__init__.py" and is_our_name(node):
            yield node.value


def imported_modules(name: str, files: dict[str, Path], annotations: bool = False) -> set[str]:
    """The package's files that the file `name` imports."""
    found = set()
    for imported in imported_names(files[name], annotations):
        while imported and imported not in files:  # a class or a function: the file that defines it
            imported = imported.rpartition(".")[0]
        found.add(imported)
    return found - {"", name}


def forbidden_imports() -> list[str]:
    """A line for every import from a level above the file's own. A room without a level raises KeyError."""
    files = modules()
    level = {name: LEVEL[path.relative_to(PACKAGE).parts[0]] for name, path in files.items()}
    return [
        f"{name} imports {imported}"
        for name in sorted(files)
        for imported in sorted(imported_modules(name, files))
        if level[imported] > level[name]
    ]


def import_circle(room: str = "", annotations: bool = False) -> list[str]:
    """The names in a circle of imports between the files of `room`; [] if there is none."""
    files = {name: path for name, path in modules().items() if f"zerolab/{room}" in path.as_posix()}
    try:
        graphlib.TopologicalSorter({name: imported_modules(name, files, annotations) for name in files}).prepare()
    except graphlib.CycleError as circle:
        return circle.args[1]
    return []


def test_imports_point_one_way():
    assert len(modules()) > 50
    assert forbidden_imports() == []


def test_no_import_goes_in_a_circle():
    assert import_circle() == []


def test_the_engine_has_no_circle_even_for_annotations():
    assert import_circle("engine/", annotations=True) == []


def write_package(folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """A package with these files, and a few empty ones, in place of ours."""
    monkeypatch.setitem(globals(), "ROOT", folder)
    monkeypatch.setitem(globals(), "PACKAGE", folder / "zerolab")
    others = ("__init__.py", "cli.py", "comm/__init__.py", "comm/recording.py", "engine/unit.py", "measure/__init__.py")
    more = ("measure/ledger.py", "lab/__init__.py", "lab/plots/__init__.py", "apps/demo.py", "apps/bench.py")
    for name, text in dict.fromkeys([*others, *more], "").items() | files.items():
        path = folder / "zerolab" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text or not path.exists():
            path.write_text(text)


@pytest.mark.parametrize(
    "room, line, allowed",
    [
        ("engine/unit.py", "from ..comm.record import Comm", True),
        ("engine/unit.py", "from .. import measure", False),
        ("engine/unit.py", "from zerolab import Engine", False),
        ("engine/unit.py", "def f():\n    from zerolab.lab.plots import bars", False),
        ("engine/unit.py", "import zerolab.measure.ledger as ledger", False),
        ("engine/unit.py", "from zerolab.comm.measures import x", True),
        ("engine/unit.py", "if TYPE_CHECKING:\n    from zerolab.measure.ledger import Ledger", True),
        ("engine/unit.py", "if TYPE_CHECKING:\n    pass\nelse:\n    from zerolab.measure import ledger", False),
        ("engine/unit.py", "import_module('zerolab.measure.ledger')", False),
        ("comm/recording.py", "from zerolab.engine.unit import Unit", False),
        ("measure/ledger.py", "from ..engine.unit import Unit", True),
        ("measure/ledger.py", "import zerolab", True),
        ("measure/ledger.py", "from .. import lab", False),
        ("measure/ledger.py", "from .lab import x", True),
        ("lab/plots/__init__.py", "from ...measure import ledger", True),
        ("lab/plots/__init__.py", "from zerolab.apps.demo import x", False),
        ("apps/demo.py", "from zerolab.lab import plots", True),
        ("apps/demo.py", "from zerolab.cli import Parser", False),
        ("cli.py", "from .apps import demo", True),
    ],
)
def test_the_import_check_sees_them_all(room, line, allowed, tmp_path, monkeypatch):
    write_package(tmp_path, monkeypatch, {room: line})
    assert (forbidden_imports() == []) == allowed


def test_a_circle_for_annotations_is_seen(tmp_path, monkeypatch):
    there = "if TYPE_CHECKING:\n    from zerolab.engine.bucket import Bucket"
    back = {"engine/unit.py": there, "engine/bucket.py": "from zerolab.engine.unit import Unit"}
    write_package(tmp_path, monkeypatch, back)
    assert import_circle() == []
    assert import_circle("engine/", annotations=True)


@pytest.mark.parametrize(
    "files, circle",
    [
        ({"apps/demo.py": "from zerolab.apps.bench import x", "apps/bench.py": "from zerolab.apps import demo"}, True),
        (
            {"apps/demo.py": "from zerolab.apps.bench import x", "apps/bench.py": "def f():\n    from . import demo"},
            True,
        ),
        ({"apps/demo.py": "if TYPE_CHECKING:\n    from . import bench", "apps/bench.py": "from . import demo"}, False),
        ({"measure/__init__.py": "from .ledger import x", "measure/ledger.py": "from zerolab.measure import y"}, True),
        ({"lab/__init__.py": "HOME = 'zerolab.lab.plots'", "lab/plots/__init__.py": "from zerolab.lab import y"}, True),
        ({"measure/__init__.py": "from .ledger import x", "measure/ledger.py": "import zerolab.comm.recording"}, False),
        ({"lab/plots/__init__.py": "import zerolab.lab.plots"}, False),
    ],
)
def test_the_circle_check_sees_them_all(files, circle, tmp_path, monkeypatch):
    write_package(tmp_path, monkeypatch, files)
    assert bool(import_circle()) == circle


def test_a_room_without_a_level_is_noticed(tmp_path, monkeypatch):
    write_package(tmp_path, monkeypatch, {"attic/old.py": "x = 1"})
    with pytest.raises(KeyError, match="attic"):
        forbidden_imports()


# --- the files ---


@pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="needs the git checkout")
def test_no_file_names_a_machine_or_a_registry():
    machine = re.compile(r"(?<![\w.~*$}-])/(work|root|home)/")
    # but for torch's CPU wheels
    registry = re.compile(r"\b(pypi|pythonhosted|download\.pytorch(?!\.org/whl/cpu\b)|anaconda|npmjs)\.org\b")
    found = []
    for name in run("git", "ls-files", "-co", "--exclude-standard", "-z").split("\0"):
        path = ROOT / name
        if not name or not path.is_file() or b"\0" in (content := path.read_bytes()):
            continue  # deleted but not yet committed, or binary
        for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
            if machine.search(line) or registry.search(line):
                found.append(f"{name}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


def test_ci_runs_every_test():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert "make test-all" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.slow
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


# --- names ---


def callables(path: Path) -> Iterator[str]:
    """The functions and classes of a file, and the public methods of its classes."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.parse(path.read_text(), str(path)).body:
        if isinstance(node, (*functions, ast.ClassDef)):
            yield node.name
        if isinstance(node, ast.ClassDef):
            yield from (n.name for n in node.body if isinstance(n, functions) and not n.name.startswith("_"))


def names_of_modules(path: Path) -> set[str]:
    """What a function in this file must not be called: the file, or in a package's, the package and what lies in it."""
    if path.stem != "__init__":
        return {path.stem}
    inside = {other.parent.name if other.stem == "__init__" else other.stem for other in path.parent.glob("*.py")}
    return inside | {other.parent.name for other in path.parent.glob("*/__init__.py")}


def test_no_function_shares_its_name_with_its_module():
    """Else `package.name` is the module or the function, depending on what was imported last."""
    files = list(PACKAGE.rglob("*.py"))
    shared = {str(path.relative_to(ROOT)): names_of_modules(path) & set(callables(path)) for path in files}
    assert files
    assert {path: names for path, names in shared.items() if names} == {}


def test_what_lessons_import_from_lab_has_one_home():
    """The second of two would take the other's place."""
    from zerolab import lab

    homes = Counter(name for names in lab._HOME.values() for name in names)
    assert [name for name, many in homes.items() if many > 1] == []
