"""Lesson 25: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson25 import MERGED

# ---------------------------------------------------------------------- 25.1

BY_MAXIMUM = """\
import math

import torch


def merge(q, k, v, visible, out, lse):
    scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.size(-1))
    scores = torch.where(visible, scores, float("-inf"))
    top = torch.maximum(lse, scores.max(dim=-1).values)
    top = torch.where(top.isinf(), torch.zeros_like(top), top)
    before, now = torch.exp(lse - top), torch.exp(scores - top.unsqueeze(-1))
    total = before + now.sum(dim=-1)
    mean = (out * before.unsqueeze(-1) + now @ v) / total.clamp(min=torch.finfo(q.dtype).tiny).unsqueeze(-1)
    return mean, top + total.log()
"""

BY_SOFTMAX = """\
import torch


def merge(q, k, v, visible, out, lse):
    scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
    scores = scores + torch.zeros_like(visible, dtype=q.dtype).masked_fill(visible.logical_not(), -torch.inf)
    here = torch.nan_to_num(scores.softmax(dim=-1), nan=0.0) @ v
    both = torch.stack([lse, scores.logsumexp(dim=-1)])
    weights = torch.nan_to_num(both.softmax(dim=0), nan=0.0)[..., None]
    return weights[0] * out + weights[1] * here, both.logsumexp(dim=0)
