"""Lesson 12: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson12 import REFERENCE

HEAD = REFERENCE.split("    def mean(")[0]

# Keeps a buffer and clears it in place, one message of int32 words, rank by rank.
IN_ONE_MESSAGE = f"""{HEAD}    def mean(self, grad):
        if self.residual is None:
            self.residual = torch.zeros_like(grad)
        self.residual += grad
        _, where = torch.sort(torch.abs(self.residual), descending=True)
        where = where[: self.k].clone()
        what = self.residual[where].clone()
        self.residual[where] = 0.0
        words = torch.cat([what.view(torch.uint8), where.to(torch.int32).view(torch.uint8)])
        every = torch.empty(dist.get_world_size() * len(words), dtype=torch.uint8)
        dist.all_gather_into_tensor(every, words)
        total = torch.zeros_like(grad)
        for row in every.view(dist.get_world_size(), -1):
            values, places = row.split([len(words) - 4 * self.k, 4 * self.k])
            total[places.clone().view(torch.int32).long()] += values.clone().view(grad.dtype)
        return total / dist.get_world_size()
"""

# Subtracts what it sends, and starts both gathers before it waits; int64 indices, values divided before they go.
TWO_AT_ONCE = f"""{HEAD}    def mean(self, grad):
        N, size = dist.get_world_size(), grad.numel()
        wanted = grad + (0 if self.residual is None else self.residual)
        places = wanted.abs().argsort()[size - self.k :].contiguous()
        values = torch.gather(wanted, 0, places)
        sparse = torch.zeros_like(grad).scatter_(0, places, values)
        self.residual = wanted - sparse
        gathered = [torch.zeros(N, self.k, dtype=t.dtype) for t in (values, places)]
        works = [
            dist.all_gather(list(rows), mine, async_op=True) for rows, mine in zip(gathered, (values, places))
        ]
        for work in works:
            work.wait()
        return torch.zeros_like(grad).scatter_add_(0, gathered[1].flatten(), gathered[0].flatten()).div_(N)
