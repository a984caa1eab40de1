"""How far the class is: which exercises pass and what was predicted, read from the files in each student's folder.

The files belong to the students, so nothing about them is trusted: not their size, their types or their characters.
"""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zerolab.lab.exercises.catalogue import EXERCISES
from zerolab.lab.exercises.judge import digest

LARGEST = 1_000_000  # bytes of a file that are read
WIDEST = 24  # characters of an answer that are shown
SHOWN = 4  # different answers to a prediction that are shown
SKIPPED = "skipped"


@dataclass
class Progress:
    """One student's: the exercises that pass as they are now, and the predictions as they are shown."""

    passed: set[str] = field(default_factory=set)
    predictions: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)


def read(my: Path) -> Progress:
    """The progress in a student's folder `my`. What cannot be read is left out."""
    found, kept = Progress(), {}
    with suppress(ValueError, RecursionError):
        kept = json.loads(_text(my / "progress.json") or "{}")
    if not isinstance(kept, dict):
        return found
    passed, predictions = kept.get("passed"), kept.get("predictions")
    for id in EXERCISES:
        if isinstance(passed, dict) and id in passed:
            source = _text(my / f"ex_{id.replace('.', '_')}.py")
            if source and digest(source) == passed[id]:
                found.passed.add(id)
    for id, value in predictions.items() if isinstance(predictions, dict) else ():
        if not (len(id) <= 8 and id.replace(".", "").isdecimal()):
            continue
        found.predictions[id] = _shown(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
            found.numbers[id] = value
    return found


def _text(file: Path) -> str:
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # follow no link, wait at no pipe
        with open(descriptor, encoding="utf-8", errors="replace") as opened:
            return opened.read(LARGEST)
    except OSError:
        return ""


def _shown(value: Any) -> str:
    if value is None:
        return SKIPPED
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**15:
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}"
    text = value if isinstance(value, str) else repr(value)
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= WIDEST else text[: WIDEST - 3] + "..."


def order(id: str) -> tuple[int, ...]:
    return tuple(int(part) for part in id.split(".") if part)


def predictions(room: Iterable[Progress]) -> dict[str, Counter]:
    """How often each answer was given to each prediction, in the order of the course."""
    room = list(room)
    ids = sorted({id for one in room for id in one.predictions}, key=order)
    return {id: Counter(one.predictions[id] for one in room if id in one.predictions) for id in ids}


def room_view(room: Mapping[str, Progress]) -> list[Any]:
    """Tables without names, for everyone to see: how many pass each exercise, and how the predictions spread.

    A sentence stands in place of a table in which there is nothing yet.
    """
    from rich.markup import escape

    from zerolab.measure.units import table

    students = f"{len(room)} student{'s' * (len(room) > 1)}"
    exercises = table(f"How many of {students} pass each exercise", ["", "exercise"], ["pass"])
    for id, asked in EXERCISES.items():
        many = sum(id in one.passed for one in room.values())
        exercises.add_row(id, asked.title, f"{many} {'█' * round(12 * many / max(1, len(room))):<12}")
    guesses = table("What was predicted, and how often", ["", "answers"], ["students", "median"])
    for id, counter in predictions(room.values()).items():
        numbers = [one.numbers[id] for one in room.values() if id in one.numbers]
        said = sum(many for answer, many in counter.items() if answer != SKIPPED)
        median = f"{statistics.median(numbers):,.4g}" if len(numbers) > 1 else ""
        guesses.add_row(id, escape(spread(counter)), str(said), median)
    passed = any(one.passed for one in room.values())
    return [
        exercises if passed else f"No exercise passes yet ({students}).",
        guesses if guesses.rows else "Nothing has been predicted yet.",
    ]


def spread(counter: Counter) -> str:
    """The answers, most frequent first: `48 (12), 24 (3), and 2 others`."""
    first = counter.most_common(SHOWN)
    others = sum(counter.values()) - sum(many for _, many in first)
    words = [f"{answer} ({many})" for answer, many in first]
    return ", ".join(words) + (f", and {others} other{'s' * (others > 1)}" if others else "")


def picture(room: Mapping[str, Progress]) -> Any:
    """A panel for each prediction, with a bar for each answer."""
    from zerolab.lab.plots import style

    counts = predictions(room.values())
    rows = max(1, -(-len(counts) // 3))
    total = sum(many for counter in counts.values() for answer, many in counter.items() if answer != SKIPPED)
    sentence = f"{total} predictions by {len(room)} students: the most frequent answers, and how many gave each."
    figure = style.frame("What the class predicted", f"{len(room)} students", sentence, (9.0, 1.6 + 1.5 * rows))
    top, bottom, height = 1 - 1.1 / figure.get_figheight(), 0.5 / figure.get_figheight(), 1.5 / figure.get_figheight()
    for i, (id, counter) in enumerate(counts.items()):
        left, up = 0.14 + 0.32 * (i % 3), max(bottom, top - height * (i // 3 + 1))
        axes = figure.add_axes((left, up + 0.12 * height, 0.17, 0.62 * height))
        style.plain(axes)
        answers = counter.most_common(SHOWN)[::-1]
        axes.barh(range(len(answers)), [many for _, many in answers], 0.7, color=style.COLOURS["communication"])
        words = [answer for answer, _ in answers]
        axes.set_yticks(range(len(answers)), words, fontsize=8, parse_math=False)  # a `$` in an answer is just a `$`
        axes.set_xticks([])
        axes.set_xlim(0, max(1, len(room)))
        axes.set_ylim(len(answers) - SHOWN - 0.5, len(answers) - 0.5)
        axes.set_title(id, fontsize=10, loc="left", color=style.INK)
        for y, (_, many) in enumerate(answers):
            axes.text(many, y, f" {many}", va="center", fontsize=8, color=style.GREY)
    return figure


def rooms(folder: Path) -> dict[str, Progress]:
    """The progress of each student who has a folder in the classroom's."""
    return {home.name: read(home / "work" / "my") for home in sorted(folder.glob("student-*")) if home.is_dir()}


def teacher_view(rows: Sequence[Sequence[str]], title: str) -> Any:
    """The table on the teacher's terminal, with names."""
    from zerolab.measure.units import table

    result = table(title, ["student", "port", "GPUs"], ["left", "notebooks", "ranks", "memory", "pass", "predicted"])
    gpus = result.columns[2]  # names may be long, but must not squeeze the other columns
    gpus.no_wrap, gpus.overflow = False, "fold"
    for row in rows:
        result.add_row(*row)
    return result