"""

RESCALE = (
    "`out` is a mean over fewer keys: its weight in the new mean is exp(lse - new), what the old keys have of the new "
    "sum"
)
NEW_WEIGHTS = "the new keys' weights are exp(score - new), where `new` is the lse of all keys, old and new"
HALVES = "two means were averaged as if both blocks weighed the same: each weighs exp of its lse"
OVERFLOW = "exp of a large score is infinite: subtract before exp, and add logs with torch.logaddexp and logsumexp"
NOTHING_SEEN = (
    "-inf - -inf is no number: where a query has seen nothing, subtract 0 instead, and everything comes out 0"
)
SCALE = "the scores are q @ k.mT / sqrt(D), D the length of a query: without it the weights are too sharp"
INVERTED = "`visible` is True where a query may see: hide the others, ~visible"
ZEROED = "a hidden key's score was made 0, and exp(0) = 1: it still has weight. Its score must be -inf"
UNHIDDEN = "every query sees every key of the block: fill the scores where `visible` is False with -inf"
LSE = "`lse` of all keys is the log of the *sum* of two sums: torch.logaddexp(lse, scores.logsumexp(dim=-1))"
BASES = (
    "two bases are mixed up: weights are exp(score), so use exp, log, torch.logaddexp and logsumexp throughout, and "
    "exp2, log2 or logaddexp2 nowhere"
)
THIS_BLOCK = "that is the attention to this block alone: `out` and `lse` have what was before"
UNDIVIDED = "the weights were not divided by their sum: `out` is a mean, of all keys so far"
CHANGED = "`out` and `lse` that came in were changed: make new tensors"

_SCORES = "(q @ k.mT / q.shape[-1] ** 0.5)"
_MASK = ".masked_fill(~visible, -torch.inf)"
_NEW = "torch.logaddexp(lse, scores.logsumexp(dim=-1))"
_OUT = "out * (lse - base).exp()[..., None] + (scores - base[..., None]).exp() @ v"
_TOTAL = " / total.clamp(min=torch.finfo(q.dtype).tiny).unsqueeze(-1)"

MERGE_MISTAKES = {
    "old mean as it was": Mistake(edit(MERGED, "out * (lse - base).exp()[..., None]", "out"), RESCALE),
    "weights of the block": Mistake(
        edit(MERGED, "(scores - base[..., None]).exp() @ v", "scores.softmax(dim=-1).nan_to_num(0.0) @ v"),
        NEW_WEIGHTS,
    ),
    "two means, averaged": Mistake(
        edit(MERGED, f"out = {_OUT}", "out = (out + scores.softmax(dim=-1).nan_to_num(0.0) @ v) / 2"), HALVES
    ),
    "two means, added": Mistake(
        edit(MERGED, f"out = {_OUT}", "out = out + scores.softmax(dim=-1).nan_to_num(0.0) @ v"), RESCALE
    ),
    "only this block": Mistake(
        edit(MERGED, f"out = {_OUT}", "out = scores.softmax(dim=-1).nan_to_num(0.0) @ v"),
        THIS_BLOCK,
    ),
    "only this block, lse too": Mistake(
        edit(
            MERGED,
            f"out = {_OUT}",
            "out = scores.softmax(dim=-1).nan_to_num(0.0) @ v",
            "return out, new",
            "return out, scores.logsumexp(dim=-1)",
        ),
        THIS_BLOCK,
    ),
    "sums over a maximum, not divided": Mistake(edit(BY_MAXIMUM, _TOTAL, ""), UNDIVIDED),
    "lse with log2": Mistake(edit(BY_MAXIMUM, "total.log()", "total.log2()"), BASES),
    "sum of the logs, from the second on": Mistake(
        edit(
            MERGED,
            _NEW,
            "torch.where(lse == -torch.inf, scores.logsumexp(dim=-1), lse + scores.logsumexp(dim=-1))",
        ),
        LSE,
    ),
    "hidden times infinity": Mistake(
        edit(MERGED, _MASK, " + ~visible * -torch.inf"),
        "0 * inf is no number (nan), and nan spreads to every sum: use masked_fill, or torch.where",
    ),
    "sums, not divided": Mistake(
        edit(MERGED, f"out = {_OUT}", "out = out + scores.exp() @ v"),
        UNDIVIDED,
    ),
    "exp first": Mistake(
        edit(
            MERGED,
            _NEW,
            "(lse.exp() + scores.exp().sum(dim=-1)).log()",
            _OUT,
            "(out * lse.exp()[..., None] + scores.exp() @ v) / base.exp()[..., None]",
        ),
        OVERFLOW,
    ),
    "no number": Mistake(edit(MERGED, "new.masked_fill(new == -torch.inf, 0.0)", "new"), NOTHING_SEEN),
    "a large number for -inf": Mistake(
        edit(MERGED, "~visible, -torch.inf)", "~visible, -1e9)"),
        "a hidden key's score was made very low, and where a query sees nothing, all such scores are alike and get "
        "weight: -inf, and no weight at all",
    ),
    "no scale": Mistake(edit(MERGED, _SCORES, "(q @ k.mT)"), SCALE),
    "scaled by D": Mistake(edit(MERGED, "q.shape[-1] ** 0.5", "q.shape[-1]"), "divided by D, and not by its root"),
    "scaled by keys": Mistake(
        edit(MERGED, "q.shape[-1] ** 0.5", "k.shape[-2] ** 0.5"),
        "divided by the root of the number of keys: D is the length of a query, q.shape[-1]",
    ),
    "inverted": Mistake(edit(MERGED, "~visible", "visible"), INVERTED),
    "zero scores": Mistake(edit(MERGED, _MASK, ".masked_fill(~visible, 0.0)"), ZEROED),
    "times visible": Mistake(edit(MERGED, _SCORES + _MASK, _SCORES + " * visible"), ZEROED),
    "nothing hidden": Mistake(edit(MERGED, _MASK, ""), UNHIDDEN),
    "logs added": Mistake(
        edit(
            MERGED,
            f"    new = {_NEW}\n",
            f"    new = {_NEW}\n    added = lse + scores.logsumexp(dim=-1)\n",
            "return out, new",
            "return out, added",
        ),
        LSE,
    ),
    "the larger log": Mistake(
        edit(MERGED, "return out, new", "return out, torch.maximum(lse, scores.logsumexp(dim=-1))"), LSE
    ),
    "the block's log": Mistake(edit(MERGED, "return out, new", "return out, scores.logsumexp(dim=-1)"), LSE),
    "the sum itself": Mistake(
        edit(MERGED, "return out, new", "return out, new.exp()"),
        "`lse` is the *log* of the sum: the sum itself overflows",
    ),
    "the maximum": Mistake(
        edit(MERGED, "return out, new", "return out, scores.amax(dim=-1)"),
        "the largest score alone does not say how large the sum is: return the log of the sum",
    ),
    "in place": Mistake(
        edit(
            MERGED,
            "    out = " + _OUT + "\n    return out, new",
            "    out *= (lse - base).exp()[..., None]\n    out += (scores - base[..., None]).exp() @ v\n"
            "    lse.copy_(new)\n    return out, lse",
        ),
        CHANGED,
    ),
    "logs of two": Mistake(edit(MERGED, "torch.logaddexp(", "torch.logaddexp2("), BASES),
    "powers of two": Mistake(
        edit(MERGED, "(lse - base).exp()", "(lse - base).exp2()", "[..., None]).exp()", "[..., None]).exp2()"),
        BASES,
    ),
    "the old as a power of two": Mistake(edit(MERGED, "(lse - base).exp()", "(lse - base).exp2()"), BASES),
    "all in base two": Mistake(
        edit(
            MERGED,
            _NEW,
            "torch.logaddexp2(lse, scores.exp2().sum(dim=-1).log2())",
            "(lse - base).exp()",
            "(lse - base).exp2()",
            "[..., None]).exp()",
            "[..., None]).exp2()",
        ),
        BASES,
    ),
    "lse in base two": Mistake(
        edit(MERGED, "return out, new", "return out, new / torch.tensor(2.0, dtype=new.dtype).log()"), BASES
    ),
    "sum of the logs": Mistake(edit(MERGED, _NEW, "lse + scores.logsumexp(dim=-1)"), LSE),
    "the larger log for both": Mistake(edit(MERGED, _NEW, "torch.maximum(lse, scores.logsumexp(dim=-1))"), LSE),
    "lse without the scale": Mistake(
        edit(MERGED, "scores.logsumexp(dim=-1)", "(scores * q.shape[-1] ** 0.5).logsumexp(dim=-1)"),
        "lse and the weights come of the same scores, those divided by sqrt(D)",
    ),
    "halves from the second on": Mistake(
        edit(
            MERGED,
            f"out = {_OUT}",
            "here = scores.softmax(dim=-1).nan_to_num(0.0) @ v\n"
            "    out = torch.where((lse == -torch.inf)[..., None], here, (out + here) / 2)",
        ),
        HALVES,
    ),
    "each other's weights": Mistake(
        edit(
            MERGED,
            f"out = {_OUT}",
            "here = scores.softmax(dim=-1).nan_to_num(0.0) @ v\n"
            "    old = (lse - base).exp()[..., None]\n"
            "    out = (1 - old) * out + old * here",
        ),
        "the two means have each other's weights: exp(lse - new) is that of the old one",
    ),
    "over the queries": Mistake(
        edit(
            MERGED,
            f"out = {_OUT}",
            "here = scores.softmax(dim=-2).nan_to_num(0.0) @ v\n"
            "    old, now = ((log - base).exp()[..., None] for log in (lse, scores.logsumexp(dim=-1)))\n"
            "    out = old * out + now * here",
        ),
        "each query has its own sum, over keys: the last dimension of the scores",
    ),
    "causal by itself": Mistake(
        edit(MERGED, "~visible", "~torch.ones_like(visible).tril()"),
        "which key a query may see is in `visible`: a block's first key is not the sequence's",
    ),
    "lse first": Mistake(edit(MERGED, "return out, new", "return new, out"), "the mean comes first, then its lse"),
}

RIGHT = {"25.1": [BY_MAXIMUM, BY_SOFTMAX]}
MISTAKES = {"25.1": MERGE_MISTAKES}
