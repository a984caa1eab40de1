"""Predictions: a number first, then what was measured.

    predict("02.1", 4e6)    write down what you expect; "4 MB" will do
    skip("02.1")            go on without a prediction
    reveal("02.1")          show what was measured, and how far off the prediction was

The lessons call `measured("02.1", value)`, so that there is something to reveal. What each prediction asks for, and
which slips are known, is in questions.py.
"""

from __future__ import annotations

import math
import re
from typing import Any

from zerolab.lab.exercises.cards import say
from zerolab.lab.exercises.questions import QUESTIONS, Question
from zerolab.lab.exercises.store import read_progress, write_progress
from zerolab.lab.ranks.report import Misused
from zerolab.measure.units import in_bytes

_measured: dict[str, Any] = {}  # prediction id -> value

# How many units one such unit is, by what a number is asked for in.
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30}
_BYTES = {prefix + name: size for prefix, size in _PREFIXES.items() for name in ("b", "byte", "bytes")}
_TIMES = {"x": 1.0, "×": 1.0, "times": 1.0, "%": 0.01}
_UNITS = {
    "bytes": _BYTES,
    "MB": {name: size / 1e6 for name, size in _BYTES.items()},
    "GB": {name: size / 1e9 for name, size in _BYTES.items()},
    "ms": {"ms": 1.0, "s": 1e3, "us": 1e-3, "µs": 1e-3},
    "× DDP's bytes": _TIMES,
    "× float32's bytes": _TIMES,
    "× DDP's bandwidth": _TIMES,
    "FLOP per byte": {"flop": 1.0, "flops": 1.0, "flop/byte": 1.0, "flops/byte": 1.0, "flop/b": 1.0, "kflop": 1e3},
    "× the arithmetic": _TIMES,
    "× the gradient": _TIMES,
}


class NoPrediction(Misused, TypeError):
    """What was given is no answer to the question."""


def predict(id: str, value: Any = ...) -> None:
    """Write down what you expect before it is measured. `...` means that you have not decided yet."""
    question = _find(id)
    if value is ... or value is None:
        say(f'{id}: replace `...` with {_wanted(question)}, or lab.skip("{id}")', "open")
        return
    guess = _understand(id, question, value)
    kept = read_progress()
    kept["predictions"][id] = guess
    write_progress(kept)
    guessed = _with_unit(guess, question)
    say(f'{id}: {guessed}, written down; lab.reveal("{id}") compares it with the measurement', "prediction")


def _find(id: Any) -> Question:
    """Raises Misused, naming the predictions there are, unless some lesson asks for this one."""
    if not isinstance(id, str):
        raise Misused(f'the name of a prediction is a string such as "01.1", not {id!r}')
    if id in QUESTIONS:
        return QUESTIONS[id]
    lesson = id.partition(".")[0]
    lesson = lesson if lesson in _lessons() else lesson.zfill(2)
    if lesson in _lessons():
        known = f"lesson {lesson} has {', '.join(other for other in QUESTIONS if other.startswith(lesson + '.'))}"
    else:
        known = f"lessons {', '.join(_lessons())} have predictions"
    raise Misused(f"there is no prediction {id!r}; {known}")


def _lessons() -> list[str]:
    return list(dict.fromkeys(id.partition(".")[0] for id in QUESTIONS))


def _wanted(question: Question) -> str:
    if question.words:
        return " or ".join(f'"{word}"' for word in question.words)
    special = {
        "": "a number",
        "bytes": 'a number of bytes (4e6 and "4 MB" are the same)',
        "× DDP's bytes": "a multiple of DDP's bytes (1.5 is half as much again)",
        "× float32's bytes": "a multiple of float32's bytes (1.5 is half as much again)",
        "%": "a percentage",
        "× DDP's bandwidth": "a multiple of DDP's bandwidth (1.5 is half as much again)",
        "× the arithmetic": "a multiple of the arithmetic without it (1.5 is half as much again)",
        "× the gradient": "a multiple of the gradient's length (1 is as long)",
    }
    return special.get(question.unit, f"a number of {question.unit}")


