"""docs/glossary.md: each term has its Chinese, its sentence and a lesson that uses it; links from lessons find it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
ENTRY = re.compile(r"\*\*(?P<chinese>.+?)\*\* · \[lesson (?P<lesson>\d\d)\]\(\.\./(?P<file>\S+)\) · (?P<text>.+)")
CHINESE = re.compile(r"[\u4e00-\u9fff]")
LINK = re.compile(r"\.\./docs/glossary\.md#([\w-]+)")
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))


def entries() -> dict[str, re.Match[str]]:
    found = {}
    for part in PAGE.split("\n## ")[1:]:
        term, _, body = part.partition("\n")
        found[term] = ENTRY.fullmatch(" ".join(body.split()))
        assert found[term], f"{term}: not 中文 · lesson · sentence"
    return found


def anchor(heading: str) -> str:
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def words(text: str) -> str:
    """In small letters, without marks, and with blanks for hyphens and line ends."""
    return re.sub(r"[\s-]+", " ", re.sub(r"[*`_]", "", text.lower()))


def read(lesson: str) -> str:
    """What a reader of the solved lesson sees, but for code and pictures."""
    seen = []
    for cell in json.loads((ROOT / lesson).read_text(encoding="utf-8"))["cells"]:
        seen += cell["source"] if cell["cell_type"] == "markdown" else []
        for output in cell.get("outputs", []):
            seen += [*output.get("text", []), *output.get("data", {}).get("text/plain", []), "\n"]
    return words("".join(seen))


def test_there_are_enough_in_order_and_each_once():
    terms = list(entries())
    assert len(terms) >= 60
    assert terms == sorted(terms, key=str.lower)
    anchors = [anchor(term) for term in [*terms, "Glossary"]]
    assert len(set(anchors)) == len(anchors)


@pytest.mark.parametrize("term", list(entries()))
def test_a_term(term):
    entry = entries()[term]
    assert CHINESE.search(entry["chinese"])
    sentence, _, ambiguous = entry["text"].partition(" *Ambiguous:* ")
    assert sentence.endswith(".") and ". " not in sentence, "one sentence"
    if ambiguous:
        assert CHINESE.search(ambiguous) and ambiguous.endswith(".")
    assert re.match(rf"lessons/{entry['lesson']}_\w+\.ipynb$", entry["file"])
    assert re.search(rf"\b{re.escape(words(term))}", read(entry["file"].replace("lessons/", "solutions/")))


def test_what_is_mixed_up_is_marked():
    for term, both in {
        "Memory": ("显存", "内存"),
        "Asynchronous": ("异步启动", "异步更新"),
        "Traffic": ("通信量", "通信时间"),
        "Model parallelism": ("参数分片", "模型并行"),
    }.items():
        ambiguous = entries()[term]["text"].partition("*Ambiguous:*")[2]
        assert all(word in ambiguous + entries()[term]["chinese"] for word in both), term


@pytest.mark.parametrize("source", SOURCES, ids=[source.stem for source in SOURCES])
def test_links_from_a_lesson(source):
    """Each leads to a term, once in a lesson; a lesson that explains a term links the glossary."""
    known = {anchor(term) for term in entries()}
    linked = LINK.findall(source.read_text(encoding="utf-8"))
    assert set(linked) <= known
    assert len(set(linked)) == len(linked)
    if source.name[:2] in {entry["lesson"] for entry in entries().values()}:
        assert linked
