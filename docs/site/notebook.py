"""A stored notebook as a page: its text, code, outputs and pictures as they are in the file. Nothing is run."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
EXERCISE = re.compile(r"%%exercise +(\d\d\.\d+)\s*\n")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FROM_THE_BUILD = {"outputs", "install", "solution"}  # cells for people who have the notebook open; a page has its own


def read(path: Path) -> list[Cell]:
    return [cell | {"source": _joined(cell["source"])} for cell in json.loads(path.read_text())["cells"]]


def title(path: Path) -> str:
    """Its first heading, such as "04 · ZeRO-1: shard the optimizer"."""
    return read(path)[0]["source"].splitlines()[0].removeprefix("# ")


def references(solution: Path) -> dict[str, str]:
    """The code of each exercise in a solved notebook, by number."""
    found = ((EXERCISE.match(cell["source"]), cell["source"]) for cell in read(solution))
    return {match[1]: source[match.end() :] for match, source in found if match}


def to_markdown(path: Path, page: Path, below_title: str, rewrite: Callable[[str], str], solved: dict[str, str]) -> str:
    """The page's text. Pictures become files beside `page`; `solved` is folded below its exercise."""
    parts, pictures = [], 0
    cells = [cell for cell in read(path) if cell.get("id") not in FROM_THE_BUILD]
    for number, cell in enumerate(cells):
        if cell["cell_type"] == "markdown":
            text = rewrite(cell["source"])
            if number == 0:
                heading, _, rest = text.partition("\n")
                text = f"{heading}\n\n{below_title}\n{rest}"
            parts.append(text)
        elif cell["cell_type"] == "code" and cell["source"].strip():
            parts.append(fenced(cell["source"], "{code-block} cell"))
            exercise = EXERCISE.match(cell["source"])
            outputs = cell["outputs"]
            for place, output in enumerate(outputs):
                if image := output.get("data", {}).get("image/png"):
                    pictures += 1
                    file = page.with_name(f"{page.stem}-{pictures}.png")
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(base64.b64decode(_joined(image)))
                    said = _joined(outputs[place + 1].get("text", "")) if place + 1 < len(outputs) else ""
                    parts.append(f"![{_alt(said)}]({file.name})")
                else:
                    parts.extend(_output(output))
            if exercise and exercise[1] in solved:
                code = fenced(solved[exercise[1]], "{code-block} cell")
                parts.append(folded(f"A solution of {exercise[1]}", code, "solution"))
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any]) -> Iterator[str]:
    data = output.get("data", {})
    if output["output_type"] == "stream":
        yield _printed(_joined(output["text"]))
    elif output["output_type"] == "error":
        yield _printed(ANSI.sub("", "\n".join(output["traceback"])), "output error")
    elif "text/html" in data:
        yield fenced(_joined(data["text/html"]), "{raw} html")
    elif "text/plain" in data:
        yield _printed(_joined(data["text/plain"]))


def _printed(text: str, kind: str = "output") -> str:
    columns = re.search(r"\S {2,}\S", text)  # lines of a table must not be broken
    kind = kind if columns else f"{kind} said"
    return fenced(f":class: {kind}\n\n{text.rstrip()}", "{code-block} text")


def fenced(text: str, info: str) -> str:
    """A block whose fence is longer than any in the text."""
    ticks = "`" * max([3, *(len(run) + 1 for run in re.findall(r"`{3,}", text))])
    return f"{ticks}{info}\n{text.rstrip()}\n{ticks}"


def folded(summary: str, text: str, kind: str) -> str:
    return f'<details class="{kind}">\n<summary>{summary}</summary>\n\n{text}\n\n</details>'


def _alt(said: str) -> str:
    line = said.strip().splitlines()[0] if said.strip() else "What the cell above draws"
    return re.sub(r"[\[\]`*_<>|]", "", line)


def _joined(text: str | list[str]) -> str:
    return text if isinstance(text, str) else "".join(text)
