"""What differs between two tapes, that of the reference and that of an answer: in words, and as marks.

The first difference is what a learner reads. All of them together, as marks, tell which mistake an answer is like:
marks speak of ranks as "mine", "one to the left", so that the same mistake leaves the same marks on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.observing import Container, Event, Plain, Play, Seen, TensorSeen
from zerolab.lab.exercises.values import counted, factor, in_words, shares_in

# By dtype: how far sums in another order may lie apart, relative to the value.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}
# What to look at when an answer is like no known mistake.
KINDS = {
    "nothing": "the function returns nothing here: `return` is missing, or was not reached",
    "empty": "nothing was put in this place: follow by hand which place is filled when",
    "type": "the result is another kind of thing than the docstring says",
    "shape": "compare the shape with the one in the docstring",
    "length": "compare the number of items with what the docstring says",
    "keys": "compare its keys with those that the docstring names",
    "dtype": "the dtype must be that of the inputs, unless the text says otherwise",
    "device": "what is made anew belongs on the device of the inputs: torch.zeros(..., device=...)",
    "gradient": "autograd was recording, or was not: look for detach(), torch.no_grad() and nn.Parameter",
    "parameter": "a plain tensor and an nn.Parameter are not the same thing: see the docstring",
    "fresh": "NaN: here torch.empty() gives it where nothing was written since, and 0 / 0 and inf - inf give it too",
    "parts": "see whose parts are in it and whose should be: that tells where the wrong one came in",
    "values": "follow one element by hand through the smallest case that fails, on this rank",
    "number": "work this number out by hand for the case that is named, and compare it with what each line gives",
    "words": "compare the two from left to right: where they part, the answer does something else than is asked for",
    "fact": "the text asks for this: read it again with this case in mind",
    "bytes": "count what the reference sends, call by call: something is sent that nobody needs",
    "calls": "the exercise says which functions may send something: use those",
    "waiting": "a collective with async_op=True is not over when it returns: keep what it returns, and wait()",
    "meddling": "between the start of a collective and its wait, its tensors belong to it: change them before or after",
    "state": "the answer leaves something behind that was not there before: put it back, or do not touch it",
    "changed": "this must stay as it is: work on a copy",
    "bound": "less will do: of memory, see what refers to it (a view, a list, an attribute); of calls, one to omit",
}
# The same, where wrong values themselves say more: by how the detail of a difference in "values" begins.
MADE = {
    "zero": "nothing has come here: it was not written, or to another tensor, or zeros came later",
    "infinite": "a division by zero, or a number that the dtype cannot hold",
    "rounded": "right to seven digits: on the way it was in a narrower dtype than it should be",
    "the part": "another rank's part is at this place: see in which order the ranks' parts come, and whose is needed",
    "times": "right but for a factor: look for a division or a multiplication too many, too few, or by another number",
    "[": "compare the two lists from left to right: where they part, the answer does something else than is asked for",
    "another order": "every element is there, in another place: follow the indices",
}
# And where it is known whose parts of what they are.
OF_PARTS = {
    "mixed": "parts of different things were added up: what comes in has another number than what it was added to",
    "elsewhere": "this is what belongs in another place: follow which number is on which rank, and when",
    "factor": MADE["times"],
    "another's": MADE["the part"],
    "twice": "a part is in it more often than it should be: something was added again, or came round again",
    "missing": "a part is missing: it has not come here, or something else was passed on in its place",
}

NOTHING = Plain("NoneType", None)

Part = tuple[str, int | None, list[float]]  # a base's name and number, and how often each rank's part of it is there


@dataclass(frozen=True)
class Difference:
    kind: str  # of KINDS
    where: str  # the event and what was looked at, as in a mark
    seen: str  # in words
    detail: str = ""  # relative to the rank, and the same on all
    parts: str = ""  # of OF_PARTS

    @property
    def marks(self) -> list[str]:
        """From coarse to fine: two answers that share the fine one share the coarse ones."""
        coarse = [f"{self.kind}", f"{self.where} {self.kind}"]
        return [*coarse, f"{self.where} {self.kind} {self.detail}"] if self.detail else coarse

    @property
    def about(self) -> str:
        """What to look at, if the answer is like no known mistake."""
        if self.parts:
            return OF_PARTS[self.parts]
        made = [said for start, said in MADE.items() if self.kind == "values" and self.detail.startswith(start)]
        return (made or [KINDS[self.kind]])[0]


def compared(reference: Play, answer: Play) -> Iterator[Difference]:
    """The differences in the order in which they came about."""
    for right, ours in zip(reference.tape, answer.tape, strict=False):
        yield from _values(right, ours, answer)
        if ours.over:
            yield from _sending(right, ours)
        for name, most in right.bounds.items():
            if (found := ours.bounds.get(name, most)) > most:
                yield Difference("bound", f"{right.name} {name}", f"{name}: {found:,.15g}, at most {most:,.15g}")


def clues(reference: Play, answer: Play) -> list[str]:
    """Marks of what an answer may choose, and may tell one mistake from another."""
    found = []
    for right, ours in zip(reference.tape, answer.tape, strict=False):
        found += [f"{ours.name} {name} {clue}" for name, clue in ours.clues.items() if clue != right.clues.get(name)]
        if (more := len(ours.traffic) - len(right.traffic)) != 0:
            found.append(f"{ours.name} calls {more:+}")
        ops, usual = ({call.op + "..." * call.asynchronous for call in event.traffic} for event in (ours, right))
        found += [f"{ours.name} by {' '.join(sorted(ops))}"] if ops != usual else []
    return found


# ---------------------------------------------------------------------- what is there


def _values(right: Event, ours: Event, play: Play) -> Iterator[Difference]:
    for name, want in right.seen.items():
        where = f"{right.name} {name}"
        if name in right.results and ours.seen.get(name) == NOTHING != want:
            yield Difference("nothing", where, f"{name} is None", "NoneType")
        elif name in ours.seen:
            found = _of(want, ours.seen[name], where, name, play)
            before = (event.before.get(name, want) for event in (right, ours))
            if name in right.before and not any(any(_of(want, was, where, name, play)) for was in before):
                found = (replace(difference, kind="changed") for difference in found)
            said = f": {ours.said[name]}" if ours.said.get(name) else ""
            yield from (replace(difference, seen=f"{difference.seen}{said}") for difference in found)


def _of(want: Seen, got: Seen, where: str, name: str, play: Play) -> Iterator[Difference]:
    if isinstance(want, TensorSeen) and isinstance(got, TensorSeen):
        yield from _of_tensors(want, got, where, name, play)
    elif isinstance(want, Container) and isinstance(got, Container) and want.kind == got.kind:
        yield from _of_containers(want, got, where, name, play)
    elif isinstance(want, Plain) and isinstance(got, Plain) and want.kind == got.kind:
        yield from _of_plain(want, got, where, name)
    elif got == NOTHING and not isinstance(want, Plain):
        yield Difference("empty", where, f"{name} is None", got.kind)
    elif isinstance(want, Plain) and isinstance(got, Plain) and (got == NOTHING or got.value is not None):
        seen = f"{name} is {got.value!r}, expected {want.value!r}"
        yield Difference("values" if NOTHING in (want, got) else "type", where, seen, f"{got.kind} {got.value!r}")
    else:
        yield Difference("type", where, f"{name} is a {got.kind}, not a {want.kind}", got.kind)


def _of_containers(want: Container, got: Container, where: str, name: str, play: Play) -> Iterator[Difference]:
    if (said := _short(want)) and (instead := _short(got)) and said != instead:
        yield Difference("values", where, f"{name} is {instead}, expected {said}", instead)
        return
    if want.kind == "list" and len(want.items) != len(got.items):
        seen = f"{name} has {counted(len(got.items), 'item')}, not {len(want.items)}"
        yield Difference("length", where, seen, f"{len(got.items) - len(want.items):+}")
    elif missing := [key for key in want.items if key not in got.items]:
        yield Difference("keys", where, f"{name} has no {missing[0]!r}", repr(missing[0]))
    elif more := [key for key in got.items if key not in want.items]:
        yield Difference("keys", where, f"{name} has {more[0]!r}, which does not belong there", "more")
    for key in want.items:
        if key in got.items:
            place = f"{name.removeprefix('the ')}[{key!r}]"
            by_rank = want.kind == "list" and len(want.items) == play.size  # one item for each rank
            relative = (key - play.rank) % play.size if by_rank else key
            yield from _of(want.items[key], got.items[key], f"{where} [{relative}]", place, play)


def _of_plain(want: Plain, got: Plain, where: str, name: str) -> Iterator[Difference]:
    close = want.value == got.value
    if isinstance(want.value, float) and isinstance(got.value, float):
        close = math.isclose(want.value, got.value, rel_tol=1e-6) or (want.value != want.value != got.value)
    if close:
        return
    if "random state" in name:
        yield Difference("state", where, f"{name} has changed")
    elif want.kind == "bool" and not name.startswith("torch."):
        yield Difference("fact", where, f"not so: {name}" if want.value else f"it should not be so: {name}")
    else:
        kinds = {"str": "words", "int": "number", "float": "number"}
        kind = "state" if name.startswith("torch.") else kinds.get(want.kind, "values")
        detail = f"{got.value:.5g}" if isinstance(got.value, float) else repr(got.value)
        yield Difference(kind, where, f"{name} is {got.value!r}, expected {want.value!r}", detail)


def _short(seen: Container) -> str:
    """A list of a few words or whole numbers, or of tuples of them, as Python writes it; "" for any other."""
    items = [_item(item) for item in seen.items.values()]
    return repr(items) if seen.kind == "list" and len(items) <= 8 and None not in items else ""


def _item(seen: Seen) -> Any:
    if isinstance(seen, Plain):
        return seen.value if seen.kind in ("str", "int") else None
    items = tuple(map(_item, seen.items.values())) if isinstance(seen, Container) and seen.kind == "list" else None
    return None if items is None or None in items else items


def _of_tensors(want: TensorSeen, got: TensorSeen, where: str, name: str, play: Play) -> Iterator[Difference]:
    if want.kind != got.kind:
        yield Difference("parameter", where, f"{name} is a {got.kind}, not a {want.kind}", got.kind)
    if want.shape != got.shape:
        yield Difference("shape", where, f"{name} has the shape {got.shape}, not {want.shape}", _shape(want, got))
    if want.dtype != got.dtype:
        yield Difference("dtype", where, f"{name} is {got.dtype}, not {want.dtype}", str(got.dtype))
    if want.device != got.device:
        yield Difference("device", where, f"{name} is on the device {got.device!r}, not {want.device!r}")
    if want.requires_grad != got.requires_grad:
        does = "requires a gradient" if got.requires_grad else "requires no gradient"
        yield Difference("gradient", where, f"{name} {does}", does)
    if want.data is not None and got.data is not None and want.shape == got.shape:
        yield from _of_values(want, got, where, name, play)
    if want.grad is not None and got.grad is not None:
        yield from _of_tensors(want.grad, got.grad, f"{where} grad", f"the gradient of {name}", play)
    elif (want.grad is None) != (got.grad is None):
        kind, some = ("gradient", "a") if want.grad is None else ("empty", "no")
        yield Difference(kind, f"{where} grad", f"{name} has {some} gradient")


def _of_values(want: TensorSeen, got: TensorSeen, where: str, name: str, play: Play) -> Iterator[Difference]:
    assert want.data is not None and got.data is not None
    tolerance = max(TOLERANCE.get(dtype, 0.0) for dtype in (want.dtype, got.dtype))
    a, b = got.data.double(), want.data.double()
    near = max(play.loose, tolerance) * b.abs().max().item() if play.loose and b.numel() else 0.0
    wrong = ~torch.isclose(a, b, rtol=tolerance, atol=near, equal_nan=True)
    if wrong.any():
        fresh = bool(got.data.isnan().any())
        how, detail = _made_of(a, b, play)
        seen = f"{name}: {_which(wrong, got, want)}{how}"
        if " of " in detail:
            yield Difference("parts", where, seen, detail, _astray(_parts(a, play), _parts(b, play)))
        else:
            yield Difference("fresh" if fresh else "values", where, seen, detail)


def _shape(want: TensorSeen, got: TensorSeen) -> str:
    numels = math.prod(got.shape), math.prod(want.shape)
    return "as many elements" if numels[0] == numels[1] else "more" if numels[0] > numels[1] else "fewer"


def _which(wrong: Tensor, got: TensorSeen, want: TensorSeen) -> str:
    assert got.data is not None and want.data is not None
    many, of = int(wrong.sum()), wrong.numel()
    digits = ".17g" if got.dtype == torch.float64 else "g"
    at = tuple(torch.nonzero(wrong)[0].tolist())
    place = f", the first at [{', '.join(map(str, at))}]" if at else ""
    all_of = (
        "its only element is" if of == 1 else f"all {of:,} elements are" if many == of else f"{many:,} of {of:,} are"
    )
    return f"{all_of} wrong{place}: {got.data[at]:{digits}}, expected {want.data[at]:{digits}}"


# ---------------------------------------------------------------------- what values are made of


def _made_of(got: Tensor, want: Tensor, play: Play) -> tuple[str, str]:
    """What the values say about how they came about: in words, and relative to the rank."""
    if got.isnan().any():
        return "", "NaN" if got.isnan().all() else "some NaN"
    if not got.any():
        return "", "zero"
    if got.isinf().any():
        return "", "infinite"
    if torch.allclose(got, want, rtol=1e-5, atol=0.0):
        return "; right to some seven digits only", "rounded"
    if (parts := _parts(got, play)) is not None:
        wanted = f", not {_in_words(right)}" if (right := _parts(want, play)) else ""
        return f"; that is {_in_words(parts)}{wanted}", _relative(parts, play)
    if (k := factor(got, want)) is not None and abs(k - 1.0) > 1e-3:
        steps = round(16 * math.log(k, 16)) if k > 0 else 1  # rank r's part is 16**r times rank 0's: values.py
        if steps % 16 == 0 and abs(k / 16 ** (steps / 16) - 1) < 1e-3 and abs(steps) < 16 * play.size:
            return "; that is another rank's part", f"the part {steps // 16:+} on"
        return f"; that is {k:.4g} times what is expected", f"times {k * play.size:.3g}/N"
    if torch.equal(got.flatten().sort().values, want.flatten().sort().values):
        return "; the elements are there, in another order", "another order"
    sizes = got[got != 0].abs()
    if sizes.max() > 1e12 or sizes.min() < 1e-12:  # whatever was in that memory
        return "", "anything"
    return "", f"{got.sum().item():.3g} {sizes.sum().item():.3g}"  # another answer with this mistake has them too


def _in_words(parts: list[Part]) -> str:
    """ "rank 0's and twice rank 2's parts of chunk 1"."""
    return " and ".join(f"{in_words(shares, 'part')} of {name}" for name, _, shares in parts)


def _relative(parts: list[Part], play: Play) -> str:
    """The same as seen from this rank: alike on all ranks that made the same mistake."""
    marks = []
    for _, number, shares in parts:
        whose = sorted(f"{k:g} of {(rank - play.rank) % play.size}" for rank, k in enumerate(shares) if k)
        marks.append(f"{'' if number is None else (number - play.rank) % play.size}: {', '.join(whose)}")
    return " + ".join(sorted(marks))


def _astray(got: list[Part] | None, want: list[Part] | None) -> str:
    """Which of OF_PARTS tells `got` from `want`. "" if none does."""
    ours, theirs = ({(name, number): shares for name, number, shares in parts or ()} for parts in (got, want))
    if not ours or not theirs:
        return ""
    if ours.keys() != theirs.keys():
        return "elsewhere" if len(ours) == len(theirs) == 1 else "mixed" if ours.keys() - theirs.keys() else "missing"
    pairs = [pair for of, shares in theirs.items() for pair in zip(ours[of], shares, strict=True)]
    times = {k / right if right else math.inf for k, right in pairs if k or right}
    if len(times) == 1 and (len(ours) * len(pairs) > 1 or min(times) < 1):
        return "factor"
    more, less = any(k > right for k, right in pairs), any(k < right for k, right in pairs)
    return "another's" if more and less else "twice" if more else "missing"


def contributions(tensor: Tensor, play: Play) -> str:
    """Whose parts of what `tensor` is the sum of, relative to this rank: for a clue. "" if it is no such sum."""
    return _relative(_parts(tensor.double(), play) or [], play)


def _parts(got: Tensor, play: Play) -> list[Part] | None:
    """What `got` is the sum of, or None if it is no such sum."""
    bases = [(name, *found) for name, found in play.bases.items() if found[1].shape == got.shape]
    if not bases or got.numel() == 0 or not got.isfinite().all():
        return None
    columns = torch.stack([base.flatten().double() for _, _, base in bases], 1)  # (elements, bases)
    singles = [(i, column) for i, column in enumerate(columns.unbind(1))]
    for i, column in singles:
        ratio = got.flatten() / column
        if torch.allclose(ratio, ratio[0].expand_as(ratio), rtol=1e-6, atol=0.0):
            shares = shares_in(ratio[0].item(), play.size)
            return None if shares is None else [(bases[i][0], bases[i][1], shares)]
    if len(bases) >= got.numel():
        return None
    solution = torch.linalg.lstsq(columns, got.flatten()[:, None]).solution.flatten()
    if not torch.allclose(columns @ solution, got.flatten(), rtol=1e-6, atol=0.0):
        return None
    found = []
    for (name, number, _), ratio in zip(bases, solution.tolist(), strict=True):
        if abs(ratio) < 1e-6:
            continue
        if (shares := shares_in(ratio, play.size)) is None:
            return None
        found.append((name, number, shares))
    return found


# ---------------------------------------------------------------------- what was sent


def _sending(right: Event, ours: Event) -> Iterator[Difference]:
    allowed = set(right.uses) if right.uses is not None else None
    name = ours.name
    foreign = [call for call in ours.traffic if allowed is not None and call.op not in allowed]
    if foreign:
        yield Difference("calls", name, f"in {name}: {foreign[0].in_words} was called", foreign[0].op)
    if lost := [call for call in ours.traffic if not call.waited]:
        yield Difference("waiting", name, f"in {name}: {lost[0].in_words} was started, and not waited for", lost[0].op)
    if any(call.touched or call.meddled for call in ours.traffic):
        call = next(call for call in ours.traffic if call.touched or call.meddled)
        what = "result" if call.touched else "input"
        yield Difference("meddling", name, f"in {name}: the {what} of {call.in_words} was changed while it ran", what)
    if any(call.freed for call in ours.traffic):
        yield Difference("meddling", name, f"in {name}: memory was given back while a collective used it", "freed")
    most, sent = sum(call.sent for call in right.traffic), sum(call.sent for call in ours.traffic)
    if sent > most + right.slack + 1e-9:
        calls = f"{counted(len(ours.traffic), 'call')}, the reference's are {len(right.traffic)}"
        seen = f"in {name}: this rank sent {sent:,.15g} bytes, and {most:,.15g} are enough ({calls})"
        more = len(ours.traffic) - len(right.traffic)
        yield Difference("bytes", name, seen, f"{'more' if more > 0 else 'fewer' if more < 0 else 'as many'} calls")
