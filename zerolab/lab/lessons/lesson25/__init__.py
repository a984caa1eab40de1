"""Lesson 25: attention to one block of keys after another."""

from __future__ import annotations

import torch
from torch import Tensor

from zerolab.lab.exercises.exercise import Exercise
from zerolab.lab.exercises.observing import Play, Scene

# ---------------------------------------------------------------------- 25.1


def attended(
    play: Play,
    blocks: tuple[int, ...] = (4, 4),
    queries: int = 5,
    heads: tuple[int, ...] = (2,),
    size: float = 1.0,
    hides: str = "",
    dtype: torch.dtype = torch.float32,
) -> None:
    """merge, block after block. hides: what `visible` hides: "" nothing, "later" keys, "all" of the first block."""
    random = torch.Generator().manual_seed(len(blocks) + queries)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64).to(dtype)

    play.loose = 1e-5 if dtype == torch.float32 else 1e-12
    width = 6  # of 4 the root is the half
    q = play.keep("`q`", size * numbers(*heads, queries, width))
    out, lse = torch.zeros_like(q), torch.full(q.shape[:-1], -torch.inf, dtype=dtype)
    start = 0
    for number, keys in enumerate(blocks):
        k, v = numbers(*heads, keys, width), numbers(*heads, keys, width)
        visible = torch.ones(queries, keys, dtype=torch.bool)
        if hides == "later":
            visible = torch.arange(queries)[:, None] >= start + torch.arange(keys)
        elif hides == "all" and number == 0:
            visible &= False
        elif hides == "rows":
            visible[number::2] = False
        start += keys
        names = [f"{name} of block {number + 1}" for name in ("`k`", "`v`", "`visible`", "`out`", "`lse`")]
        for name, tensor in zip(names, (k, v, visible, out, lse), strict=True):
            play.keep(name, tensor)
        with play.event(f"merge, block {number + 1}", uses=()) as event:
            out, lse = play.code.merge(q, k, v, visible, out, lse)
        event.see("out", out)
        event.see("lse", lse)


MERGE = "try it with two keys, one in each block: which weight does each get, and what is lse then?"
HIDDEN = "a query may see nothing of a block, or nothing so far: it keeps what it had, and -inf - -inf is no number"
LARGE = "exp(90) is more than a float32 can hold, and exp(-110) is 0: subtract before exp"
MERGE_BATTERY = (
    Scene("", attended, MERGE),
    Scene("with one block", lambda play: attended(play, blocks=(6,)), MERGE, sizes=(1,)),
    Scene("with blocks of several lengths", lambda play: attended(play, blocks=(3, 1, 7)), MERGE, sizes=(1,)),
    Scene("with two leading dimensions", lambda play: attended(play, heads=(2, 3)), MERGE, sizes=(1,)),
    Scene("with large scores", lambda play: attended(play, size=300.0), LARGE, sizes=(1,)),
    Scene("with later keys hidden", lambda play: attended(play, blocks=(2, 2, 2), hides="later"), HIDDEN, sizes=(1,)),
    Scene("with a first block that nobody sees", lambda play: attended(play, hides="all"), HIDDEN, sizes=(1,)),
    Scene("with blocks that only some queries see", lambda play: attended(play, hides="rows"), HIDDEN, sizes=(1,)),
    Scene(
        "with as many keys as queries, later ones hidden",
        lambda play: attended(play, queries=4, hides="later"),
        "visible[i, j]: whether query i may see key j",
        sizes=(1,),
    ),
    Scene("in float64", lambda play: attended(play, hides="later", dtype=torch.float64), "keep the dtype", sizes=(1,)),
)

MERGE_STUB = '''\
import torch
from torch import Tensor
from zerolab.lab.exercises import Todo


def merge(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, out: Tensor, lse: Tensor):
    """Attention to some keys is known; here is a block of others.

    q (..., Q, D); k, v (..., K, D); visible (Q, K), bool: which key each query may see.
    A query's scores are q @ k.mT / sqrt(D), where it may see; its weights are exp(score),
    divided by their sum.
    out (..., Q, D), lse (..., Q): the weighted mean of v over the keys so far, and the log
    of the sum of exp(score). Before the first block they are 0 and -inf.

    -> (out, lse) over all keys with these. A query that has seen none keeps 0 and -inf:
    beware of -inf - -inf, which is NaN. Nothing that comes in is changed. Scores may be in
    the hundreds.
    """
    raise Todo("25.1")
'''

MERGED = """\
import torch
from torch import Tensor


def merge(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, out: Tensor, lse: Tensor):
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
    new = torch.logaddexp(lse, scores.logsumexp(dim=-1))
    base = new.masked_fill(new == -torch.inf, 0.0)  # nothing seen: any number will do
    out = out * (lse - base).exp()[..., None] + (scores - base[..., None]).exp() @ v
    return out, new
"""

EXERCISES = [
    Exercise(
        id="25.1",
        title="one block more",
        difficulty=2,
        section="Write: one block more",
        battery=MERGE_BATTERY,
        stub=MERGE_STUB,
        reference=MERGED,
        hints=(
            "Hidden keys have the score -inf: masked_fill. The log of a sum of two sums is torch.logaddexp(lse, "
            "scores.logsumexp(dim=-1)).",
            "The old `out` was divided by exp(lse). Now the divisor is exp(new): out * exp(lse - new), and a new key's "
            "weight is exp(score - new). Differences of logs stay small where exp(score) would overflow.",
            "Where `new` is -inf, nothing has been seen: subtract 0 there in its place, and everything comes out 0. "
            "base = new.masked_fill(new == -torch.inf, 0.0); out = out * (lse - base).exp()[..., None] + (scores - "
            "base[..., None]).exp() @ v.",
        ),
        exports=("merge",),
    ),
]
