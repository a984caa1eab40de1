"""Writes what the pages in docs/ take from elsewhere in the repository.

    python docs/write.py            # formulas.png from formulas.md, and the index in questions.md from the lessons
    python docs/write.py --check    # writes nothing: are both as they would be written?

Needs matplotlib and nothing of zerolab.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = Path(__file__).parent
ROOT = DOCS.parent
BEGIN, END = "<!-- the index: python docs/write.py writes it -->", "<!-- the end of the index -->"

# ---------------------------------------------------------------------- one sheet of formulas

WIDTH, HEIGHT, DOTS = 8.27, 11.69, 200  # A4, in inches
LINE, SMALL = 0.152, 6.4  # inches from line to line; points
INK, GREY, RULE, HEAD = "#1a1a1a", "#5f5f5f", "#d0d0d0", "#0062a3"
TEX = {"Ψ": r"\Psi ", "α": r"\alpha ", "β": r"\beta ", "η": r"\eta ", "⌈": r"\lceil ", "⌉": r"\rceil "}


class Section(NamedTuple):
    """A heading of formulas.md with the rows of its table: their cells, as they are written there."""

    heading: str
    rows: list[list[str]]


def sections(page: str) -> list[Section]:
    found = []
    for part in page.split("\n## ")[1:]:
        heading, _, rest = part.partition("\n")
        lines = [line for line in rest.splitlines() if line.startswith("|")]
        found.append(Section(heading, [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]))
    return found


def typeset(formula: str) -> str:
    """For matplotlib: Ψ_root becomes a Ψ with a subscript, and √(x) a root with a bar."""
    formula = re.sub(r"_([a-z]+)", r"_{\\mathrm{\1}}", formula)
    formula = re.sub(r"√\((.+?)\)", r"\\sqrt{\1}", formula)
    return "$" + re.sub("|".join(TEX), lambda found: TEX[found[0]], formula) + "$"


def sheet(found: list[Section]) -> Figure:
    """All sections on one sheet of A4: formulas in two columns, and the symbols below them."""
    *formulas, symbols = found
    with rc_context({"mathtext.fontset": "stix"}):
        figure = Figure(figsize=(WIDTH, HEIGHT), facecolor="white")
        _text(figure, 0.5, 0.5, "Every formula of the course", fontsize=15, weight="bold")
        _text(figure, WIDTH - 0.5, 0.5, "zerolab · docs/formulas.md", fontsize=8, color=GREY, ha="right")
        total = sum(len(section.rows) + 1.9 for section in formulas)
        column, down, used = 0, 0.85, 0.0
        for section in formulas:
            size = len(section.rows) + 1.9
            if column == 0 and used + size / 2 > total / 2:
                column, down = 1, 0.85
            down = _section(figure, section, 0.5 + 3.75 * column, down)
            used += size
        _symbols(figure, symbols)
    return figure


def _section(figure: Figure, section: Section, left: float, down: float) -> float:
    right = left + 3.52
    _text(figure, left, down, section.heading, fontsize=9.5, weight="bold", color=HEAD)
    down += 1.2 * LINE
    for what, formula, unit, lesson in section.rows:
        _line(figure, left, right, down - 0.62 * LINE)
        number = re.match(r"\[(\d+)\]", lesson)
        _text(figure, left, down, what, fontsize=SMALL)
        _text(figure, left + 1.84, down, typeset(formula), fontsize=7.8)
        _text(figure, right - 0.18, down, unit, fontsize=5.5, color=GREY, ha="right")
        _text(figure, right, down, number[1] if number else "", fontsize=SMALL, color=HEAD, ha="right")
        down += LINE
    return down + 0.55 * LINE


def _symbols(figure: Figure, symbols: Section) -> None:
    rows = symbols.rows
    half = -(-len(rows) // 2)
    top = HEIGHT - 0.45 - (half + 1) * 0.95 * LINE
    _line(figure, 0.5, WIDTH - 0.5, top - 0.9 * LINE, INK)
    _text(figure, 0.5, top, symbols.heading, fontsize=9.5, weight="bold", color=HEAD)
    last = "Numbers in blue: the lesson."
    _text(figure, WIDTH - 0.48, top, last, fontsize=SMALL, color=GREY, ha="right")
    for number, (symbol, meaning) in enumerate(rows):
        left, down = 0.5 + 3.75 * (number // half), top + (number % half + 1.25) * 0.95 * LINE
        _text(figure, left, down, ", ".join(map(typeset, symbol.split(", "))), fontsize=7.6)
        _text(figure, left + 0.72, down, meaning, fontsize=SMALL)


def _text(figure: Figure, x: float, down: float, text: str, **look: object) -> None:
    figure.text(x / WIDTH, 1 - down / HEIGHT, text, **({"va": "center", "color": INK} | look))


def _line(figure: Figure, left: float, right: float, down: float, color: str = RULE) -> None:
    y = 1 - down / HEIGHT
    figure.add_artist(Line2D([left / WIDTH, right / WIDTH], [y, y], color=color, linewidth=0.4))


def digest(found: list[Section]) -> str:
    """It stands in the picture's file, so that a picture of an older page is noticed."""
    return hashlib.sha256(repr(found).encode()).hexdigest()[:16]


