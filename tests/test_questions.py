"""docs/questions.md: fifty questions with answers whose numbers stand in the lessons, and the index of all others."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "questions.md"
FIFTY, _, INDEX = PAGE.read_text(encoding="utf-8").partition("\n## The questions of all lessons")
ANSWERS = {
    int(number): (question, " ".join(answer.split()))
    for number, question, answer in re.findall(
        r"^### (\d+)\. ([^\n]+)\n\n(.+?)(?=\n\n#|\n*\Z)", FIFTY, re.DOTALL | re.MULTILINE
    )
}
LESSON = re.compile(r"\[(\d\d)\]\(\.\./lessons/((\d\d)_\w+)\.ipynb\)")
OFTEN_ASKED = (  # words of the questions that must be there
    "What is ZeRO.* data parallelism .* model parallelism",
    "Which stage shards what.* bytes",
    "Synchronous or asynchronous SGD",
    "parameter server.* all-reduce",
    "stages 1, 2 and 3 differ in traffic",
    "stage 2 not lower the peak",
    "What does overlap hide",
    "mixed precision",
    "accumulation",
    "clipping",
    "activation checkpointing",
    "tensor or pipeline parallelism",
    "64 ranks loaded on 48",
    "stragglers",
    "faults",
    "load balanced",
    "at inference",
    "find a hang",
    "Which DeepSpeed settings .* why",
)


def load_writer():
    spec = importlib.util.spec_from_file_location("docs_write", ROOT / "docs" / "write.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def stored(stem: str) -> str:
    """Text and outputs of the solved lesson, in one line, without marks."""
    seen: list[str] = []
    for cell in json.loads((ROOT / "solutions" / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]:
        seen += cell["source"] if cell["cell_type"] == "markdown" else []
        for output in cell.get("outputs", []):
            seen += [*output.get("text", []), *output.get("data", {}).get("text/plain", [])]
        seen.append("\n")
    return " ".join("".join(seen).replace("*", "").replace("`", "").split())


def numbers(answer: str) -> list[str]:
    return [cited for cited in re.findall(r"\*\*(.+?)\*\*", answer) if re.search(r"\d", cited)]


def stands(cited: str, text: str) -> bool:
    """The whole number, and no part of a longer one."""
    return bool(re.search(rf"(?<![\d.,]){re.escape(cited)}(?![\d])(?![.,]\d)", text))


def test_there_are_fifty():
    assert list(ANSWERS) == list(range(1, 51))
    assert len(ANSWERS) == FIFTY.count("\n### ")
    questions = [question for question, _ in ANSWERS.values()]
    assert len(set(questions)) == 50 and all(question.endswith("?") for question in questions)
    for words in OFTEN_ASKED:
        assert any(re.search(words, question, re.IGNORECASE) for question in questions), words


@pytest.mark.parametrize("number", ANSWERS)
def test_an_answer(number):
    """At most three sentences, a lesson, and numbers that stand in the text or outputs of a lesson that it names."""
    _, answer = ANSWERS[number]
    plain = re.sub(r"\[(\d\d)\]\([^)]*\)", r"\1", answer).replace("**", "")
    assert len(re.findall(r"[.?!](?= [A-Z`\d]|$)", plain)) <= 3
    lessons = LESSON.findall(answer)
    assert lessons and all(shown == own for shown, _, own in lessons)
    assert numbers(answer)
    texts = [stored(stem) for _, stem, _ in lessons]
    for cited in numbers(answer):
        assert any(stands(cited, text) for text in texts), f"no {cited} in {[stem for _, stem, _ in lessons]}"


def test_a_wrong_number_is_noticed():
    text = stored("04_zero1")
    assert stands("5,202,432", text)
    for wrong in ("5,202,433", "202,432", "5,202", "5,202,43"):
        assert not stands(wrong, text)


def test_the_pages_are_as_written():
    """The index is of today's lessons, and the picture of today's formulas; python docs/write.py writes both."""
    assert load_writer().outdated() == []


def test_every_lesson_and_question_is_in_the_index():
    listed = re.findall(r"^\d+\. (.+)$", INDEX, re.MULTILINE)
    asked = 0
    for path in sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py")):
        assert f"(../lessons/{path.stem}.ipynb)" in INDEX
        source = re.sub(r"^# ?", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        part = source.partition("\n## Questions\n")[2].partition("\n%%")[0]
        items = [" ".join(item.split()) for item in re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1:]]
        assert len(items) >= 3, path.stem
        assert set(items) <= set(listed)
        asked += len(items)
    assert asked == len(listed)


def test_a_new_question_makes_the_index_old(tmp_path):
    writer = load_writer()
    cell = {"cell_type": "markdown", "source": ["# 20 · New\n", "\n", "## Questions\n", "\n", "1. Why\n", "   so?\n"]}
    (tmp_path / "20_new.ipynb").write_text(json.dumps({"cells": [cell]}), encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8")
    new = writer.with_index(page, tmp_path)
    assert new != page and "### 20 · New\n" in new and "\n1. Why so?\n" in new
    assert writer.with_index(new, ROOT / "lessons") == page
