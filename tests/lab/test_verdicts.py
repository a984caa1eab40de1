"""The one list of claims: complete, tried where it says, and decided by what that lesson says or prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from zerolab.lab import build
from zerolab.lab.exercises import verdicts
from zerolab.lab.exercises.verdicts import CLAIMS, VERDICTS, Claim

ROOT = Path(__file__).parents[2]
KEYS = [*map(str, range(1, 18)), *"ABCDEFGHIJKLMNOPQRSTUV"]
GONE = {"5", "7", "11", "14", "G", "I", "J", "M", "O"}  # of the articles: what nobody would believe, or learn from


def plain(text: str) -> str:
    """Without marks of emphasis or quotation, and with single spaces."""
    return re.sub(r"\s+", " ", re.sub(r"^> ?", "", text, flags=re.MULTILINE).replace("**", ""))


def cells(lesson: str) -> list[dict]:
    (path,) = (ROOT / "solutions").glob(f"{lesson}_*.ipynb")
    found: list[dict] = json.loads(path.read_text())["cells"]
    return found


def printed(cell: dict) -> str:
    parts = [output.get("text") or output.get("data", {}).get("text/plain", "") for output in cell.get("outputs", [])]
    return "\n".join("".join(part) for part in parts)


def test_each_claim_is_there_once() -> None:
    """Alone, or put together with one that says much the same: a short list is read."""
    found = [key for claim in CLAIMS for key in (claim.key, *claim.also)]
    assert sorted([*found, *GONE]) == sorted(KEYS) and len(CLAIMS) <= 24
    kept = [key for key in KEYS if key not in GONE]
    assert [claim.key for claim in CLAIMS] == [key for key in kept if verdicts.claim(key).key == key]


def test_what_says_where_it_stands_is_quoted_beside_a_link_to_it() -> None:
    living = [claim for claim in CLAIMS if claim.source]
    assert len(living) >= 5
    for claim in living:
        assert f"]({claim.address})" in "".join("".join(cell["source"]) for cell in cells(claim.lesson)), claim.key


def test_only_what_is_on_the_list_is_on_trial() -> None:
    sources = (ROOT / "solutions").glob("*.py")
    found = {source.name[:2] for source in sources if re.search(r"^# ## On trial", source.read_text(), re.MULTILINE)}
    again = {"16", "18"}  # at scale, and with other engines
    assert found - again == {claim.lesson for claim in CLAIMS}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_a_verdict_is_one_of_three(claim: Claim) -> None:
    assert claim.verdict in VERDICTS


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_its_lesson_quotes_it_on_trial(claim: Claim) -> None:
    """Under the heading it names, as a quotation, with a verdict of the same word in what follows."""
    (source,) = (ROOT / "solutions").glob(f"{claim.lesson}_*.py")
    text = "\n".join(cell.source for cell in build.notebooks(source)["solutions"].cells if cell.cell_type == "markdown")
    _, heading, section = text.partition(f"## {claim.heading}\n")
    assert heading, f"lesson {claim.lesson} has no section {claim.heading!r}"
    section = re.split(r"^## (?!On trial)", section, maxsplit=1, flags=re.MULTILINE)[0]
    quotes = [plain(found) for found in re.findall(r"(?:^>.*\n?)+", section, flags=re.MULTILINE)]
    (at,) = [number for number, quote in enumerate(quotes) if claim.quote in quote]
    after = re.split(r"(?:^>.*\n?)+", section, flags=re.MULTILINE)[at + 1 :]
    words = re.findall(r"\*\*([^*]*)", next(part for part in after if "**" in part))
    first = next(said.lower() for said in words if re.search(r"true|false", said.lower()))
    said = "false" if "false" in first and "true" not in first else "condition"
    expected = {"false": "false", "true under a condition": "condition"}[claim.verdict]
    assert said == expected, f"lesson {claim.lesson} says {first!r}"


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.key)
def test_what_decided_it_is_in_the_lesson(claim: Claim) -> None:
    whole = plain("\n".join("".join(cell["source"]) + "\n" + printed(cell) for cell in cells(claim.lesson)))
    cited = re.findall(r"`([^`]+)`", claim.because)
    assert cited
    for piece in cited:
        assert plain(piece) in whole, f"not in lesson {claim.lesson}: {piece}"


def test_the_page_is_current() -> None:
    assert verdicts.PAGE.read_text() == verdicts.page(), "run: python -m zerolab.lab.exercises.verdicts"


def test_the_table_has_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts.claims()
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if re.match(r" {1,3}\S", line)]
    assert [row for row in (row.rstrip(",") for row in rows) if row in KEYS] == [claim.key for claim in CLAIMS]
    verdicts.claims(["B"])
    assert "Trading communication" in capsys.readouterr().out
    with pytest.raises(KeyError, match="there are 1, 2"):
        verdicts.claims(["Z"])