def draw(page: Path, picture: Path) -> None:
    found = sections(page.read_text(encoding="utf-8"))
    with rc_context({"mathtext.fontset": "stix"}):
        sheet(found).savefig(drawn := io.BytesIO(), format="png", dpi=DOTS)
    marks = PngInfo()
    marks.add_text("Source", digest(found))
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(32, dither=Image.Dither.NONE).save(
            picture, optimize=True, pnginfo=marks, dpi=(DOTS, DOTS)
        )


# ---------------------------------------------------------------------- the index of questions


class Lesson(NamedTuple):
    path: Path
    title: str
    questions: list[str]


def lessons(folder: Path) -> Iterator[Lesson]:
    """Each lesson with the questions at its end, from the stored notebooks."""
    for path in sorted(folder.glob("[0-9][0-9]_*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        texts = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]
        title = texts[0].splitlines()[0].removeprefix("# ")
        asked = next((text.partition("## Questions\n")[2] for text in texts if "## Questions\n" in text), "")
        items = re.split(r"^\d+\. ", asked, flags=re.MULTILINE)[1:]
        yield Lesson(path, title, [" ".join(item.split()) for item in items])


def index(folder: Path) -> str:
    parts = []
    for lesson in lessons(folder):
        listed = "\n".join(f"{number}. {question}" for number, question in enumerate(lesson.questions, 1))
        parts.append(
            f"### {lesson.title}\n\n[The lesson](../lessons/{lesson.path.name}) has the answers.\n\n{listed}\n"
        )
    return "\n".join(parts)


def with_index(page: str, folder: Path) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{index(folder)}\n{END}{after}"


# ---------------------------------------------------------------------- the command


def outdated() -> list[str]:
    """A line for each page that is not as this file would write it."""
    found = []
    picture = DOCS / "formulas.png"
    current = digest(sections((DOCS / "formulas.md").read_text(encoding="utf-8")))
    if not picture.exists() or Image.open(picture).info.get("Source") != current:
        found.append("docs/formulas.png is not of this docs/formulas.md")
    page = (DOCS / "questions.md").read_text(encoding="utf-8")
    if with_index(page, ROOT / "lessons") != page:
        found.append("docs/questions.md does not have the lessons' questions as they are")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="write formulas.png and the index of questions.md")
    parser.add_argument("--check", action="store_true", help="write nothing: are they as they would be written?")
    if parser.parse_args().check:
        found = outdated()
        print("\n".join([*found, "python docs/write.py writes them"]) if found else "docs/ is up to date")
        return 1 if found else 0
    draw(DOCS / "formulas.md", DOCS / "formulas.png")
    page = DOCS / "questions.md"
    page.write_text(with_index(page.read_text(encoding="utf-8"), ROOT / "lessons"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
