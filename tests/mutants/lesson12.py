"""Lesson 12: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson12 import REFERENCE

from .sources import edit

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

MUTANTS = {
    "no residual": (edit(REFERENCE, "        self.residual = left\n", ""), "nothing is kept of what was not sent"),
    "keeps what it sent": (edit(REFERENCE, "        left[indices] = 0\n", ""), "will be sent again"),
    "drops the old residual": (
        edit(REFERENCE, _CLEAR, "        self.residual = grad.clone()\n        self.residual[indices] = 0\n"),
        "what was left before is lost",
    ),
    "chooses by the gradient": (
        edit(REFERENCE, "left.abs().topk", "grad.abs().topk"),
        "chosen by the gradient alone",
    ),
    "sends the gradient's values": (
        edit(REFERENCE, "values, indices = left[indices]", "values, indices = grad[indices]"),
        "without the residual",
    ),
    "largest by sign": (edit(REFERENCE, "left.abs().topk", "left.topk"), "choose by magnitude"),
    "sends magnitudes": (
        edit(
            REFERENCE,
            "        indices = left.abs().topk(self.k).indices\n        values, indices = left[indices],",
            "        values, indices = left.abs().topk(self.k)\n        values, indices = values,",
        ),
        "the sign is lost",
    ),
    "smallest": (edit(REFERENCE, "topk(self.k)", "topk(self.k, largest=False)"), "the k smallest"),
    "sum": (edit(REFERENCE, "mean / N", "mean"), "summed over ranks, not averaged"),
    "divides by the senders": (
        edit(
            REFERENCE,
            _RETURN,
            "        count = torch.zeros_like(grad)\n        for i in all_indices:\n            count[i.long()] += 1\n"
            "        return mean / count.clamp(min=1)\n",
        ),
        "a rank that did not send counts with 0",
    ),
    "divides by k": (edit(REFERENCE, "mean / N", "mean / self.k"), "the mean is over the ranks"),
    "overwrites": (
        edit(
            REFERENCE,
            "        mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))\n",
            "        for i, v in zip(all_indices, all_values):\n            mean[i.long()] = v\n",
        ),
        "one overwrote the other",
    ),
    "plus-equals once": (
        edit(
            REFERENCE,
            "mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))",
            "mean[torch.cat(all_indices).long()] += torch.cat(all_values)",
        ),
        "count an index once",
    ),
    "own alone": (
        edit(REFERENCE, "torch.cat(all_indices), torch.cat(all_values)", "indices, values"),
        "this rank's own k elements alone",
    ),
    "all values at its own indices": (
        edit(REFERENCE, "torch.cat(all_indices), torch.cat(all_values)", "indices, sum(all_values)"),
        "put at this rank's indices",
    ),
    "residual to the mean": (
        edit(
            REFERENCE,
            _CLEAR,
            "",
            _RETURN,
            "        mean /= N\n        self.residual = left - mean\n        return mean\n",
        ),
        "the difference to what THIS rank has sent",
    ),
    "clears where any rank sent": (
        edit(REFERENCE, _RETURN, "        self.residual[torch.cat(all_indices).long()] = 0\n        return mean / N\n"),
        "this rank has sent its own k elements only",
    ),
    "rank 0's indices": (
        edit(
            REFERENCE,
            "        values, indices = left[indices], indices.to(torch.int32)\n",
            "        dist.broadcast(indices, src=0)\n"
            "        values, indices = left[indices], indices.to(torch.int32)\n",
        ),
        "every rank chooses its own",
    ),
    "dense all-reduce": (
        edit(
            REFERENCE,
            "        dist.all_gather(all_values, values)\n        dist.all_gather(all_indices, indices)\n",
            "",
            "        mean.index_add_(0, torch.cat(all_indices), torch.cat(all_values))\n",
            "        mean[indices.long()] = values\n        dist.all_reduce(mean)\n",
        ),
        "the zeros travel as well",
    ),
    "gathers objects": (
        edit(
            REFERENCE,
            "        dist.all_gather(all_values, values)\n        dist.all_gather(all_indices, indices)\n",
            "        both = [None] * N\n        dist.all_gather_object(both, (values, indices))\n"
            "        all_values, all_indices = [v for v, _ in both], [i for _, i in both]\n",
        ),
        "the *_object functions pickle",
    ),
    "changes the gradient": (
        edit(REFERENCE, _LEFT, "grad if self.residual is None else grad.add_(self.residual)"),
        "`grad` has changed",
    ),
    "does not wait": (
        edit(REFERENCE, "all_gather(all_values, values)", "all_gather(all_values, values, async_op=True)"),
        "a forgotten wait",
    ),
    "shares the residual": (
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        TopK.kept = left\n",
            _LEFT,
            "grad.clone() if getattr(TopK, 'kept', None) is None or len(TopK.kept) != len(grad) else grad + TopK.kept",
        ),
        "two objects share a residual",
    ),
    "the residual of the class": (
        edit(
            REFERENCE,
            "        self.residual: Tensor | None = None  # what this rank has not sent; None: nothing\n",
            "",
            "        self.residual = left\n",
            "        TopK.residual = left\n",
            "    def __init__",
            "    residual = None\n\n    def __init__",
        ),
        "two objects share a residual",
    ),
    "indices in int16": (
        edit(
            REFERENCE,
            "indices.to(torch.int32)",
            "indices.to(torch.int16)",
            "left[indices] = 0",
            "left[indices.long()] = 0",
            "torch.cat(all_indices)",
            "torch.cat(all_indices).long()",
        ),
        "in int32 or int64",
    ),
    "the residual in float32": (
        edit(REFERENCE, "        self.residual = left\n", "        self.residual = left.float()\n"),
        "right in float32 only",
    ),
    "indices as numbers": (
        edit(
            REFERENCE,
            "indices.to(torch.int32)\n",
            "indices.to(grad.dtype)\n",
            "left[indices] = 0",
            "left[indices.long()] = 0",
            "torch.cat(all_indices)",
            "torch.cat(all_indices).long()",
        ),
        "bfloat16 counts only to 256",
    ),
    "residual divided": (
        edit(REFERENCE, "        self.residual = left\n", "        self.residual = left / dist.get_world_size()\n"),
        "the residual was divided by N",
    ),
    "residual subtracted": (edit(REFERENCE, "grad + self.residual", "grad - self.residual"), "it must be added"),
    "returns nothing": (edit(REFERENCE, _RETURN, "        mean /= N\n"), "`return` is missing"),
    "keeps history": (
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        self.residual = left\n        self.history = [*getattr(self, 'history', []), left.clone()]\n",
        ),
        "what is kept grows",
    ),
    "the first residual for ever": (
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        if self.residual is None:\n            self.residual = left\n",
        ),
        "that of the first call",
    ),
    "piles up": (
        edit(
            REFERENCE,
            "        self.residual = left\n",
            "        self.residual = left if self.residual is None else self.residual + left\n",
        ),
        "the old residual is in it twice",
    ),
    "one element more": (edit(REFERENCE, "topk(self.k)", "topk(min(self.k + 1, len(grad)))"), "one element too many"),
    "one call of all": (
        edit(REFERENCE, "topk(self.k)", "topk(len(grad))"),
        "each rank sends its k largest elements, and no more",
    ),
    "clears all": (
        edit(REFERENCE, "        left[indices] = 0\n", "        left = torch.zeros_like(left)\n"),
        "nothing is kept of what was not sent",
    ),
}

RIGHT = {"12.1": (IN_ONE_MESSAGE, TWO_AT_ONCE)}
WRONG = {"12.1": MUTANTS}
