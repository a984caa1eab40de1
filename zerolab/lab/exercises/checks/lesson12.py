"""Lesson 12: top-k with error feedback. What an answer sends is compared with what every rank should have sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.checks.lesson04 import CALLERS, KEPT_BUFFER, check_waited
from zerolab.lab.exercises.checks.values import check_tensor, in_case, nan_in_fresh_memory
from zerolab.lab.exercises.exercise import SUMMED, Exercise, World, Wrong
from zerolab.lab.exercises.spy import GaveUp

FORGETS = "nothing is kept of what was not sent: add self.residual to the gradient first, and keep the rest in it"
KEEPS_SENT = "what has been sent is still in the residual, and will be sent again: set those elements to 0"
DROPS_OLD = "the residual is only what was left of the last gradient: what was left before is lost. Keep acc, not grad"
BY_GRAD = "the k elements were chosen by the gradient alone: what waits in the residual must count as well"
SENDS_GRAD = "the values sent are the gradient's, without the residual: send gradient + residual there"
SIGNED = "the k largest by sign, so that large negative elements never go: choose by magnitude, abs()"
MAGNITUDES = "magnitudes were sent, and the sign is lost: topk(acc.abs()) gives the indices; send acc[indices]"
SMALLEST = "those are the k smallest"
OVERWRITES = (
    "two ranks chose the same element, and one overwrote the other: dense[indices] = values, and also +=, count an "
    "index once. Use index_add_(0, indices, values), or go rank by rank"
)
OWN_ALONE = "this rank's own k elements alone: add up what all ranks sent"
OTHERS_ALONE = "this rank's own k elements are missing from the mean"
FROM_MEAN = "the residual is the difference to the mean: it must be the difference to what THIS rank has sent"
UNION = "the residual was cleared wherever any rank has sent: this rank has sent its own k elements only"
RANK_0S = "the indices of one rank were used for all: every rank chooses its own, and sends them with the values"
OWN_PLACES = "the others' values were put at this rank's indices: each rank's values go where its own indices say"
BY_COUNT = "divided by the number of ranks that sent the element: a rank that did not send counts with 0. Divide by N"
BY_K = "divided by k: the mean is over the ranks"
NOTHING_LEFT_OUT = "that is the mean of everything: each rank sends its k largest elements, and no more"
DIVIDED_FIRST = (
    "the residual is the difference to what was sent divided by N: the division is no loss to be made up for"
)
NEGATIVE = "the residual was subtracted: it is what has not been sent yet, so it must be added"
TWICE = "the residual was added twice"
STUCK = "the residual is that of the first call: it must be replaced in every call"
PILES_UP = (
    "the old residual is in it twice: gradient + residual, without what was sent, is the new one. Replace, do not add"
)
ONE_MORE = "one element too many goes: topk(self.k)"
ONE_LESS = "one element too few goes: topk(self.k)"
NOT_DIVIDED_RESIDUAL = "the residual was divided by N: only the sum over the ranks is"
SHARED = "two objects share a residual: it belongs to self, and must not be a default argument or a class variable"
ALIAS = "what is kept, or returned, is the caller's tensor or a view of it, or the other way round: keep a copy"
DTYPE = "right in float32 only: make tensors like `grad`, with torch.zeros_like(grad)"
INDICES = "indices were sent as floating-point numbers: bfloat16 counts only to 256. Send them as integers"
TOO_MUCH = "each rank sends k values and k indices, 12 bytes for each in float32 with int64, and nothing else"
DENSE = "the zeros travel as well: the all-reduce of a mostly empty tensor sends as much as that of a full one"
PICKLES = "the *_object functions pickle, which adds bytes: send two tensors, the values and the indices"
GROWS = "what is kept grows with every call: one residual of the gradient's length is enough"
ZEROS = "right as long as every gradient has something in it: a residual is sent even if the gradient is 0"
SMALLER = "the indices are int64: in int32 they take half as many bytes"
SIZES = {"must match the size": SHARED, "out of bounds": SHARED}
GLOOS_DTYPES = "gloo has no collective for this dtype: send the indices in int32 or int64"
CHANGED_K = "right for one k only: use self.k"

STEPS = 5
Grads = list[list[Tensor]]  # [step][rank]


def variants() -> dict[str, str]:
    """Name in `step` of each known mistake -> what to say about it. Those that explain most come first."""
    return {
        "forgets": FORGETS,
        "keeps sent": KEEPS_SENT,
        "drops old": DROPS_OLD,
        "by grad": BY_GRAD,
        "sends grad": SENDS_GRAD,
        "signed": SIGNED,
        "magnitudes": MAGNITUDES,
        "smallest": SMALLEST,
        "last wins": OVERWRITES,
        "first wins": OVERWRITES,
        "dense": NOTHING_LEFT_OUT,
        "own alone": OWN_ALONE,
        "others alone": OTHERS_ALONE,
        "from mean": FROM_MEAN,
        "from sum": FROM_MEAN,
        "union": UNION,
        "rank 0's": RANK_0S,
        "own places": OWN_PLACES,
        "by count": BY_COUNT,
        "by k": BY_K,
        "divided first": DIVIDED_FIRST,
        "negative": NEGATIVE,
        "twice": TWICE,
        "divided residual": NOT_DIVIDED_RESIDUAL,
        "stuck": STUCK,
        "piles up": PILES_UP,
        "one more": ONE_MORE,
        "one less": ONE_LESS,
    }


def play(grads: Grads, k: int, how: str = "") -> list[list[Tensor]]:
    """What each rank returns in each step, in float64. how: "" or a mistake of `variants`."""
    N = len(grads[0])
    residuals = [torch.zeros_like(grad, dtype=torch.float64) for grad in grads[0]]
    found = []
    for of_step in grads:
        found.append(_step([grad.double() for grad in of_step], residuals, k, N, how))
    return found


def _step(grads: list[Tensor], residuals: list[Tensor], k: int, N: int, how: str) -> list[Tensor]:
    sign = {"negative": -1.0, "twice": 2.0, "forgets": 0.0}.get(how, 1.0)
    accs = [grad + sign * residual for grad, residual in zip(grads, residuals, strict=True)]
    k = max(0, min(len(grads[0]), k + {"one more": 1, "one less": -1}.get(how, 0)))
    by = {"by grad": [grad.abs() for grad in grads], "signed": accs}.get(how, [acc.abs() for acc in accs])
    chosen = [score.topk(k, largest=how != "smallest").indices for score in by]
    if how == "rank 0's":
        chosen = [chosen[0]] * N
    values = {"sends grad": grads, "magnitudes": [acc.abs() for acc in accs]}.get(how, accs)
    sent = []
    for value, indices in zip(values, chosen, strict=True):
        sparse = torch.zeros_like(value)
        sparse[indices] = value[indices]
        sent.append(sparse)
    total = torch.stack(grads if how == "dense" else sent).sum(0)
    if how in ("last wins", "first wins"):
        total = torch.zeros_like(total)
        pairs = list(zip(sent, chosen, strict=True))
        for sparse, indices in pairs if how == "last wins" else reversed(pairs):
            total[indices] = sparse[indices]
    touched = torch.stack([torch.zeros_like(total).index_fill_(0, indices, 1) for indices in chosen]).sum(0)
    divisor = touched.clamp(min=1) if how == "by count" else torch.tensor(max(k, 1) if how == "by k" else N)
    means = [total / divisor] * N
    if how == "own alone":
        means = [sparse / N for sparse in sent]
    if how == "own places":
        all_values = torch.stack([value[indices] for value, indices in zip(values, chosen, strict=True)]).sum(0)
        means = [torch.zeros_like(total).index_add_(0, indices, all_values) / N for indices in chosen]
    if how == "others alone":
        means = [(total - sparse) / N for sparse in sent]
    for rank, (acc, indices) in enumerate(zip(accs, chosen, strict=True)):
        left = (grads[rank] if how == "drops old" else acc).clone()
        if how == "from mean":
            left -= means[rank]
        elif how == "from sum":
            left -= total
        elif how == "divided first":
            left -= sent[rank] / N
        elif how == "union":
            left[touched > 0] = 0
        elif how != "keeps sent":
            left[indices] = 0
        if how == "stuck" and residuals[rank].any():
            continue
        if how == "piles up":
            left += residuals[rank]
        residuals[rank] = left / N if how == "divided residual" else left
    return means


def _is_clear(grads: Grads, k: int) -> bool:
    """Whether no choice is a tie, two ranks choose the same element, and something that waited is sent."""
    N, collided = len(grads[0]), len(grads[0]) == 1
    residuals = [torch.zeros_like(grad, dtype=torch.float64) for grad in grads[0]]
    for of_step in grads:
        accs = [grad.double() + residual for grad, residual in zip(of_step, residuals, strict=True)]
        for acc in accs:
            ranked = acc.abs().sort(descending=True).values
            if ranked[k - 1] == ranked[k] or not ranked[k - 1]:
                return False
        chosen = torch.cat([acc.abs().topk(k).indices for acc in accs])
        collided |= len(chosen.unique()) < len(chosen)
        _step([grad.double() for grad in of_step], residuals, k, N, "")
    right = play(grads, k)
    return collided and all(
        any(not torch.allclose(a, b) for one, other in zip(right, play(grads, k, how)) for a, b in zip(one, other))
        for how in ("forgets", "keeps sent", "drops old", "by grad", "sends grad", "signed", "twice", "negative")
    )


def make_grads(N: int, length: int, k: int, dtype: torch.dtype = torch.float32, first: int = 0) -> Grads:
    """Small whole numbers, different on every rank and in every step, for which the choice is never a tie."""
    for seed in count(first):
        generator = torch.Generator().manual_seed(seed)
        grads = [
            [torch.randint(-24, 25, (length,), generator=generator).to(dtype) for _ in range(N)] for _ in range(STEPS)
        ]
        if _is_clear(grads, k):
            return grads
    raise AssertionError("count() does not end")


def close(got: Tensor, want: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    rtol = 1e-2 if dtype == torch.bfloat16 else 1e-9 if dtype == torch.float64 else 1e-6
    return torch.allclose(got.double(), want.double(), rtol=rtol, atol=0.0)


def check_topk(answer: Any, world: World) -> None:
    check_sequence(answer, world, 12, 3)
    check_scribbles(answer, world)
    check_objects(answer, world)
    check_dtypes(answer, world)
    check_zeros(answer, world)
    check_everything(answer, world)


def check_sequence(answer: Any, world: World, length: int, k: int) -> None:
    N, rank = world.world_size, world.rank
    grads = make_grads(N, length, k)
    right = play(grads, k)
    compressor = answer.TopK(k)
    returned: list[Tensor] = []
    for step in range(STEPS):
        when = f"call {step + 1}"
        grad = grads[step][rank].clone()
        try:
            with world.record() as calls, nan_in_fresh_memory(), world.blamed(calls):
                got = compressor.mean(grad)
        except GaveUp as error:
            if "Invalid scalar type" in str(error):
                raise Wrong(f"{when}: {error}", GLOOS_DTYPES) from None
            raise
        if not torch.equal(grad, grads[step][rank]):
            raise Wrong(f"{when}: `grad` has changed", CALLERS)
        check_tensor(f"{when}: what mean() returns", got, (length,))
        returned.append(got.clone())
        lost = world.unwaited(calls)
        if not close(got, right[step][rank]):
            likely = f"a forgotten wait: {lost}" if lost else explain(returned, grads, k, rank, calls)
            raise Wrong(difference(when, got, right[step][rank]), likely, values_differ=True)
        check_waited(calls, world)
        check_sent(when, calls, world, k, grad)
        if step == 1:
            before = kept(compressor)
    if kept(compressor) > max(before, 4 * length):
        raise Wrong(f"after {STEPS} calls it keeps {kept(compressor)} bytes, after two {before}", GROWS)


def difference(when: str, got: Tensor, want: Tensor) -> str:
    wrong = ~torch.isclose(got.double(), want.double(), rtol=1e-2 if got.dtype == torch.bfloat16 else 1e-6, atol=0.0)
    at, number = int(wrong.nonzero()[0]), int(wrong.sum())
    some = f"{number} of {len(got)} elements wrong"
    return f"{when}: {some}, the first at [{at}]: {got[at]:g}, expected {want[at]:g}"


def explain(returned: list[Tensor], grads: Grads, k: int, rank: int, calls: list[Any]) -> str:
    """The first mistake that gives everything that was returned so far."""
    N = len(grads[0])
    so_far = grads[: len(returned)]
    for scale in dict.fromkeys((1, N, 1 / N)):
        for how, likely in _candidates(scale):
            played = play(so_far, k, how)
            if all(close(got, scale * of_step[rank]) for got, of_step in zip(returned, played, strict=True)):
                return likely
    if N > 1 and not calls:
        return OWN_ALONE
    return ""


def _candidates(scale: float) -> Iterator[tuple[str, str]]:
    if scale == 1:
        yield from variants().items()
        return
    yield "", SUMMED if scale > 1 else "divided by N twice"
    for how, likely in variants().items():
        yield how, f"{likely}; and it was {'summed, not averaged' if scale > 1 else 'divided by N twice'}"


def check_sent(when: str, calls: list[Any], world: World, k: int, grad: Tensor) -> None:
    N = world.world_size
    sent, allowed = sum(call.sent for call in calls), (N - 1) * k * (grad.element_size() + 8)
    if N == 1:
        return
    if sent > allowed:
        ops = ", ".join(dict.fromkeys(call.op for call in calls))
        likely = PICKLES if "object" in ops else DENSE if "reduce" in ops else TOO_MUCH
        raise Wrong(f"{when}: {sent:,.0f} bytes were sent per rank, not {allowed:,} ({ops})", likely)
    if sent > (N - 1) * k * (grad.element_size() + 4):
        world.note(SMALLER)


def kept(compressor: Any) -> int:
    """Bytes of the tensors that the object holds, however it holds them."""
    seen: dict[int, int] = {}

    def look(thing: Any, depth: int = 0) -> None:
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
        elif isinstance(thing, dict) and depth < 5:
            for value in thing.values():
                look(value, depth + 1)
        elif isinstance(thing, (list, tuple, set)) and depth < 5:
            for value in thing:
                look(value, depth + 1)

    look(vars(compressor) if hasattr(compressor, "__dict__") else {})
    return sum(seen.values())


def check_scribbles(answer: Any, world: World) -> None:
    """The caller writes over its gradient, and over what it was given."""
    N, rank = world.world_size, world.rank
    grads = make_grads(N, 9, 2, first=500)
    right = play(grads, 2)
    compressor = answer.TopK(2)
    earlier: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        when = f"call {step + 1}, after the caller has changed `grad` and the result of the call before"
        grad = grads[step][rank].clone()
        with world.record(), in_case(answer, "another object, for 9 elements with k = 2", CHANGED_K, SIZES):
            got = compressor.mean(grad)
        check_tensor("with k = 2: what mean() returns", got, (9,))
        if not close(got, right[step][rank]):
            raise Wrong(
                difference(when if step else "another object", got, right[step][rank]), ALIAS, values_differ=True
            )
        grad.fill_(1000.0)
        if not close(got, right[step][rank]):
            raise Wrong("the result changes when the caller writes into `grad`", ALIAS)
        if step % 2:
            got.fill_(1000.0)
        else:
            earlier.append((got, right[step][rank]))
    if any(not close(got, want) for got, want in earlier):
        raise Wrong("what an earlier call returned has changed in a later one", KEPT_BUFFER)


def check_objects(answer: Any, world: World) -> None:
    """One object for each unit, of different lengths and k, called in turns."""
    N, rank = world.world_size, world.rank
    sizes = ((7, 1), (12, 3), (12, 4))
    of_all = [make_grads(N, length, k, first=1000) for length, k in sizes]
    right = [play(grads, k) for grads, (_, k) in zip(of_all, sizes, strict=True)]
    compressors = [answer.TopK(k) for _, k in sizes]
    for step in range(STEPS):
        for number, (length, k) in enumerate(sizes):
            when = f"three objects in turns, call {step + 1} of the one with {length} elements and k = {k}"
            with world.record(), in_case(answer, when, SHARED):
                got = compressors[number].mean(of_all[number][step][rank].clone())
            check_tensor(f"{when}: what mean() returns", got, (length,))
            if not close(got, right[number][step][rank]):
                raise Wrong(difference(when, got, right[number][step][rank]), SHARED, values_differ=True)


def check_dtypes(answer: Any, world: World) -> None:
    N, rank = world.world_size, world.rank
    for dtype, length, k in ((torch.float64, 10, 3), (torch.bfloat16, 10, 3)):
        name = str(dtype).removeprefix("torch.")
        grads = make_grads(N, length, k, dtype, first=2000)
        if dtype == torch.float64:  # what float32 would round off
            grads = [[grad * (1 + 2.0**-30) for grad in of_step] for of_step in grads]
        right = play(grads, k)
        compressor = answer.TopK(k)
        for step in range(STEPS):
            when = f"in {name}, call {step + 1}"
            with world.record() as calls, in_case(answer, when, DTYPE):
                got = compressor.mean(grads[step][rank].clone())
            check_tensor(f"{when}: what mean() returns", got, (length,), dtype)
            if not close(got, right[step][rank], dtype):
                raise Wrong(difference(when, got, right[step][rank]), DTYPE, values_differ=True)
            check_sent(when, calls, world, k, grads[step][rank])
    grads = [[torch.zeros(700, dtype=torch.bfloat16) for _ in range(N)]]
    for r, grad in enumerate(grads[0]):
        grad[[301 + r, 555, 699]] = torch.tensor([5.0 + r, -7.0, 3.0], dtype=torch.bfloat16)
    when = "700 elements in bfloat16"
    with world.record(), in_case(answer, when, INDICES):
        got = answer.TopK(3).mean(grads[0][rank].clone())
    check_tensor(f"{when}: what mean() returns", got, (700,), torch.bfloat16)
    if not close(got, (want := play(grads, 3)[0][rank]), torch.bfloat16):
        raise Wrong(difference(when, got, want), INDICES, values_differ=True)


def check_zeros(answer: Any, world: World) -> None:
    """Gradients of zero: what waits is sent all the same, until nothing is left."""
    N, rank = world.world_size, world.rank
    first = [torch.tensor([7.0, -6.0, 5.0, -4.0, 3.0, -2.0]).roll(r) for r in range(N)]
    grads = [first] + [[torch.zeros(6) for _ in range(N)] for _ in range(2)]
    right = play(grads, 2)
    compressor = answer.TopK(2)
    for step in range(3):
        when = "the first gradient" if not step else f"a gradient of zeros, call {step + 1}"
        with world.record(), in_case(answer, when, ZEROS):
            got = compressor.mean(grads[step][rank].clone())
        if not close(check_tensor(f"{when}: what mean() returns", got, (6,)), right[step][rank]):
            raise Wrong(difference(when, got, right[step][rank]), ZEROS, values_differ=True)


def check_everything(answer: Any, world: World) -> None:
    """With k as large as the gradient, this is the plain mean, and nothing waits."""
    N, rank = world.world_size, world.rank
    compressor = answer.TopK(5)
    for step in range(2):
        grads = [torch.arange(1.0, 6.0) * (r + 1 + step) for r in range(N)]
        with world.record(), in_case(answer, "with k = 5 of 5 elements", CHANGED_K):
            got = compressor.mean(grads[rank].clone())
        want = torch.stack(grads).sum(0) / N
        if not close(check_tensor("with k = 5: what mean() returns", got, (5,)), want):
            raise Wrong(difference(f"k = 5 of 5 elements, call {step + 1}", got, want), CHANGED_K, values_differ=True)


GIVEN = '''\
class TopK:
    """Top-k with error feedback, for the gradients of one unit: each call has as many
    elements as the first."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.residual: Tensor | None = None  # what this rank has not sent; None: nothing
