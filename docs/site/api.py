"""The reference, from docstrings. griffe reads the source; nothing is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import griffe

SPECIAL = {"__init__", "__call__", "__enter__", "__exit__"}
Link = Callable[[Path], str]  # from a source file to the link to its page


def pages(root: Path, link: Link) -> dict[str, str]:
    """Name and text of each page."""
    package = griffe.load("zerolab", search_paths=[str(root)], allow_inspection=False)
    lab = ast.literal_eval(str(package["lab"].members["_HOME"].value))
    names = {
        "zerolab": [(name, package[name]) for name in _public(package)],
        "zerolab.measure": [(name, package["measure"][name]) for name in _public(package["measure"])],
        "zerolab.lab": [
            (name, package[f"{home.removeprefix('zerolab.')}.{name}"])
            for home, inside in lab.items()
            for name in inside
        ],
        "zerolab.lab.plots": [(name, package["lab.plots"][name]) for name in _public(package["lab.plots"])],
    }
    texts = {}
    for module, members in names.items():
        at = module.partition(".")[2]
        text = [f"# `{module}`", _docstring(package[at] if at else package), f"```{{py:module}} {module}\n```"]
        for name, found in members:
            text += _entry(f"{module}.{name}" if module == "zerolab" else name, found, root, link, 6)
        texts[module] = "\n\n".join(part for part in text if part) + "\n"
    return texts


def _public(module: Any) -> list[str]:
    return [str(name).strip("'\"") for name in module.exports or () if not str(name).strip("'\"").startswith("_")]


def _entry(name: str, found: Any, root: Path, link: Link, fence: int) -> Iterator[str]:
    """A directive with what is in it. The fence of an outer one is longer."""
    found = found.final_target if found.is_alias else found
    if found.is_module:
        return
    name = name.removeprefix("zerolab.")
    colons = ":" * fence
    if found.is_class:
        dataclass = any("dataclass" in str(one.value) for one in found.decorators)
        init = found.all_members.get("__init__")
        yield f"{colons}{{py:class}} {name}{_signature(init) if init is not None and not dataclass else ''}"
    elif found.is_function:
        yield f"{colons}{{py:function}} {name}{_signature(found)}"
    else:
        value = str(found.value)
        yield f"{colons}{{py:data}} {name}" + (f"\n:value: {value}" if len(value) < 70 else "")
    if text := _docstring(found):
        yield text
    if found.is_class:
        for member_name, member in found.members.items():
            if member_name.startswith("_") or member.is_alias or member.is_module:
                continue
            if member.is_function:
                yield f"{colons[:-1]}{{py:method}} {member_name}{_signature(member)}"
            elif member.docstring or member.annotation is not None:
                kind = "" if member.annotation is None else f"\n:type: {member.annotation}"
                yield f"{colons[:-1]}{{py:attribute}} {member_name}{kind}"
            else:
                continue
            if text := _docstring(member):
                yield text
            yield colons[:-1]
    file = Path(found.filepath).relative_to(root)
    yield f"[{file}]({link(root / file)})"
    yield colons


def _signature(function: Any) -> str:
    function = function.final_target if function.is_alias else function
    parts, seen_star = [], False
    for parameter in function.parameters:
        if parameter.name == "self" or parameter.name == "cls":
            continue
        kind = parameter.kind.value
        star = {"variadic positional": "*", "variadic keyword": "**"}.get(kind, "")
        if kind == "keyword-only" and not seen_star:
            parts.append("*")
        seen_star = seen_star or star == "*" or kind == "keyword-only"
        text = star + parameter.name
        if parameter.annotation is not None:
            text += f": {parameter.annotation}"
        if parameter.default is not None and not star:
            text += f" = {parameter.default}"
        parts.append(text)
    returned = "" if function.returns is None or function.name == "__init__" else f" -> {function.returns}"
    return re.sub(r"\s+", " ", f"({', '.join(parts)}){returned}")


def _docstring(found: Any) -> str:
    return found.docstring.value.strip() if found.docstring else ""