def _understand(id: str, question: Question, value: Any) -> float | str:
    """The answer as a number in the question's unit, or one of its words."""
    if question.words:
        if isinstance(value, str) and value.strip().lower() in question.words:
            return value.strip().lower()
    elif isinstance(value, str):
        if (number := _number_in(value, question)) is not None:
            return number
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0:
        return value
    shown = repr(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"
    raise NoPrediction(f"{id} asks for {_wanted(question)}, not {shown}; nothing was written down")


def _number_in(text: str, question: Question) -> float | None:
    """The number in "5.2 MB", "1,263,616", "1.26e6" or "3 Ψ", in the question's unit."""
    match = re.fullmatch(r"\s*[~≈]?\s*([\d,_]*\.?\d+(?:e[+-]?\d+)?|[\d,_]+\.?)\s*(\D*?)\s*", text, re.IGNORECASE)
    if match is None:
        return None
    digits, unit = match[1].replace("_", ""), match[2].lower()
    if "," in digits and not re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d*)?", digits):
        return None  # 5,2 may mean 5.2
    number = float(digits.replace(",", ""))
    if unit in ("ψ", "psi") and question.psi:
        return number * question.psi
    if unit in ("", question.unit.lower(), *question.unit.lower().split()[:1]):
        return int(number) if number.is_integer() else number
    factor = _UNITS.get(question.unit, {}).get(unit)
    return None if factor is None else number * factor


def skip(id: str) -> None:
    """Go on without a prediction: `reveal` then shows the measured value."""
    _find(id)
    kept = read_progress()
    kept["predictions"][id] = None
    write_progress(kept)
    say(f"{id}: skipped", "open")


def predicted(id: str) -> bool:
    """For the lessons: has it been predicted or skipped? Until then no picture may give it away."""
    _find(id)
    return id in read_progress()["predictions"]


def measured(id: str, value: Any, unit: str = "") -> None:
    """For the lessons: the measured value, for `reveal(id)` to show, in the question's unit. `unit` is not used."""
    _find(id)
    _measured[id] = value


def reveal(id: str) -> None:
    """Print what was measured and how far off the prediction was; without a prediction, print neither."""
    question = _find(id)
    predictions = read_progress()["predictions"]
    if id not in predictions:
        say(f'{id}: first lab.predict("{id}", what you expect), or lab.skip("{id}")', "open")
        return
    if id not in _measured:
        say(f"{id}: not measured yet: run the cells above, including those that begin with %%ranks", "open")
        return
    value, guess = _measured[id], predictions[id]
    shown = _with_unit(value, question)
    if guess is None:
        say(f"{id}: measured {shown}", "prediction")
        return
    try:  # what an earlier version of the course wrote down may be in words
        guess = _understand(id, question, guess)
    except NoPrediction:
        wanted = _wanted(question)
        say(f'{id}: you said {guess!r}, but this asks for {wanted}: lab.predict("{id}", ...) again', "open")
        return
    said = f"{id}: {'it is' if question.against else 'measured'} {shown}; you said {_with_unit(guess, question)}: "
    if question.formula is not None and _close(guess, question.formula):
        say(f"{said}what the formula gives. {question.beside_formula}", "right")
        return
    slip = "" if guess == value else question.slip(guess, value)
    kind = "right" if guess == value or _close(guess, value) else "wrong"
    say(said + _how_far_off(guess, value) + (f". {slip}" if slip else ""), kind)


def _with_unit(value: Any, question: Question) -> str:
    if isinstance(value, (int, float)) and question.unit == "bytes":
        return in_bytes(value)
    number = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}" if isinstance(value, float) else str(value)
    return f"{number} {question.unit}".strip()


def _close(guess: Any, value: Any) -> bool:
    return isinstance(guess, (int, float)) and math.isclose(guess, value, rel_tol=0.01)


def _how_far_off(guess: Any, value: Any) -> str:
    numbers = isinstance(guess, (int, float)) and isinstance(value, (int, float))
    if guess == value:
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
