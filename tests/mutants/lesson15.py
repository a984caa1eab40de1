"""Lesson 15: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson15 import HEADS, PIPELINE, SPLIT

from .sources import edit

# ---------------------------------------------------------------------- 15.1

SPLIT_BY_LINEARS = """\
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.nn.functional import gelu


class Enter(Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        total = grad.detach().clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=ctx.group, async_op=True).wait()
        return total, None


class Leave(Function):
    @staticmethod
    def forward(ctx, part, group):
        total = part + 0
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        return grad.clone(), None


class MyMLP(nn.Module):
    def __init__(self, mlp, group):
        super().__init__()
        size, rank = group.size(), group.rank()
        hidden, width = mlp.up.weight.shape
        mine = slice(rank * hidden // size, (rank + 1) * hidden // size)
        like = {"dtype": mlp.up.weight.dtype, "device": mlp.up.weight.device}
        self.up = nn.Linear(width, hidden // size, **like)
        self.down = nn.Linear(hidden // size, width, **like)
        self.up.weight.data.copy_(mlp.up.weight.data[mine])
        self.up.bias.data.copy_(mlp.up.bias.data[mine])
        self.down.weight.data.copy_(mlp.down.weight.data[:, mine])
        self.down.bias.data.copy_(mlp.down.bias.data)
        self.enter = lambda x: Enter.apply(x, group)
        self.leave = lambda x: Leave.apply(x, group)

    def forward(self, x):
        hidden = gelu(self.up(self.enter(x)))
        return self.leave(hidden @ self.down.weight.T) + self.down.bias
"""

SPLIT_BY_HALVES = """\
import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


def added(part, group):
    \"\"\"A reduce-scatter and an all-gather, by hand.\"\"\"
    size = dist.get_world_size(group)
    flat = torch.cat([part.flatten(), part.new_zeros(-part.numel() % size)])
    received = torch.empty_like(flat)
    dist.all_to_all_single(received, flat, group=group)
    shard = received.view(size, -1).sum(dim=0)
    dist.all_gather_into_tensor(received, shard, group=group)
    return received[: part.numel()].view(part.shape).clone()


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view(x.shape)

    @staticmethod
    def backward(ctx, grad):
        return added(grad, ctx.group), None


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part, group):
        return added(part, group)

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class MyMLP(nn.Module):
    def __init__(self, mlp, group):
        super().__init__()
        self.up, self.down = copy.deepcopy(mlp.up), copy.deepcopy(mlp.down)
        self.group, rank, size = group, dist.get_rank(group), dist.get_world_size(group)
        with torch.no_grad():
            self.up.weight = nn.Parameter(torch.tensor_split(self.up.weight, size, dim=0)[rank].clone())
            self.up.bias = nn.Parameter(torch.tensor_split(self.up.bias, size, dim=0)[rank].clone())
            columns = self.down.weight.unflatten(1, (size, -1))[:, rank]
            self.down.weight = nn.Parameter(columns.clone(memory_format=torch.contiguous_format))

    def forward(self, x):
        y = self.up(Enter.apply(x, self.group))
        return self.down.bias + Leave.apply(F.linear(F.gelu(y), self.down.weight), self.group)
"""

_ENTER_BACK = "        grad = grad.clone()\n        dist.all_reduce(grad, group=ctx.group)\n"
_LEAVE = "        part = part.clone()\n        dist.all_reduce(part, group=group)\n"
_HIDDEN = "F.gelu(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias))"
_OUT = "Leave.apply(F.linear(hidden, self.down.weight), self.group) + self.down.bias"

SPLIT_MUTANTS = {
    "all-reduce after the column half": (
        edit(
            SPLIT,
            _HIDDEN,
            "Leave.apply(F.gelu(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias)), self.group)",
        ),
        "different units",
    ),
    "all-reduce before gelu": (
        edit(
            SPLIT,
            _HIDDEN,
            "F.gelu(Leave.apply(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias), self.group))",
        ),
        "different units",
    ),
    "bias on every rank": (
        edit(SPLIT, _OUT, "Leave.apply(F.linear(hidden, self.down.weight, self.down.bias), self.group)"),
        "so N times",
    ),
    "bias on rank 0": (
        edit(
            SPLIT,
            _OUT,
            "Leave.apply(F.linear(hidden, self.down.weight, self.first_bias()), self.group)",
            "    def forward(self, x: Tensor) -> Tensor:\n",
            "    def first_bias(self):\n        return self.down.bias if dist.get_rank(self.group) == 0 else None\n\n"
            "    def forward(self, x: Tensor) -> Tensor:\n",
        ),
        "on one rank only",
    ),
    "bias forgotten": (edit(SPLIT, " + self.down.bias\n", "\n"), "is missing"),
    "bias divided": (
        edit(
            SPLIT,
            _OUT,
            "Leave.apply(F.linear(hidden, self.down.weight, self.down.bias / self.group.size()), self.group)",
        ),
        "divided by N",
    ),
    "bias kept in part": (
        edit(SPLIT, "mlp.down.bias.detach().clone()", "mlp.down.bias.detach().clone() / N"),
        "divided by N",
    ),
    "no sum in backward": (edit(SPLIT, _ENTER_BACK, ""), "Enter.backward must add up"),
    "no Enter": (edit(SPLIT, "Enter.apply(x, self.group)", "x"), "Enter.backward must add up"),
    "backward of Leave sums": (
        edit(
            SPLIT,
            "    def backward(ctx, grad: Tensor):\n        return grad, None",
            "    def backward(ctx, grad: Tensor):\n        grad = grad.clone()\n        dist.all_reduce(grad)\n"
            "        return grad, None",
        ),
        "N times too large",
    ),
    "torch's differentiable all-reduce": (
        edit(
            SPLIT,
            _OUT,
            "dist.nn.all_reduce(F.linear(hidden, self.down.weight), group=self.group) + self.down.bias",
            "import torch.distributed as dist\n",
            "import torch.distributed as dist\nimport torch.distributed.nn\n",
        ),
        "N times too large",
    ),
    "mean in forward": (
        edit(SPLIT, "        return part\n", "        return part / dist.get_world_size(group)\n"),
        "the mean was taken",
    ),
    "mean in backward": (
        edit(SPLIT, _ENTER_BACK, _ENTER_BACK + "        grad /= dist.get_world_size(ctx.group)\n"),
        "the mean was taken",
    ),
    "no sum in forward": (edit(SPLIT, "        dist.all_reduce(part, group=group)\n", ""), "Leave.forward must add up"),
    "Enter sums in forward": (
        edit(
            SPLIT,
            "        return x.view_as(x)",
            "        x = x.clone()\n        dist.all_reduce(x, group=group)\n        return x",
        ),
        "Enter.forward passes x on",
    ),
    "down cut by rows": (
        edit(SPLIT, "mlp.down.weight.detach().chunk(N, dim=1)[rank]", "mlp.down.weight.detach().chunk(N)[rank]"),
        "rank r keeps columns",
    ),
    "up cut by columns": (
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank]", "mlp.up.weight.detach().chunk(N, dim=1)[rank]"),
        "rank r keeps rows",
    ),
    "nothing cut": (
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank]", "mlp.up.weight.detach()"),
        "all of it was kept",
    ),
    "gelu after the sum": (
        edit(
            SPLIT,
            _HIDDEN,
            _HIDDEN.replace("F.gelu(", "(", 1),
            _OUT,
            "F.gelu(Leave.apply(F.linear(hidden, self.down.weight), self.group) + self.down.bias)",
        ),
        "GELU",
    ),
    "relu": (edit(SPLIT, _HIDDEN, _HIDDEN.replace("F.gelu(", "F.relu(", 1)), "that is a ReLU"),
    "no gelu": (edit(SPLIT, _HIDDEN, _HIDDEN.replace("F.gelu(", "(", 1)), "GELU between the two layers is missing"),
    "all-reduce outside of autograd": (
        edit(
            SPLIT,
            _OUT,
            "self.total(F.linear(hidden, self.down.weight)) + self.down.bias",
            "    def forward(self, x: Tensor) -> Tensor:\n",
            "    def total(self, part):\n        parts = [torch.empty_like(part) for _ in range(self.group.size())]\n"
            "        dist.all_gather(parts, part.detach(), group=self.group)\n"
            "        return torch.stack(parts).sum(dim=0)\n\n"
            "    def forward(self, x: Tensor) -> Tensor:\n",
        ),
        "know nothing of autograd",
    ),
    "gathers and adds": (
        edit(
            SPLIT,
            _LEAVE,
            "        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]\n"
            "        dist.all_gather(parts, part, group=group)\n        part = torch.stack(parts).sum(dim=0)\n",
        ),
        "gathered and then added up",
    ),
    "in place, backward": (edit(SPLIT, "        grad = grad.clone()\n", ""), "residual connection"),
    "in place, forward": (edit(SPLIT, "        part = part.clone()\n", ""), "changed the tensor that it was given"),
    "own initial values": (
        edit(
            SPLIT,
            "mlp.up.weight.detach().chunk(N)[rank].clone()",
            "torch.randn_like(mlp.up.weight.detach().chunk(N)[rank])",
        ),
        "not those of `mlp`",
    ),
    "another rank's part": (
        edit(
            SPLIT,
            "self.group = group\n        rank, N",
            "self.group = group\n        rank, N",
            "dist.get_rank(group), ",
            "dist.get_world_size(group) - 1 - dist.get_rank(group), ",
        ),
        "another rank's part",
    ),
    "dealt out": (
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank]", "mlp.up.weight.detach()[rank::N]"),
        "dealt out in turn",
    ),
    "views": (
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank].clone()", "mlp.up.weight.detach().clone().chunk(N)[rank]"),
        "views of the whole model",
    ),
    "group forgotten": (edit(SPLIT, "dist.all_reduce(part, group=group)", "dist.all_reduce(part)"), "over all ranks"),
    "group forgotten in backward": (
        edit(SPLIT, "dist.all_reduce(grad, group=ctx.group)", "dist.all_reduce(grad)"),
        "over all ranks",
    ),
    "the global rank": (edit(SPLIT, "dist.get_rank(group)", "dist.get_rank()"), "take rank and size from it"),
    "the global size": (
        edit(SPLIT, "dist.get_world_size(group)", "dist.get_world_size()"),
        "take rank and size from it",
    ),
    "wait forgotten": (
        edit(SPLIT, "dist.all_reduce(part, group=group)", "dist.all_reduce(part, group=group, async_op=True)"),
        "a forgotten wait",
    ),
    "float32 only": (
        edit(SPLIT, "        return part\n", "        return part.float()\n"),
        "dtype",
    ),
    "None forgotten": (
        edit(SPLIT, "        return grad, None\n\n\nclass Leave", "        return grad\n\n\nclass Leave"),
        "None for `group`",
    ),
}

# ---------------------------------------------------------------------- 15.2

HEADS_BY_CAT = """\
import torch


def heads_of(rows, heads, rank, size):
    if heads % size != 0:
        raise ValueError("a head cannot be cut")
    pieces = [part.chunk(size)[rank] for part in rows.chunk(3)]
    return torch.cat(pieces)
"""

HEADS_BY_NUMBERS = """\
import torch


def heads_of(rows, heads, rank, size):
    own, rest = divmod(heads, size)
    if rest:
        raise ValueError(heads, size)
    width = len(rows) // 3
    each = width // heads
    wanted = [
        part * width + head * each + i
        for part in range(3)
        for head in range(rank * own, (rank + 1) * own)
        for i in range(each)
    ]
    return rows[torch.tensor(wanted)]
"""

_PIECES = "pieces = rows.view(3, size, -1, *rows.shape[1:])  # q, k, v; of each a piece per rank"
_RETURN = "pieces[:, rank].flatten(0, 1).clone()"
HEADS_MUTANTS = {
    "q, k and v mixed": (edit(HEADS, _RETURN, "rows.chunk(size)[rank].clone()"), "cut q, k and v one by one"),
    "another rank's": (edit(HEADS, "pieces[:, rank]", "pieces[:, size - 1 - rank]"), "another rank's heads"),
    "dealt out": (
        edit(HEADS, _RETURN, "rows.view(3, heads, -1, *rows.shape[1:])[:, rank::size].flatten(0, 2).clone()"),
        "dealt out in turn",
    ),
    "q only": (edit(HEADS, _RETURN, "pieces[0, rank].clone()"), "q, k and v are needed"),
    "head by head": (
        edit(HEADS, _RETURN, "rows.view(heads, -1, *rows.shape[1:]).chunk(size)[rank].flatten(0, 1).clone() * 1"),
        "cut q, k and v one by one",
    ),
    "per head": (
        edit(
            HEADS,
            _RETURN,
            "rows.view(heads, 3, -1, *rows.shape[1:]).chunk(size)[rank].transpose(0, 1).flatten(0, 2).clone()",
        ),
        "q, k and v of one head after the other",
    ),
    "through the heads": (
        edit(HEADS, _RETURN, "rows.view(3, -1, heads, *rows.shape[1:]).chunk(size, dim=2)[rank].flatten(0, 2).clone()"),
        "the cut runs through every head",
    ),
    "a view": (
        edit(HEADS, "    pieces", "    if size == 1:\n        return rows\n    pieces"),
        "clone() the part",
    ),
    "no refusal": (edit(HEADS, "    if heads % size:\n", "    if heads < 0:\n"), "a head cannot be cut"),
    "a list": (edit(HEADS, _RETURN, "[part.clone() for part in pieces[:, rank]]"), "put the three pieces together"),
    "nothing returned": (edit(HEADS, "return pieces", "pieces"), "`return` is missing"),
}

# ---------------------------------------------------------------------- 15.3

PIPELINE_BY_COUNTING = """\
from zerolab.lab import Pipeline


class MyPipeline(Pipeline):
    def order(self):
        done = [0, 0]
        while done[1] < self.micro_batches:
            in_flight = done[0] - done[1]
            back = in_flight == self.size - self.rank or done[0] == self.micro_batches
            yield ("backward" if back else "forward"), done[back]
            done[back] += 1

    def forward(self, m):
        entry = {"x": self.take_input(m)}
        self.kept[m] = entry
        out = self.stage(entry["x"])
        if not self.last:
            self.send_output(out.detach(), m)
            entry["out"] = out
            return
        entry["loss"] = self.loss(out, m)

    def backward(self, m):
        entry = self.kept[m]
        del self.kept[m]
        if self.last:
            (entry["loss"] / self.micro_batches).backward()
        else:
            grad = self.take_grad(m)
            entry["out"].backward(gradient=grad)
        if self.rank > 0:
            self.send_grad(entry["x"].grad, m)
"""

PIPELINE_BY_GRAD = """\
import torch
from zerolab import lab


class MyPipeline(lab.Pipeline):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.mine = {}

    def order(self):
        M, ahead = self.micro_batches, self.size - self.rank
        forwards = [("forward", m) for m in range(M)]
        backwards = [("backward", m) for m in range(M)]
        steps = forwards[: ahead - 1]
        for i in range(M + ahead - 1):
            steps += forwards[i + ahead - 1 : i + ahead] + backwards[i : i + 1]
        return steps

    def forward(self, m):
        x = self.take_input(m)
        y = self.stage(x)
        if self.last:
            self.mine[m] = x, self.loss(y, m).div(self.micro_batches)
        else:
            self.mine[m] = x, y
            self.send_output(y, m)

    def backward(self, m):
        x, y = self.mine.pop(m)
        grad = None if self.last else self.take_grad(m)
        params = [p for p in self.stage.parameters() if p.requires_grad]
        wanted = params if self.first else [x, *params]
        found = list(torch.autograd.grad(y, wanted, grad, allow_unused=True))
        if not self.first:
            self.send_grad(found.pop(0), m)
        for param, piece in zip(params, found):
            if piece is not None:
                param.grad = piece if param.grad is None else param.grad + piece
"""

_ORDER = PIPELINE[PIPELINE.index("        warm_up") : PIPELINE.index("    def forward")]
_SCALED = "self.loss(y, m) / self.micro_batches"
_POP = "self.kept.pop(m)"
_BACK = "y.backward(None if self.last else self.take_grad(m))"


def _order(body: str) -> str:
    return edit(PIPELINE, _ORDER, "".join(f"        {line}\n" for line in body.splitlines()) + "\n")


PIPELINE_MUTANTS = {
    "GPipe": (
        _order('M = range(self.micro_batches)\nreturn [("forward", m) for m in M] + [("backward", m) for m in M]'),
        "that is GPipe",
    ),
    "LIFO": (
        _order(
            'M = range(self.micro_batches)\nreturn [("forward", m) for m in M] + [("backward", m) for m in reversed(M)]'
        ),
        "the last micro-batch first",
    ),
    "one by one": (
        _order('return [(what, m) for m in range(self.micro_batches) for what in ("forward", "backward")]'),
        "only one stage works at a time",
    ),
    "the wrong way round": (
        edit(PIPELINE, "self.size - 1 - self.rank", "self.rank"),
        "none goes on",
    ),
    "one warm-up too many": (
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(self.size - self.rank,"),
        "keep N - r at most",
    ),
    "one warm-up too few": (
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(max(0, self.size - 2 - self.rank),"),
        "stand still longer",
    ),
    "no minimum": (
        edit(PIPELINE, "min(self.size - 1 - self.rank, self.micro_batches)", "self.size - 1 - self.rank"),
        "micro-batches are numbered",
    ),
    "backward first": (
        edit(PIPELINE, '[("forward", warm_up + m), ("backward", m)]', '[("backward", m), ("forward", warm_up + m)]'),
        "backward comes before its own forward",
    ),
    "the rest forgotten": (
        edit(PIPELINE, 'return steps + [("backward", m) for m in left]', "return steps"),
        "one forward and one backward on every rank",
    ),
    "deadlock": (
        _order(
            "steps = [(what, m) for m in range(self.micro_batches) for what in ('forward', 'backward')]\n"
            "M = range(self.micro_batches)\n"
            "gpipe = [('forward', m) for m in M] + [('backward', m) for m in M]\n"
            "return gpipe if self.last and not self.first else steps"
        ),
        "none goes on",
    ),
    "not scaled": (edit(PIPELINE, _SCALED, "self.loss(y, m)"), "divide it by self.micro_batches"),
    "scaled by stages": (edit(PIPELINE, _SCALED, "self.loss(y, m) / self.size"), "divided by the number of stages"),
    "scaled everywhere": (
        edit(PIPELINE, _BACK, "y.backward(None if self.last else self.take_grad(m) / self.micro_batches)"),
        "more than once",
    ),
    "gradients overwritten": (
        edit(
            PIPELINE,
            "        x, y = self.kept.pop(m)\n",
            "        x, y = self.kept.pop(m)\n        self.stage.zero_grad()\n",
        ),
        "only the last micro-batch's gradient",
    ),
    "one place for all": (
        edit(PIPELINE, "self.kept[m] = x, y", "self.kept[0] = x, y", _POP, "self.kept[0]"),
        "another one's forward",
    ),
    "the last one in": (
        edit(PIPELINE, _POP, "self.kept.popitem()[1]"),
        "another one's forward",
    ),
    "kept too long": (edit(PIPELINE, _POP, "self.kept[m]"), "self.kept.pop(m)"),
    "kept in a list": (
        edit(
            PIPELINE,
            "        y = self.stage(x)\n",
            "        y = self.stage(x)\n        self.all = [*getattr(self, 'all', []), y]\n",
        ),
        "self.kept.pop(m)",
    ),
    "nothing sent on": (
        edit(PIPELINE, "            self.send_output(y, m)\n", "            pass\n"),
        "the next rank waits for it",
    ),
    "nothing sent back": (
        edit(PIPELINE, "            self.send_grad(x.grad, m)\n", "            pass\n"),
        "the next rank waits for it",
    ),
    "the output's gradient": (
        edit(
            PIPELINE,
            "        " + _BACK + "\n",
            "        grad = None if self.last else self.take_grad(m)\n        y.backward(grad)\n",
            "self.send_grad(x.grad, m)",
            "self.send_grad(x.grad if grad is None else grad, m)",
        ),
        "gradient of this stage's input",
    ),
    "backward without a gradient": (
        edit(PIPELINE, _BACK, "y.backward()"),
        "y.backward(grad)",
    ),
    "ones for a gradient": (
        edit(PIPELINE, _BACK, "y.backward(None if self.last else self.take_grad(m) * 0 + 1)"),
        "y.backward(grad)",
    ),
    "the input sent on": (edit(PIPELINE, "self.send_output(y, m)", "self.send_output(x, m)"), "not its output"),
    "micro-batch 0 every time": (
        edit(PIPELINE, "self.take_input(m)", "self.take_input(0)"),
        "another micro-batch's number",
    ),
    "the next gradient": (edit(PIPELINE, "self.take_grad(m)", "self.take_grad(m + 1)"), "another micro-batch's number"),
    "the last stage sends": (
        edit(PIPELINE, "        else:\n            self.send_output(y, m)\n", "        self.send_output(y, m)\n"),
        "sends nothing on",
    ),
    "detached": (edit(PIPELINE, "self.kept[m] = x, y", "self.kept[m] = x, y.detach()"), "there is no graph"),
}

RIGHT = {
    "15.1": [SPLIT_BY_LINEARS, SPLIT_BY_HALVES],
    "15.2": [HEADS_BY_CAT, HEADS_BY_NUMBERS],
    "15.3": [PIPELINE_BY_COUNTING, PIPELINE_BY_GRAD],
}
WRONG = {"15.1": SPLIT_MUTANTS, "15.2": HEADS_MUTANTS, "15.3": PIPELINE_MUTANTS}