'''

STUB = f'''\
import torch
import torch.distributed as dist
from torch import Tensor
from zerolab.lab.exercises import Todo


{GIVEN}
    def mean(self, grad: Tensor) -> Tensor:
        """The mean over all ranks of what each sent: (n,) -> (n,). `grad` stays as it is.

        Each rank sends the k elements of gradient + residual that are largest in magnitude:
        k values and k indices. What it did not send is its new residual. All elements that
        nobody sent are 0 in the mean.
        """
        raise Todo("12.1")
'''

REFERENCE = f"""\
import torch
import torch.distributed as dist
from torch import Tensor


{GIVEN}
    def mean(self, grad: Tensor) -> Tensor:
        left = grad.clone() if self.residual is None else grad + self.residual
        indices = left.abs().topk(self.k).indices
        values, indices = left[indices], indices.to(torch.int32)
        left[indices] = 0
        self.residual = left
        N = dist.get_world_size()
        all_values = [torch.empty_like(values) for _ in range(N)]
        all_indices = [torch.empty_like(indices) for _ in range(N)]
        dist.all_gather(all_values, values)
        dist.all_gather(all_indices, indices)
        mean = torch.zeros_like(grad)
        mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))
        return mean / N
"""

ERRORS = {
    "unsupported operand type(s) for +: 'Tensor' and 'NoneType'": "before the first call there is no residual: None",
    "tensors used as indices must be long": "an index must be an integer tensor: .to(torch.int32) or .long()",
    "index_add_(): Expected dtype int32/int64 for index": "an index must be an integer tensor: int32 or int64",
    "`tensor_list` of type List": "all_gather takes a list of tensors, one for each rank",
    "invalid output tensor list": "all_gather takes as many tensors as there are ranks: dist.get_world_size()",
}

EXERCISES = [
    Exercise(
        id="12.1",
        title="top-k with error feedback",
        difficulty=2,
        section="Send the largest, remember the rest",
        check=check_topk,
        stub=STUB,
        reference=REFERENCE,
        hints=(
            "Add the residual to the gradient (a new tensor: the caller needs `grad`). left.abs().topk(self.k).indices "
            "are the places to send, left[indices] the values. Then set left[indices] = 0: that is the new residual.",
            "Every rank chooses other places, so an all-reduce cannot add the values. dist.all_gather(list_of_N, mine) "
            "once for the values and once for the indices gives everyone all k pairs of all ranks.",
            "zeros_like(grad), then index_add_(0, indices, values) for every rank: it also adds where two ranks chose "
            "the same place. Divide by the number of ranks.",
        ),
        exports=("TopK",),
        errors=ERRORS,
    ),
]