"""

_LEFT = "grad.clone() if self.residual is None else grad + self.residual"
_CLEAR = "        left[indices] = 0\n        self.residual = left\n"
_RETURN = "        return mean / N\n"


FORGETS = "nothing is kept of what was not sent: add self.residual to the gradient first, and keep the rest in it"

OVERWRITES = (
    "two ranks chose the same element, and one overwrote the other: dense[indices] = values, and also"
    " +=, count an index once. Use index_add_(0, indices, values), or go rank by rank"
)

SHARED = "two objects share a residual: it belongs to self, and must not be a default argument or a class variable"

GRAD_CHANGED = "`grad` has changed: the caller still needs it, so add to it in a new tensor, and leave it as it is"

TOPK_MISTAKES = {
    "no residual": Mistake(
        edit(REFERENCE, "        self.residual = left\n", ""),
        FORGETS,
    ),
    "keeps what it sent": Mistake(
        edit(REFERENCE, "        left[indices] = 0\n", ""),
        "what has been sent is still in the residual, and will be sent again: set those elements to 0",
    ),
    "drops the old residual": Mistake(
        edit(REFERENCE, _CLEAR, "        self.residual = grad.clone()\n        self.residual[indices] = 0\n"),
        ("the residual is only what was left of the last gradient: what was left before is lost. Keep acc, not grad"),
    ),
    "chooses by the gradient": Mistake(
        edit(REFERENCE, "left.abs().topk", "grad.abs().topk"),
        "the k elements were chosen by the gradient alone: what waits in the residual must count as well",
    ),
    "sends the gradient's values": Mistake(
        edit(REFERENCE, "values, indices = left[indices]", "values, indices = grad[indices]"),
        "the values sent are the gradient's, without the residual: send gradient + residual there",
    ),
    "largest by sign": Mistake(
        edit(REFERENCE, "left.abs().topk", "left.topk"),
        "the k largest by sign, so that large negative elements never go: choose by magnitude, abs()",
    ),
    "sends magnitudes": Mistake(
        edit(
            REFERENCE,
            "        indices = left.abs().topk(self.k).indices\n        values, indices = left[indices],",
            "        values, indices = left.abs().topk(self.k)\n        values, indices = values,",
        ),
        "magnitudes were sent, and the sign is lost: topk(acc.abs()) gives the indices; send acc[indices]",
    ),
    "smallest": Mistake(
        edit(REFERENCE, "topk(self.k)", "topk(self.k, largest=False)"),
        "those are the k smallest: topk() takes the largest, unless it is told largest=False",
    ),
    "sum": Mistake(
        edit(REFERENCE, "mean / N", "mean"),
        "summed over ranks, not averaged: divide by the number of ranks",
    ),
    "divides by the senders": Mistake(
        edit(
            REFERENCE,
            _RETURN,
            "        count = torch.zeros_like(grad)\n        for i in all_indices:\n            count[i.long()] += 1\n"
            "        return mean / count.clamp(min=1)\n",
        ),
        ("divided by the number of ranks that sent the element: a rank that did not send counts with 0. Divide by N"),
    ),
    "divides by k": Mistake(
        edit(REFERENCE, "mean / N", "mean / self.k"),
        "divided by k: the mean is over the ranks",
    ),
    "overwrites": Mistake(
        edit(
            REFERENCE,
            "        mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))\n",
            "        for i, v in zip(all_indices, all_values):\n            mean[i.long()] = v\n",
        ),
        OVERWRITES,
    ),
    "plus-equals once": Mistake(
        edit(
            REFERENCE,
            "mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))",
            "mean[torch.cat(all_indices).long()] += torch.cat(all_values)",
        ),
        OVERWRITES,
    ),
    "own alone": Mistake(
        edit(REFERENCE, "torch.cat(all_indices), torch.cat(all_values)", "indices, values"),
        "this rank's own k elements alone: add up what all ranks sent",
    ),
    "all values at its own indices": Mistake(
        edit(REFERENCE, "torch.cat(all_indices), torch.cat(all_values)", "indices, sum(all_values)"),
        "the others' values were put at this rank's indices: each rank's values go where its own indices say",
    ),
    "residual to the mean": Mistake(
        edit(
            REFERENCE,
            _CLEAR,
            "",
            _RETURN,
            "        mean /= N\n        self.residual = left - mean\n        return mean\n",
        ),
        "the residual is the difference to the mean: it must be the difference to what THIS rank has sent",
    ),
    "clears where any rank sent": Mistake(
        edit(REFERENCE, _RETURN, "        self.residual[torch.cat(all_indices).long()] = 0\n        return mean / N\n"),
        "the residual was cleared wherever any rank has sent: this rank has sent its own k elements only",
    ),
    "rank 0's indices": Mistake(
        edit(
            REFERENCE,
            "        values, indices = left[indices], indices.to(torch.int32)\n",
            "        dist.broadcast(indices, src=0)\n"
            "        values, indices = left[indices], indices.to(torch.int32)\n",
        ),
        ("the indices of one rank were used for all: every rank chooses its own, and sends them with the values"),
    ),
    "dense all-reduce": Mistake(
        edit(
            REFERENCE,
            "        dist.all_gather(all_values, values)\n        dist.all_gather(all_indices, indices)\n",
            "",
            "        mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))\n",
            "        mean[indices.long()] = values\n        dist.all_reduce(mean)\n",
        ),
        ("the zeros travel as well: the all-reduce of a mostly empty tensor sends as much as that of a full one"),
    ),
    "gathers objects": Mistake(
        edit(
            REFERENCE,
            "        dist.all_gather(all_values, values)\n        dist.all_gather(all_indices, indices)\n",
            "        both = [None] * N\n        dist.all_gather_object(both, (values, indices))\n"
            "        all_values, all_indices = [v for v, _ in both], [i for _, i in both]\n",
        ),
        "the *_object functions pickle, which adds bytes: send two tensors, the values and the indices",
    ),
    "changes the gradient": Mistake(
        edit(REFERENCE, _LEFT, "grad if self.residual is None else grad.add_(self.residual)"),
        GRAD_CHANGED,
    ),
    "does not wait": Mistake(
        edit(REFERENCE, "all_gather(all_values, values)", "all_gather(all_values, values, async_op=True)"),
        "a forgotten wait: with async_op=True the values have not arrived yet when they are added up",
    ),
    "shares the residual": Mistake(
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        TopK.kept = left\n",
            _LEFT,
            "grad.clone() if getattr(TopK, 'kept', None) is None or len(TopK.kept) != len(grad) else grad + TopK.kept",
        ),
        SHARED,
    ),
    "the residual of the class": Mistake(
        edit(
            REFERENCE,
            "        self.residual: Tensor | None = None  # what this rank has not sent; None: nothing\n",
            "",
            "        self.residual = left\n",
            "        TopK.residual = left\n",
            "    def __init__",
            "    residual = None\n\n    def __init__",
        ),
        SHARED,
    ),
    "indices in int16": Mistake(
        edit(
            REFERENCE,
            "indices.to(torch.int32)",
            "indices.to(torch.int16)",
            "left[indices] = 0",
            "left[indices.long()] = 0",
            "torch.cat(all_indices)",
            "torch.cat(all_indices).long()",
        ),
        "gloo has no collective for this dtype: send the indices in int32 or int64",
    ),
    "the residual in float32": Mistake(
        edit(REFERENCE, "        self.residual = left\n", "        self.residual = left.float()\n"),
        "right in float32 only: make tensors like `grad`, with torch.zeros_like(grad)",
    ),
    "indices as numbers": Mistake(
        edit(
            REFERENCE,
            "indices.to(torch.int32)\n",
            "indices.to(grad.dtype)\n",
            "left[indices] = 0",
            "left[indices.long()] = 0",
            "torch.cat(all_indices)",
            "torch.cat(all_indices).long()",
        ),
        "indices were sent as floating-point numbers: bfloat16 counts only to 256. Send them as integers",
    ),
    "residual divided": Mistake(
        edit(REFERENCE, "        self.residual = left\n", "        self.residual = left / dist.get_world_size()\n"),
        "the residual was divided by N: only the sum over the ranks is",
    ),
    "residual subtracted": Mistake(
        edit(REFERENCE, "grad + self.residual", "grad - self.residual"),
        "the residual was subtracted: it is what has not been sent yet, so it must be added",
    ),
    "returns nothing": Mistake(
        edit(REFERENCE, _RETURN, "        mean /= N\n"),
        "the function returns nothing: `return` is missing",
    ),
    "keeps history": Mistake(
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        self.residual = left\n        self.history = [*getattr(self, 'history', []), left.clone()]\n",
        ),
        "what is kept grows with every call: one residual of the gradient's length is enough",
    ),
    "the first residual for ever": Mistake(
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        if self.residual is None:\n            self.residual = left\n",
        ),
        "the residual is that of the first call: it must be replaced in every call",
    ),
    "piles up": Mistake(
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        self.residual = left if self.residual is None else self.residual + left\n",
        ),
        (
            "the old residual is in it twice: gradient + residual, without what was sent, is the new one. "
            "Replace, do not add"
        ),
    ),
    "one element more": Mistake(
        edit(REFERENCE, "topk(self.k)", "topk(min(self.k + 1, len(grad)))"),
        "one element too many goes: topk(self.k)",
    ),
    "one call of all": Mistake(
        edit(REFERENCE, "topk(self.k)", "topk(len(grad))"),
        "that is the mean of everything: each rank sends its k largest elements, and no more",
    ),
    "clears all": Mistake(
        edit(REFERENCE, "        left[indices] = 0\n", "        left = torch.zeros_like(left)\n"),
        FORGETS,
    ),
    "the last of them stays": Mistake(
        edit(REFERENCE, _CLEAR, "        left[indices[:-1]] = 0\n        self.residual = left\n"),
        (
            "one of the k elements that were sent is still in the residual, and goes twice: set all of "
            "left[indices] to "
            "0 (a comparison with the k-th magnitude must not keep the k-th)"
        ),
    ),
    "the residual decays": Mistake(
        edit(REFERENCE, "grad + self.residual", "grad + 0.9 * self.residual"),
        "the residual shrinks while it waits, so a part of the gradient is lost: add all of it",
    ),
    "chooses by the residual": Mistake(
        edit(
            REFERENCE,
            "left.abs().topk(self.k)",
            "(left if self.residual is None else self.residual).abs().topk(self.k)",
        ),
        "the k elements were chosen by what waits, without the new gradient: choose by the sum, gradient + residual",
    ),
    "the residual of all ranks": Mistake(
        edit(REFERENCE, "        mean = torch", "        dist.all_reduce(self.residual)\n        mean = torch"),
        (
            "the residuals travel too: each rank keeps its own, and only the k values and their indices are sent, or "
            "nothing is saved"
        ),
    ),
    "k of all that came": Mistake(
        edit(
            REFERENCE,
            _RETURN,
            "        keep = mean.abs().topk(self.k).indices\n        few = torch.zeros_like(mean)\n"
            "        few[keep] = mean[keep]\n        return few / N\n",
        ),
        (
            "what came in was thinned out once more: it has been sent, is in nobody's residual any longer, and "
            "is lost; "
            "add up all pairs of all ranks"
        ),
    ),
    "its own twice": Mistake(
        edit(REFERENCE, _RETURN, f"        mean.index_add_(0, indices, values)\n{_RETURN}"),
        "this rank's own elements count twice: what all ranks sent has them already",
    ),
    "magnitudes from then on": Mistake(
        edit(REFERENCE, "left.abs().topk", "left.abs_().topk"),
        "abs_() changes gradient + residual itself, and the sign is lost: choose by a new tensor, left.abs()",
    ),
    "zeros send nothing": Mistake(
        edit(
            REFERENCE,
            "        left = grad.clone()",
            "        if not grad.any():\n            return torch.zeros_like(grad)\n        left = grad.clone()",
        ),
        "right as long as every gradient has something in it: a residual is sent even if the gradient is 0",
    ),
    "k shared out": Mistake(
        edit(REFERENCE, "topk(self.k)", "topk(max(1, self.k // dist.get_world_size()))"),
        "k was divided among the ranks: each rank sends k elements of its own",
    ),
    "never cleared": Mistake(
        edit(
            REFERENCE,
            "        mean = torch.zeros_like(grad)\n",
            "        self.sum = getattr(self, 'sum', torch.zeros_like(grad))\n        mean = self.sum\n",
        ),
        "the sum of the call before is still in it: every call begins with zeros",
    ),
    "one result for all calls": Mistake(
        edit(
            REFERENCE,
            "        mean = torch.zeros_like(grad)\n",
            "        self.sum = getattr(self, 'sum', torch.empty_like(grad))\n        mean = self.sum.zero_()\n",
            "mean / N",
            "mean.div_(N)",
        ),
        "what an earlier call returned changes in the next one: return a tensor of its own each time, not a buffer",
    ),
    "values in float16": Mistake(
        edit(
            REFERENCE,
            "= left[indices],",
            "= left[indices].half(),",
            "cat(all_values)",
            "cat(all_values).to(grad.dtype)",
        ),
        (
            "the values were rounded to float16 on their way, and what was rounded off is not in the residual: "
            "send them in "
            "the gradient's dtype"
        ),
    ),
    "less than it has sent": Mistake(
        edit(REFERENCE, "left[indices] = 0", "left[indices] -= left[indices] / dist.get_world_size()"),
        "the residual is the difference to what was sent divided by N: the division is no loss to be made up for",
    ),
    "the places of the first call": Mistake(
        edit(
            REFERENCE,
            "indices = left.abs().topk(self.k).indices",
            "self.first = indices = getattr(self, 'first', left.abs().topk(self.k).indices)",
        ),
        "the k elements of the first call are sent for ever: choose anew in every call",
    ),
    "up to its own rank": Mistake(
        edit(
            REFERENCE,
            "torch.cat(all_indices), torch.cat(all_values)",
            "*(torch.cat(every[: dist.get_rank() + 1]) for every in (all_indices, all_values))",
        ),
        "what some ranks sent is left out, and not the same on all: add up all pairs of all ranks",
    ),
    "the residual without its sign": Mistake(
        edit(REFERENCE, "self.residual = left", "self.residual = left.abs()"),
        "the residual has lost its sign: keep what was not sent as it is, and take abs() for the choice alone",
    ),
    "whole numbers": Mistake(
        edit(REFERENCE, "mean / N", "mean // N"),
        "`//` rounds down: divide with `/`",
    ),
    "clears the gradient": Mistake(
        edit(REFERENCE, _RETURN, f"        grad.zero_()\n{_RETURN}"),
        GRAD_CHANGED,
    ),
}

# A sparse tensor adds up.
SPARSE = f"""{HEAD}    def mean(self, grad):
        N = dist.get_world_size()
        left = grad.clone()
        if self.residual is not None:
            left.add_(self.residual)
        order = torch.argsort(left.abs(), descending=True)[: self.k].contiguous()
        self.residual = left.index_fill(0, order, 0)
        values, places = grad.new_empty(N * self.k), torch.empty(N * self.k, dtype=torch.int64)
        dist.all_gather_into_tensor(values, left[order])
        dist.all_gather_into_tensor(places, order)
        return torch.sparse_coo_tensor(places[None], values, grad.shape).to_dense() / N
"""

# Masks, in the order of the elements, and a dense row for each rank.
BY_MASKS = """\
import torch
import torch.distributed as dist


class TopK:
    def __init__(self, k):
        self.k, self.left = k, 0.0

    def everyones(self, mine):
        parts = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, mine)
        return parts

    @torch.no_grad()
    def mean(self, grad):
        total = grad + self.left
        mask = torch.zeros(total.shape, dtype=torch.bool)
        mask[total.abs().topk(self.k)[1]] = True
        self.left = total.masked_fill(mask, 0)
        pairs = zip(self.everyones(mask.nonzero().flatten().int()), self.everyones(total[mask]))
        rows = torch.stack([torch.zeros_like(total).index_put((places.long(),), values) for places, values in pairs])
        return rows.sum(0) / len(rows)
"""

RIGHT = {"12.1": (IN_ONE_MESSAGE, TWO_AT_ONCE, SPARSE, BY_MASKS)}
MISTAKES = {"12.1": TOPK_MISTAKES}
