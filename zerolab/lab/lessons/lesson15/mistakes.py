"""Lesson 15: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson15 import PIPELINE, SPLIT

UP_REDUCED = (
    "an all-reduce after the first layer adds hidden units of different ranks. They are different units: "
    "leave them where they are, the second layer wants each rank's own"
)
BIAS_DIVIDED = "the bias of `down` was divided by N: then so is its gradient. Keep all of it, and add it after the sum"
NOT_SUMMED = (
    "Enter.backward must add up: each rank's gradient tells only how the loss depends on x through its "
    "own hidden units. Without the all-reduce every layer below gets a part of its gradient"
)
SUMS_AGAIN = (
    "Leave.backward all-reduces too: every rank has the gradient of the sum already, in full, and so the "
    "gradient becomes N times too large. It passes through as it is"
)
NO_MEAN = "the mean was taken: the parts of one sum are added up, and nothing is averaged"
NO_GELU = "that is not GELU: the MLP of the GPT has F.gelu() between its two layers"
DEALT = (
    "hidden units were dealt out in turn, [rank::N]: the sum would be right, but rank r is to keep those "
    "from r * hidden / N on, as they lie"
)
KEEPS_WHOLE = "the parameters are views of the whole model's, all of which then stays in memory: clone() the part"
KEEPS_MLP = "the whole `mlp` is kept, and with it all of its parameters: keep a copy of this rank's parts, and no more"
WRONG_GROUP = (
    "the call went over all ranks, not over `group`: pass group=..., and take rank and size from it, "
    "dist.get_rank(group)"
)
DEADLOCK = "the orders of the ranks do not fit: each waits for what another sends only later, and none goes on"
SAME_KEPT = "backward of one micro-batch used what another one's forward left: keep it under its number, self.kept[m]"
KEPT_LONG = "what backward has used can go: self.kept.pop(m), or the activations of all micro-batches stay in memory"
NEVER_SENT = (
    "what a stage computes was never sent on, and the next rank waits for it: self.send_output(y, m), "
    "self.send_grad(x.grad, m)"
)
TOO_MANY = "too many micro-batches are in flight: rank r keeps N - r at most, one for its own stage and each after it"
NO_MINIMUM = (
    "there are fewer micro-batches here than stages ahead, and no more can be on their way: begin with "
    "min(size - 1 - rank, micro_batches) forwards"
)
ONCE_EACH = "each micro-batch has one forward and one backward on every rank: here one is missing, or comes twice"
SCALED_TWICE = "divided by the number of micro-batches more than once: the last stage divides the loss, and nobody else"
NO_LEAF = "that .grad is None: only the x that self.take_input() gave is a leaf, and has one after backward"
TAKES_GRAD = "backward of a stage in the middle begins with the gradient that the next stage sends: y.backward(grad)"
WRONG_NUMBER = "that is another micro-batch's number: forward(m) and backward(m) pass their m on"

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

SPLIT_MISTAKES = {
    "all-reduce after the column half": Mistake(
        edit(
            SPLIT,
            _HIDDEN,
            "Leave.apply(F.gelu(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias)), self.group)",
        ),
        UP_REDUCED,
    ),
    "all-reduce before gelu": Mistake(
        edit(
            SPLIT,
            _HIDDEN,
            "F.gelu(Leave.apply(F.linear(Enter.apply(x, self.group), self.up.weight, self.up.bias), self.group))",
        ),
        UP_REDUCED,
    ),
    "bias on every rank": Mistake(
        edit(SPLIT, _OUT, "Leave.apply(F.linear(hidden, self.down.weight, self.down.bias), self.group)"),
        "the bias of `down` was added on every rank before the sum, so N times: add it after the sum",
    ),
    "bias on rank 0": Mistake(
        edit(
            SPLIT,
            _OUT,
            "Leave.apply(F.linear(hidden, self.down.weight, self.first_bias()), self.group)",
            "    def forward(self, x: Tensor) -> Tensor:\n",
            "    def first_bias(self):\n        return self.down.bias if dist.get_rank(self.group) == 0 else None\n\n"
            "    def forward(self, x: Tensor) -> Tensor:\n",
        ),
        (
            "the bias of `down` is added on one rank only: there it gets its gradient, elsewhere none, and after "
            "a step the copies differ. Add it on every rank, after the sum"
        ),
    ),
    "bias forgotten": Mistake(
        edit(SPLIT, " + self.down.bias\n", "\n"), "the bias of `down` is missing: add it after the sum"
    ),
    "bias divided": Mistake(
        edit(
            SPLIT,
            _OUT,
            "Leave.apply(F.linear(hidden, self.down.weight, self.down.bias / self.group.size()), self.group)",
        ),
        BIAS_DIVIDED,
    ),
    "bias kept in part": Mistake(
        edit(SPLIT, "mlp.down.bias.detach().clone()", "mlp.down.bias.detach().clone() / N"),
        BIAS_DIVIDED,
    ),
    "no sum in backward": Mistake(edit(SPLIT, _ENTER_BACK, ""), NOT_SUMMED),
    "no Enter": Mistake(edit(SPLIT, "Enter.apply(x, self.group)", "x"), NOT_SUMMED),
    "backward of Leave sums": Mistake(
        edit(
            SPLIT,
            "    def backward(ctx, grad: Tensor):\n        return grad, None",
            "    def backward(ctx, grad: Tensor):\n        grad = grad.clone()\n        dist.all_reduce(grad)\n"
            "        return grad, None",
        ),
        SUMS_AGAIN,
    ),
    "torch's differentiable all-reduce": Mistake(
        edit(
            SPLIT,
            _OUT,
            "dist.nn.all_reduce(F.linear(hidden, self.down.weight), group=self.group) + self.down.bias",
            "import torch.distributed as dist\n",
            "import torch.distributed as dist\nimport torch.distributed.nn\n",
        ),
        SUMS_AGAIN,
    ),
    "mean in forward": Mistake(
        edit(SPLIT, "        return part\n", "        return part / dist.get_world_size(group)\n"),
        NO_MEAN,
    ),
    "mean in backward": Mistake(
        edit(SPLIT, _ENTER_BACK, _ENTER_BACK + "        grad /= dist.get_world_size(ctx.group)\n"),
        NO_MEAN,
    ),
    "no sum in forward": Mistake(
        edit(SPLIT, "        dist.all_reduce(part, group=group)\n", ""),
        "Leave.forward must add up: each rank has the part of the sum that comes from its own hidden units",
    ),
    "Enter sums in forward": Mistake(
        edit(
            SPLIT,
            "        return x.view_as(x)",
            "        x = x.clone()\n        dist.all_reduce(x, group=group)\n        return x",
        ),
        "Enter.forward passes x on as it is: every rank has the same x, and N times x is another input",
    ),
    "down cut by rows": Mistake(
        edit(SPLIT, "mlp.down.weight.detach().chunk(N, dim=1)[rank]", "mlp.down.weight.detach().chunk(N)[rank]"),
        ("the second layer is cut by the same hidden units: down.weight is (C, hidden), so rank r keeps columns"),
    ),
    "up cut by columns": Mistake(
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank]", "mlp.up.weight.detach().chunk(N, dim=1)[rank]"),
        ("the first layer is cut by hidden units: up.weight is (hidden, C), so rank r keeps rows, and all columns"),
    ),
    "nothing cut": Mistake(
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank]", "mlp.up.weight.detach()"),
        "all of it was kept: a rank's part has 1/N of the hidden units",
    ),
    "gelu after the sum": Mistake(
        edit(
            SPLIT,
            _HIDDEN,
            _HIDDEN.replace("F.gelu(", "(", 1),
            _OUT,
            "F.gelu(Leave.apply(F.linear(hidden, self.down.weight), self.group) + self.down.bias)",
        ),
        "GELU comes between the two layers, and not after the second",
    ),
    "relu": Mistake(edit(SPLIT, _HIDDEN, _HIDDEN.replace("F.gelu(", "F.relu(", 1)), NO_GELU),
    "no gelu": Mistake(
        edit(SPLIT, _HIDDEN, _HIDDEN.replace("F.gelu(", "(", 1)), "the GELU between the two layers is missing"
    ),
    "all-reduce outside of autograd": Mistake(
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
        (
            "dist's collectives know nothing of autograd: no gradient passes through what they fill. Call them "
            "inside an autograd.Function that says what backward does"
        ),
    ),
    "gathers and adds": Mistake(
        edit(
            SPLIT,
            _LEAVE,
            "        parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]\n"
            "        dist.all_gather(parts, part, group=group)\n        part = torch.stack(parts).sum(dim=0)\n",
        ),
        (
            "all ranks' parts were gathered and then added up here: that sends (N-1) times a part, and an "
            "all-reduce only 2(N-1)/N times"
        ),
    ),
    "in place, backward": Mistake(
        edit(SPLIT, "        grad = grad.clone()\n", ""),
        (
            "Enter.backward changed the gradient that it was given, which another branch (a residual connection) "
            "still needs: clone it, then all-reduce the clone"
        ),
    ),
    "in place, forward": Mistake(
        edit(SPLIT, "        part = part.clone()\n", ""),
        "Leave.forward changed the tensor that it was given: clone it, then all-reduce the clone",
    ),
    "own initial values": Mistake(
        edit(
            SPLIT,
            "mlp.up.weight.detach().chunk(N)[rank].clone()",
            "torch.randn_like(mlp.up.weight.detach().chunk(N)[rank])",
        ),
        "the values are not those of `mlp`: a split keeps a part of the given weights, and makes up none",
    ),
    "another rank's part": Mistake(
        edit(
            SPLIT,
            "self.group = group\n        rank, N",
            "self.group = group\n        rank, N",
            "dist.get_rank(group), ",
            "dist.get_world_size(group) - 1 - dist.get_rank(group), ",
        ),
        "another rank's part: rank r keeps hidden units r * hidden / N to (r + 1) * hidden / N",
    ),
    "dealt out": Mistake(
        edit(
            SPLIT,
            "detach().chunk(N)[rank]",
            "detach()[rank::N]",
            "detach().chunk(N, dim=1)[rank]",
            "detach()[:, rank::N]",
        ),
        DEALT,
    ),
    "views": Mistake(
        edit(SPLIT, "mlp.up.weight.detach().chunk(N)[rank].clone()", "mlp.up.weight.detach().clone().chunk(N)[rank]"),
        KEEPS_WHOLE,
    ),
    "views of mlp": Mistake(edit(SPLIT, ".clone())", ")"), KEEPS_WHOLE),
    "group forgotten": Mistake(edit(SPLIT, "dist.all_reduce(part, group=group)", "dist.all_reduce(part)"), WRONG_GROUP),
    "group forgotten in backward": Mistake(
        edit(SPLIT, "dist.all_reduce(grad, group=ctx.group)", "dist.all_reduce(grad)"),
        WRONG_GROUP,
    ),
    "the global rank": Mistake(edit(SPLIT, "dist.get_rank(group)", "dist.get_rank()"), WRONG_GROUP),
    "the global size": Mistake(
        edit(SPLIT, "dist.get_world_size(group)", "dist.get_world_size()"),
        WRONG_GROUP,
    ),
    "wait forgotten": Mistake(
        edit(SPLIT, "dist.all_reduce(part, group=group)", "dist.all_reduce(part, group=group, async_op=True)"),
        "all_reduce was started, and not waited for: with async_op=True the sum is there only after wait()",
    ),
    "float32 only": Mistake(
        edit(SPLIT, "        return part\n", "        return part.float()\n"),
        "right in one dtype only: keep the dtype of mlp's weights, and convert nothing",
    ),
    "None forgotten": Mistake(
        edit(SPLIT, "        return grad, None\n\n\nclass Leave", "        return grad\n\n\nclass Leave"),
        "backward returns something for each argument of forward: the gradient, and None for `group`",
    ),
    "gelu by tanh": Mistake(
        edit(SPLIT, "self.up.bias))", "self.up.bias), approximate='tanh')"),
        "that is GELU's approximation by tanh: the MLP of the GPT has F.gelu() itself",
    ),
    "enters and leaves the wrong way round": Mistake(
        edit(
            SPLIT, "F.linear(Enter.apply(x", "F.linear(Leave.apply(x", "Leave.apply(F.linear(", "Enter.apply(F.linear("
        ),
        "Enter and Leave are mixed up: x enters before the first layer, and a part of the sum leaves after the second",
    ),
    "a parameter without its graph": Mistake(
        edit(SPLIT, "self.up.weight, self.up.bias))", "self.up.weight.data, self.up.bias))"),
        "forward computes with a detached parameter, which then gets no gradient: use the nn.Parameter itself",
    ),
    "a buffer": Mistake(
        edit(
            SPLIT,
            "self.down.bias = nn.Parameter(mlp.down.bias.detach().clone())",
            "self.down.register_buffer('bias', mlp.down.bias.detach().clone())",
        ),
        "all four are nn.Parameters: a buffer or a plain tensor is not trained, and an optimizer does not see it",
    ),
    "a sum on one rank": Mistake(
        edit(SPLIT, "dist.all_reduce(part, group", "dist.reduce(part, dist.get_global_rank(group, 0), group"),
        "dist.reduce() leaves the sum on one rank: all ranks need it, as dist.all_reduce() gives it",
    ),
    "the largest part": Mistake(
        edit(SPLIT, "dist.all_reduce(part, group", "dist.all_reduce(part, dist.ReduceOp.MAX, group"),
        "the parts are those of a sum: all-reduce adds them up unless it is told otherwise",
    ),
    "makes sure of x": Mistake(
        edit(
            SPLIT,
            "        return x.view_as(x)",
            "        x = x.clone()\n        dist.broadcast(x, 0)\n        return x",
        ),
        "Enter.forward sends something, and has nothing to send: x is the same on every rank",
    ),
    "keeps the whole": Mistake(
        edit(SPLIT, "self.group = group", "self.group = group\n        self.whole = [mlp]"),
        KEEPS_MLP,
    ),
    "keeps the module": Mistake(
        edit(SPLIT, "self.group = group", "self.group = group\n        self.mlp = mlp"),
        KEEPS_MLP,
    ),
    "one group for all": Mistake(
        edit(
            SPLIT,
            "        self.group = group\n",
            "        MyMLP.group = group\n",
        ),
        "the group is kept for all MLPs together, and the last one made decides: each has its own, self.group",
    ),
    "no bias in up": Mistake(
        edit(SPLIT, "self.up.weight, self.up.bias))", "self.up.weight))"),
        "the bias of `up` is missing: it belongs inside GELU, this rank's part of it",
    ),
    "another nonlinearity": Mistake(edit(SPLIT, "F.gelu(", "F.silu("), NO_GELU),
    "the residual added": Mistake(
        edit(SPLIT, _OUT, f"{_OUT} + x"),
        "x was added to the result: that is the block's residual connection, which stays outside of the MLP",
    ),
    "Leave divides": Mistake(
        edit(
            SPLIT,
            "        return grad, None\n\n\nclass MyMLP",
            "        return grad / dist.get_world_size(), None\n\n\nclass MyMLP",
        ),
        "Leave.backward divides: every rank's part has the gradient of the sum, all of it. It passes through as it is",
    ),
}

# ---------------------------------------------------------------------- 15.2

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


PIPELINE_MISTAKES = {
    "GPipe": Mistake(
        _order('M = range(self.micro_batches)\nreturn [("forward", m) for m in M] + [("backward", m) for m in M]'),
        (
            "all forwards before the first backward: that is GPipe, which keeps the activations of all "
            "micro-batches. Begin with backwards as soon as their gradients can be there"
        ),
    ),
    "LIFO": Mistake(
        _order(
            'M = range(self.micro_batches)\nreturn [("forward", m) for m in M] + [("backward", m) for m in reversed(M)]'
        ),
        (
            "backwards run in the opposite order, the last micro-batch first: the first micro-batch is the first "
            "to arrive at the last stage, and its gradient the first to come back"
        ),
    ),
    "one by one": Mistake(
        _order('return [(what, m) for m in range(self.micro_batches) for what in ("forward", "backward")]'),
        (
            "each micro-batch goes all the way there and back before the next one starts: only one stage works at"
            " a time. Rank r begins with N - 1 - r forwards, to fill the stages ahead"
        ),
    ),
    "the wrong way round": Mistake(
        edit(PIPELINE, "self.size - 1 - self.rank", "self.rank"),
        DEADLOCK,
    ),
    "one warm-up too many": Mistake(
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(self.size - self.rank,"),
        TOO_MANY,
    ),
    "one warm-up too few": Mistake(
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(max(0, self.size - 2 - self.rank),"),
        ("stages stand still longer than they have to: after the first N - 1 - r forwards, take turns, one and one"),
    ),
    "no minimum": Mistake(
        edit(PIPELINE, "min(self.size - 1 - self.rank, self.micro_batches)", "self.size - 1 - self.rank"),
        NO_MINIMUM,
    ),
    "no minimum, in one loop": Mistake(
        _order(
            "ahead, M = self.size - 1 - self.rank, self.micro_batches\nsteps = []\n"
            "for m in range(M):\n    steps.append(('forward', m))\n"
            "    if m >= ahead:\n        steps.append(('backward', m - ahead))\n"
            "return steps + [('backward', m) for m in range(M - ahead, M)]"
        ),
        NO_MINIMUM,
    ),
    "backward first": Mistake(
        edit(PIPELINE, '[("forward", warm_up + m), ("backward", m)]', '[("backward", m), ("forward", warm_up + m)]'),
        "in each turn the forward comes first: the last rank begins with turns, and has nothing to run backward yet",
    ),
    "the rest forgotten": Mistake(
        edit(PIPELINE, 'return steps + [("backward", m) for m in left]', "return steps"),
        ONCE_EACH,
    ),
    "the newest backward": Mistake(
        edit(
            PIPELINE, '("forward", warm_up + m), ("backward", m)', '("forward", warm_up + m), ("backward", warm_up + m)'
        ),
        ONCE_EACH,
    ),
    "deadlock": Mistake(
        _order(
            "steps = [(what, m) for m in range(self.micro_batches) for what in ('forward', 'backward')]\n"
            "M = range(self.micro_batches)\n"
            "gpipe = [('forward', m) for m in M] + [('backward', m) for m in M]\n"
            "return gpipe if self.last and not self.first else steps"
        ),
        DEADLOCK,
    ),
    "not scaled": Mistake(
        edit(PIPELINE, _SCALED, "self.loss(y, m)"),
        (
            "the loss of a micro-batch is the mean over its samples: divide it by self.micro_batches, or M means "
            "are added up"
        ),
    ),
    "scaled by stages": Mistake(
        edit(PIPELINE, _SCALED, "self.loss(y, m) / self.size"),
        "the loss was divided by the number of stages: divide by the number of micro-batches",
    ),
    "scaled everywhere": Mistake(
        edit(PIPELINE, _BACK, "y.backward(None if self.last else self.take_grad(m) / self.micro_batches)"),
        SCALED_TWICE,
    ),
    "gradients overwritten": Mistake(
        edit(
            PIPELINE,
            "        x, y = self.kept.pop(m)\n",
            "        x, y = self.kept.pop(m)\n        self.stage.zero_grad()\n",
        ),
        ("only the last micro-batch's gradient is left: gradients of all micro-batches add up until zero_grad()"),
    ),
    "one place for all": Mistake(
        edit(PIPELINE, "self.kept[m] = x, y", "self.kept[0] = x, y", _POP, "self.kept[0]"),
        SAME_KEPT,
    ),
    "one place for the loss": Mistake(
        edit(
            PIPELINE,
            "            y = " + _SCALED,
            "            self.kept['loss'] = " + _SCALED,
            _BACK,
            "(self.kept.pop('loss') if self.last else y).backward(None if self.last else self.take_grad(m))",
        ),
        SAME_KEPT,
    ),
    "the last one in": Mistake(
        edit(PIPELINE, _POP, "self.kept.popitem()[1]"),
        SAME_KEPT,
    ),
    "kept too long": Mistake(edit(PIPELINE, _POP, "self.kept[m]"), KEPT_LONG),
    "kept in a list": Mistake(
        edit(
            PIPELINE,
            "        y = self.stage(x)\n",
            "        y = self.stage(x)\n        self.all = [*getattr(self, 'all', []), y]\n",
        ),
        KEPT_LONG,
    ),
    "nothing sent on": Mistake(
        edit(PIPELINE, "            self.send_output(y, m)\n", "            pass\n"),
        NEVER_SENT,
    ),
    "nothing sent back": Mistake(
        edit(PIPELINE, "            self.send_grad(x.grad, m)\n", "            pass\n"),
        NEVER_SENT,
    ),
    "the output's gradient": Mistake(
        edit(
            PIPELINE,
            "        " + _BACK + "\n",
            "        grad = None if self.last else self.take_grad(m)\n        y.backward(grad)\n",
            "self.send_grad(x.grad, m)",
            "self.send_grad(x.grad if grad is None else grad, m)",
        ),
        "what goes back is the gradient of this stage's input, x.grad",
    ),
    "backward without a gradient": Mistake(
        edit(PIPELINE, _BACK, "y.backward()"),
        TAKES_GRAD,
    ),
    "ones for a gradient": Mistake(
        edit(PIPELINE, _BACK, "y.backward(None if self.last else self.take_grad(m) * 0 + 1)"),
        TAKES_GRAD,
    ),
    "the input sent on": Mistake(
        edit(PIPELINE, "self.send_output(y, m)", "self.send_output(x, m)"),
        "the stage's input was sent on, not its output",
    ),
    "micro-batch 0 every time": Mistake(
        edit(PIPELINE, "self.take_input(m)", "self.take_input(0)"),
        WRONG_NUMBER,
    ),
    "the next gradient": Mistake(edit(PIPELINE, "self.take_grad(m)", "self.take_grad(m + 1)"), WRONG_NUMBER),
    "the last stage sends": Mistake(
        edit(PIPELINE, "        else:\n            self.send_output(y, m)\n", "        self.send_output(y, m)\n"),
        "the last stage computes the loss, self.loss(y, m), and sends nothing on",
    ),
    "detached": Mistake(
        edit(PIPELINE, "self.kept[m] = x, y", "self.kept[m] = x, y.detach()"),
        "there is no graph: forward must keep x and the y that the stage computed from it",
    ),
    "a loss without its graph": Mistake(
        edit(PIPELINE, _SCALED, "(self.loss(y, m) / self.micro_batches).detach().requires_grad_()"),
        "backward never gets to x: y was detached, or copied, and the graph from x to the loss is broken",
    ),
    "another x": Mistake(
        edit(PIPELINE, "self.take_input(m)\n", "self.take_input(m).clone()\n"),
        NO_LEAF,
    ),
    "the gradient kept by y": Mistake(
        edit(PIPELINE, "self.send_grad(x.grad, m)", "self.send_grad(y.grad, m)"), NO_LEAF
    ),
    "computes twice": Mistake(
        edit(
            PIPELINE,
            "self.kept[m] = x, y",
            "self.kept[m] = x, None",
            "x, y = self.kept.pop(m)\n",
            "x, _ = self.kept.pop(m)\n        y = self.stage(x)\n"
            "        if self.last:\n            y = self.loss(y, m) / self.micro_batches\n",
        ),
        "backward computes the forward pass again: keep y in self.kept, its graph is all that backward needs",
    ),
    "as many warm-ups on every rank": Mistake(
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(self.size - 1,"),
        TOO_MANY,
    ),
    "one warm-up more on rank 0": Mistake(
        edit(PIPELINE, "min(self.size - 1 - self.rank,", "min(self.size - 1 - self.rank + (self.rank == 0),"),
        TOO_MANY,
    ),
    "the rest from behind": Mistake(
        edit(PIPELINE, "for m in left]", "for m in reversed(left)]"),
        "the backwards that are left run from the last to the first: gradients come back in the order 0, 1, 2, ...",
    ),
    "the first stage sends back": Mistake(
        edit(PIPELINE, "        if not self.first:\n            self.send_grad(x", "        self.send_grad(x"),
        "the first stage has nobody to send a gradient back to: `if not self.first`",
    ),
    "a gradient for the batch": Mistake(
        edit(PIPELINE, "        y = self.stage(x)\n", "        x.requires_grad_()\n        y = self.stage(x)\n"),
        "the batch needs no gradient, and may be whole numbers, which can have none: self.take_input() has cared for x",
    ),
    "scaled on the way back": Mistake(
        edit(PIPELINE, "self.send_grad(x.grad, m)", "self.send_grad(x.grad / self.micro_batches, m)"),
        SCALED_TWICE,
    ),
    "takes its gradient twice": Mistake(
        edit(
            PIPELINE,
            "        y.backward(None",
            "        if not self.last:\n            self.take_grad(m)\n        y.backward(None",
        ),
        "a gradient is sent once, and so can be taken once: the second take waits for another micro-batch's",
    ),
    "the last stage takes a gradient": Mistake(
        edit(PIPELINE, _BACK, "y.backward(self.take_grad(m))"),
        "the last stage has nobody to take a gradient from: its backward begins with the loss, y.backward()",
    ),
}

PIPELINE_WITH_A_GRADIENT_OF_THE_LOSS = edit(
    PIPELINE,
    _SCALED,
    "self.loss(y, m)",
    _BACK,
    "y.backward(torch.full_like(y, 1 / self.micro_batches) if self.last else self.take_grad(m))",
    "from zerolab import lab",
    "import torch\nfrom zerolab import lab",
)
SPLIT_FUNCTIONAL = edit(
    SPLIT,
    _LEAVE + "        return part\n",
    "        return fc.wait_tensor(fc.all_reduce(part, 'sum', group))\n",
    "from torch import Tensor, nn\n",
    "import torch.distributed._functional_collectives as fc\nfrom torch import Tensor, nn\n",
)

RIGHT = {
    "15.1": [SPLIT_BY_LINEARS, SPLIT_BY_HALVES, SPLIT_FUNCTIONAL],
    "15.2": [PIPELINE_BY_COUNTING, PIPELINE_BY_GRAD, PIPELINE_WITH_A_GRADIENT_OF_THE_LOSS],
}
MISTAKES = {"15.1": SPLIT_MISTAKES, "15.2": PIPELINE_MISTAKES}
