"""Lesson 12: top-k with error feedback."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene
from zerolab.lab.exercises.values import storages_in

SMALLER = "the indices are int64: in int32 they take half as many bytes"

Grads = list[list[Tensor]]  # [step][rank]


def gradients(N: int, length: int, k: int, steps: int = 5, most: int = 17, dtype: torch.dtype = torch.float32) -> Grads:
    """Multiples of 1.5, so that means are exact in any order, and such that the choice is never a tie."""
    of_ranks: list[list[Tensor]] = []
    for seed in count():
        generator = torch.Generator().manual_seed(seed)
        made = [1.5 * torch.randint(-most, most + 1, (length,), generator=generator) for _ in range(steps)]
        if k == length or not has_tie(made, k):
            of_ranks.append([grad.to(dtype) for grad in made])
        if len(of_ranks) == N:
            break
    return [list(of_step) for of_step in zip(*of_ranks, strict=True)]


def has_tie(grads: list[Tensor], k: int) -> bool:
    """Whether the k largest of gradient + residual could be chosen in two ways, in one of a rank's calls."""
    left = torch.zeros_like(grads[0])
    for grad in grads:
        left = left + grad
        largest = left.abs().sort(descending=True)
        if largest.values[k - 1] == largest.values[k]:
            return True
        left[largest.indices[:k]] = 0
    return False


class Caller:
    """One object of the answer's, and the calls of it."""

    def __init__(self, play: Play, k: int, name: str = "") -> None:
        self.play, self.k, self.name, self.number, self.held = play, k, name, 0, 0
        with play.event(f"TopK({k}){name}"):
            self.compressor = play.code.TopK(k)

    def mean(self, grad: Tensor) -> Any:
        play, k = self.play, self.k
        self.number += 1
        which = f"call {self.number}{self.name}"
        play.keep("`grad`", grad)
        int64s = (play.size - 1) * k * 4  # beside the reference's int32
        with play.event(which, slack=int64s) as event:
            result = self.compressor.mean(grad)
            event.see(f"the result of {which}", result)
        if sum(call.sent for call in event.traffic) > (play.size - 1) * k * (grad.itemsize + 4):
            play.world.note(SMALLER)
        play.clue("calls", [call.op for call in event.traffic])
        play.keep(f"what {which} returned", result)
        places = vars(self.compressor), dict(vars(type(self.compressor))), vars(play.code)
        held = sum(storage.nbytes() for storage in storages_in([dict(place) for place in places]))
        if self.number > 2:
            play.at_most(f"bytes that it keeps after {which}, beyond those after call 2", held - self.held)
        else:
            self.held = held
        return result


# ---------------------------------------------------------------------- the scenes


def in_turn(play: Play, length: int, k: int, **options: Any) -> None:
    caller = Caller(play, k)
    for of_step in gradients(play.size, length, k, **options):
        caller.mean(of_step[play.rank].clone())


def scribbles(play: Play) -> None:
    caller = Caller(play, 2)
    for of_step in gradients(play.size, 9, 2):
        grad = of_step[play.rank].clone()
        result = caller.mean(grad)
        with play.event(f"the caller writes into `grad` after call {caller.number}"):
            grad.fill_(1000.0)
        if isinstance(result, Tensor) and caller.number % 2:
            with play.event(f"the caller writes into the result of call {caller.number}"):
                result.fill_(2000.0)


def three_objects(play: Play) -> None:
    sizes = ((7, 1), (12, 3), (12, 4))
    of_all = [gradients(play.size, length, k, steps=3) for length, k in sizes]
    callers = [Caller(play, k, f" of the object for {length} elements, k = {k}") for length, k in sizes]
    for step in range(3):
        for caller, grads in zip(callers, of_all, strict=True):
            caller.mean(grads[step][play.rank].clone())


def in_float64(play: Play) -> None:
    caller = Caller(play, 3)
    for of_step in gradients(play.size, 10, 3, dtype=torch.float64):
        caller.mean(of_step[play.rank] * (1 + 2.0**-30))  # float32 would round that off


def many_in_bfloat16(play: Play) -> None:
    """Indices that bfloat16 and a byte cannot hold."""
    grad = torch.zeros(700, dtype=torch.bfloat16)
    grad[[301 + play.rank, 555, 699]] = torch.tensor([60.0 + 12 * play.rank, -84.0, 36.0], dtype=torch.bfloat16)
    caller = Caller(play, 3)
    caller.mean(grad)
    caller.mean(grad.flip(0))


def zeros(play: Play) -> None:
    caller = Caller(play, 2)
    caller.mean(1.5 * torch.tensor([7.0, -6.0, 5.0, -4.0, 3.0, -2.0]).roll(play.rank))
    for _ in range(3):
        caller.mean(torch.zeros(6))


def zeros_on_rank_0(play: Play) -> None:
    caller = Caller(play, 3)
    for of_step in gradients(play.size, 8, 3, steps=3):
        caller.mean(of_step[play.rank] * (play.rank > 0))


def strided(play: Play) -> None:
    caller = Caller(play, 3)
    for of_step in gradients(play.size, 10, 3, steps=3):
        caller.mean(torch.stack([of_step[play.rank], torch.full((10,), 999.0)], 1)[:, 0])


OWN = "what is kept and what is returned must be tensors of your own, not the caller's, nor a view of them"
DTYPE = "make tensors like `grad`, with torch.zeros_like(grad): float32 is not the only dtype"

BATTERY = (
    Scene(
        "", partial(in_turn, length=12, k=3), "follow one element through two calls: chosen, sent, left, added again"
    ),
    Scene("when the caller writes over its tensors", scribbles, OWN, sizes=(1, 3)),
    Scene("with three objects in turns", three_objects, "what is kept belongs to one object: self", sizes=(1, 2)),
    Scene("in float64", in_float64, DTYPE, sizes=(1, 3)),
    Scene("in bfloat16", partial(in_turn, length=10, k=3, steps=3, most=7, dtype=torch.bfloat16), DTYPE, sizes=(1, 4)),
    Scene(
        "with 700 elements in bfloat16",
        many_in_bfloat16,
        "an index is no value: it needs a dtype that counts far enough, int32 or int64",
        sizes=(2, 3),
    ),
    Scene(
        "with gradients of zeros",
        zeros,
        "what waits in the residual is sent even if the gradient is 0",
    ),
    Scene(
        "with gradients of zeros on rank 0",
        zeros_on_rank_0,
        "a rank with nothing to send takes part all the same, and counts in the mean",
        sizes=(3,),
    ),
    Scene(
        "with k as large as the gradient",
        partial(in_turn, length=5, k=5, steps=2),
        "with k = n everything is sent, and nothing is left",
        sizes=(1, 2),
    ),
    Scene(
        "with a gradient of one element",
        partial(in_turn, length=1, k=1, steps=2),
        "with k = n everything is sent, and nothing is left",
        sizes=(2,),
    ),
    Scene(
        "with a gradient that is not contiguous",
        strided,
        "a gradient may be a view of something else",
        sizes=(1, 2),
    ),
)


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
        k values and k int32 indices. What it did not send is its new residual. All elements
        that nobody sent are 0 in the mean.
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

EXERCISES = [
    Exercise(
        id="12.1",
        title="top-k with error feedback",
        difficulty=2,
        section="Send the largest, remember the rest",
        battery=BATTERY,
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
    ),
]
