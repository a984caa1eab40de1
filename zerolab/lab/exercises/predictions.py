"""Predictions: a number first, then what was measured.

    predict("02.1", 4e6)    write down what you expect
    skip("02.1")            go on without a prediction
    reveal("02.1")          show what was measured, and how far off the prediction was

The lessons call `measured("02.1", value, unit)`, so that there is something to reveal.
"""

from __future__ import annotations

from typing import Any

from zerolab.lab.exercises.store import read_progress, write_progress
from zerolab.lab.ranks.report import Misused
from zerolab.measure.units import in_bytes

_measured: dict[str, tuple[Any, str]] = {}  # prediction id -> value and unit

# How many predictions each lesson asks for: 05.1 to 05.4 in lesson 05. A test checks this against the lessons.
PREDICTIONS = {"00": 2, "01": 3, "02": 6, "03": 3, "04": 3, "05": 4, "06": 3, "07": 3, "16": 3}


class NoPrediction(Misused, TypeError):
    """A prediction that is neither a number nor a word."""


def predict(id: str, value: Any = ...) -> None:
    """Write down what you expect before it is measured. `...` means that you have not decided yet."""
    _must_be_asked(id)
    if value is ... or value is None:
        print(f'{id}: replace `...` with the number you expect, or lab.skip("{id}")')
        return
    if not isinstance(value, (int, float, str, list, tuple)) or isinstance(value, bool):
        raise NoPrediction(f"prediction {id} is a {type(value).__name__}: give a number, a word, or a list of them")
    kept = read_progress()
    kept["predictions"][id] = value
    write_progress(kept)
    print(f'{id}: written down; lab.reveal("{id}") compares it with the measurement')


def _must_be_asked(id: Any) -> None:
    """Raises Misused, naming the predictions there are, unless some lesson asks for this one."""
    if not isinstance(id, str):
        raise Misused(f'the name of a prediction is a string such as "01.1", not {id!r}')
    lesson, _, number = id.partition(".")
    if lesson not in PREDICTIONS:
        near = lesson.zfill(2)
        known = f"lessons {', '.join(PREDICTIONS)} have predictions"
        if near in PREDICTIONS:
            known = f"lesson {near} has {_numbers(near)}"
        raise Misused(f"there is no prediction {id!r}; {known}")
    if number not in map(str, range(1, PREDICTIONS[lesson] + 1)):
        raise Misused(f"there is no prediction {id!r}; lesson {lesson} has {_numbers(lesson)}")


def _numbers(lesson: str) -> str:
    return ", ".join(f"{lesson}.{number}" for number in range(1, PREDICTIONS[lesson] + 1))


def skip(id: str) -> None:
    """Go on without a prediction: `reveal` then shows the measured value."""
    _must_be_asked(id)
    kept = read_progress()
    kept["predictions"][id] = None
    write_progress(kept)
    print(f"{id}: skipped")


def predicted(id: str) -> bool:
    """For the lessons: has it been predicted or skipped? Until then no picture may give it away."""
    _must_be_asked(id)
    return id in read_progress()["predictions"]


def measured(id: str, value: Any, unit: str = "") -> None:
    """For the lessons: the measured value, for `reveal(id)` to show. Unit "bytes" is shown as kB, MB or GB."""
    _must_be_asked(id)
    _measured[id] = (value, unit)


def reveal(id: str) -> None:
    """Print what was measured and how far off the prediction was; without a prediction, print neither."""
    _must_be_asked(id)
    predictions = read_progress()["predictions"]
    if id not in predictions:
        print(f'{id}: first lab.predict("{id}", what you expect), or lab.skip("{id}")')
        return
    if id not in _measured:
        print(f"{id}: not measured yet: run the cells above, including those that begin with %%ranks")
        return
    (value, unit), guess = _measured[id], predictions[id]
    shown = _with_unit(value, unit)
    if guess is None:
        print(f"{id}: measured {shown}")
    elif isinstance(value, (int, float)) and isinstance(guess, str):
        wanted = f"a number of {unit}" if unit else "a number"
        print(f'{id}: you said {guess!r}, but this needs {wanted}, without the unit: lab.predict("{id}", number) again')
    else:
        print(f"{id}: measured {shown}; you said {_with_unit(guess, unit)}: {_how_far_off(guess, value)}")


def _with_unit(value: Any, unit: str) -> str:
    if isinstance(value, (int, float)) and unit == "bytes":
        return in_bytes(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"{number} {unit}".strip()


def _how_far_off(guess: Any, value: Any) -> str:
    numbers = isinstance(guess, (int, float)) and isinstance(value, (int, float))
    if guess == value or (isinstance(value, (list, tuple)) and guess == list(value)):  # JSON has no tuples
        return "exactly right"
    if not numbers:
        return "not the same"
    if value == 0 or guess == 0:
        return f"off by {abs(guess - value):,}"
    ratio = guess / value
    if 0 < ratio < 0.5 or ratio >= 2:
        return f"{ratio:.3g} times the measured value"
    off = 100 * (ratio - 1)
    return "less than 0.1 % off" if abs(off) < 0.1 else f"{abs(off):.3g} % too {'much' if off > 0 else 'little'}"
