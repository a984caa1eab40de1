"""CONTRIBUTING's map and its two reading passes: what they list is there, complete, and as long as they say.

After files have changed, from the repository's root:

    python tests/test_reading_path.py        # writes the line counts into CONTRIBUTING.md
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
LADDER = [f"zerolab/{name}.py" for name in ("ddp", "zero1", "zero2", "zero3")]
HOUR = [*LADDER, *(f"zerolab/{name}.py" for name in ("engine/layout", "engine/unit", "engine/bucket"))]
HOUR.append("zerolab/comm/collectives.py")

PASS = re.compile(r"^\*\*In (?:an hour|a day): [\d,]+ lines.*?(?=^\*\*In|^## |\Z)", re.DOTALL | re.MULTILINE)
ROW = re.compile(r"\]\((zerolab/[\w/]+\.py)\) \| \d+ \|")


def lines(path: str) -> int:
    """As `wc -l` counts them; 0 for a file that is not there, which another test reports."""
    file = ROOT / path
    return file.read_bytes().count(b"\n") if file.exists() else 0


def files(section: str) -> list[str]:
    return ROW.findall(section)


def counted(section: str) -> str:
    """The same pass with the line counts of today, in its rows and in its heading."""
    rows = ROW.sub(lambda row: f"]({row[1]}) | {lines(row[1])} |", section)
    return re.sub(r": [\d,]+ lines", f": {sum(map(lines, files(section))):,} lines", rows, count=1)


def passes() -> list[str]:
    found = PASS.findall(PAGE.read_text(encoding="utf-8"))
    assert len(found) == 2, "CONTRIBUTING.md has two passes: **In an hour: N lines** and **In a day: N lines**"
    return found


def test_the_page_counts_the_lines():
    for section in passes():
        for written, right in zip(section.splitlines(), counted(section).splitlines()):
            assert written == right, f"write:\n{right}\nor run: python tests/test_reading_path.py"


def test_the_first_pass_is_at_most_900_lines():
    assert files(passes()[0]) == HOUR
    assert all((ROOT / path).exists() for path in HOUR)
    assert sum(map(lines, HOUR)) <= 900


def test_no_class_of_the_engine_has_250_lines():
    for path in (ROOT / "zerolab" / "engine").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                assert node.end_lineno - node.lineno < 249, f"{path.name}: {node.name}"


def test_the_second_pass_is_the_rest_of_the_engine():
    engine = {str(path.relative_to(ROOT)) for path in (ROOT / "zerolab" / "engine").glob("*.py")}
    rest = files(passes()[1])
    assert len(rest) == len(set(rest)) and set(rest) == engine - set(HOUR)


def test_the_routes_name_what_is_there():
    """The docstring of engine/: every file, and every function or method that it names in that file."""
    route = re.findall(
        r"^ +(\w+\.py) +(\w+(?:, \w+)*)", ast.get_docstring(tree("zerolab/engine/__init__.py")), re.MULTILINE
    )
    assert len(route) > 25
    for name, methods in route:
        (path,) = (room for room in ("zerolab", "zerolab/engine", "zerolab/comm") if (ROOT / room / name).exists())
        defined = {node.name for node in ast.walk(tree(f"{path}/{name}")) if isinstance(node, ast.FunctionDef)}
        assert set(methods.split(", ")) <= defined, f"{name} has no {methods}"


def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


def test_the_map_has_every_room():
    named = set(re.findall(r"^zerolab/(\w+)/ ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
    assert named == {path.parent.name for path in (ROOT / "zerolab").glob("*/__init__.py")}


def write() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(PASS.sub(lambda section: counted(section[0]), text), encoding="utf-8")


if __name__ == "__main__":
    write()
