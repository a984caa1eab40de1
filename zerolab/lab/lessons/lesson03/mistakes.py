"""Lesson 03: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson03 import AVERAGE, BUCKET, DDP

# ---------------------------------------------------------------------- 03.1

AVERAGE_ASYNC = """\
from torch.distributed import all_reduce, get_world_size


def average(params):
    grads = [param.grad for param in params if param.grad is not None]
    for grad in grads:
        grad.div_(get_world_size())
    started = [all_reduce(grad, async_op=True) for grad in grads]
    for work in started:
        work.wait()
"""

AVERAGE_NATIVE = """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            continue
        mean = param.grad.clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        param.grad = mean
"""

AVERAGE_BY_FUTURES = """\
import torch.distributed as dist


def average(params):
    N = dist.get_world_size()
    for param in params:
        if param.grad is not None:
            summed = dist.all_reduce(param.grad, async_op=True).get_future()
            param.grad = summed.then(lambda future: future.value()[0] / N).wait()
"""

AVERAGE_TOGETHER = """\
import torch
import torch.distributed as dist


def average(params):
    grads = [param.grad for param in params if param.grad is not None]
    torch.futures.wait_all([dist.all_reduce(grad, async_op=True).get_future() for grad in grads])
    torch._foreach_div_(grads, dist.get_world_size())
"""

AVERAGE_IN_A_RING = """\
import torch
import torch.distributed as dist
from torch.nn import functional as F


def average(params):
    N, rank = dist.get_world_size(), dist.get_rank()

    def pass_on(chunk):
        received = torch.empty_like(chunk)
        send = dist.P2POp(dist.isend, chunk.clone(), (rank + 1) % N)
        for work in dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, received, (rank - 1) % N)]):
            work.wait()
        return received

    for param in params:
        if param.grad is not None and N > 1:
            rows = F.pad(param.grad.flatten(), (0, -param.numel() % N)).view(N, -1).clone()
            for step in range(N - 1):
                rows[(rank - 2 - step) % N] += pass_on(rows[(rank - 1 - step) % N])
            for step in range(N - 1):
                rows[(rank - 1 - step) % N] = pass_on(rows[(rank - step) % N])
            param.grad = rows.flatten()[: param.numel()].view_as(param) / N
"""

AVERAGE_FUNCTIONAL = """\
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce


def average(params):
    for param in params:
        if param.grad is not None:
            param.grad = all_reduce(param.grad, "sum", dist.group.WORLD) / dist.get_world_size()
"""

_SUM = "            dist.all_reduce(param.grad)\n"

AVERAGE_ASKS = """\
import torch
import torch.distributed as dist


def average(params):
    used = torch.tensor([param.grad is not None for param in params], dtype=torch.int32)
    dist.all_reduce(used, op=dist.ReduceOp.MAX)
    for param, anybody in zip(params, used.tolist()):
        if anybody:
            grad = torch.zeros_like(param) if param.grad is None else param.grad.clone()
            dist.all_reduce(grad)
            param.grad = grad / dist.get_world_size()
"""

AVERAGE_MISTAKES = {
    "functional: rank 0 goes another way": Mistake(
        edit(AVERAGE_FUNCTIONAL, "is not None:", "is not None and dist.get_rank():"),
        "not every rank makes the same calls: some are done while others wait",
    ),
    "functional: twice": Mistake(
        edit(
            AVERAGE_FUNCTIONAL,
            " = all_reduce(param.grad,",
            " = all_reduce(all_reduce(param.grad, 'avg', dist.group.WORLD),",
        ),
        "extra traffic (all_reduce): one all-reduce is enough",
    ),
    "stops at an unused parameter": Mistake(
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            break
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
""",
        "the loop ended at the parameter without a gradient: go on with the next one (continue, not break)",
    ),
    "rounds down": Mistake(
        edit(AVERAGE, "/= dist", "//= dist"),
        "`//` rounds down: divide with `/`",
    ),
    "asks whether the gradient is true": Mistake(
        edit(AVERAGE, "if param.grad is not None", "if param.grad"),
        "a tensor of several elements is neither true nor false: `if param.grad is not None`",
    ),
    "uses what all_reduce returns": Mistake(
        edit(
            AVERAGE,
            _SUM + "            param.grad /= dist.get_world_size()\n",
            "            param.grad = dist.all_reduce(param.grad) / dist.get_world_size()\n",
        ),
        "dist.all_reduce() returns None: it leaves the result in the tensor that you give it",
    ),
    "keeps what all_reduce returns": Mistake(
        edit(
            AVERAGE,
            _SUM + "            param.grad /= dist.get_world_size()\n",
            "            param.grad /= dist.get_world_size()\n            param.grad = dist.all_reduce(param.grad)\n",
        ),
        "dist.all_reduce() returns None: it leaves the result in the tensor that you give it",
    ),
    "waits for None": Mistake(
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad).wait()"),
        (
            "without async_op=True dist.all_reduce() is over when it returns: it returns None, and nothing is "
            "left to wait for"
        ),
    ),
    "keeps the work": Mistake(
        edit(AVERAGE, "dist.all_reduce(param.grad)", "param.grad = dist.all_reduce(param.grad, async_op=True)"),
        (
            "with async_op=True a collective returns something to wait for; the result is in the tensor that it "
            "was given"
        ),
    ),
    "reduces the parameter itself": Mistake(
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param)"),
        "the parameters were averaged (or changed), not their gradients: use param.grad",
    ),
    "divides by the number of GPUs": Mistake(
        edit(AVERAGE, "dist.get_world_size()", "__import__('torch').cuda.device_count()"),
        ("a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"),
    ),
    "multiplies by 1 / the number of GPUs": Mistake(
        edit(AVERAGE, "/= dist.get_world_size()", "*= 1 / __import__('torch').cuda.device_count()"),
        ("a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"),
    ),
    "only rank 0 divides": Mistake(
        edit(AVERAGE, "param.grad /=", "if dist.get_rank() == 0: param.grad /="),
        "only rank 0 divided by the number of ranks: every rank must do that",
    ),
    "divides into nothing": Mistake(
        edit(AVERAGE, "param.grad /=", "param.grad /"),
        "summed over ranks, not averaged",
    ),
    "uses the sum before the wait": Mistake(
        edit(
            AVERAGE,
            _SUM,
            "            work = dist.all_reduce(param.grad, async_op=True)\n"
            "            mean = param.grad / dist.get_world_size()\n"
            "            work.wait()\n",
            "param.grad /= dist.get_world_size()",
            "param.grad = mean",
        ),
        ("the rank's own gradient: it was not reduced, was used before the wait, or the result was not written back"),
    ),
    "keeps the first step's gradients": Mistake(
        """\
import torch.distributed as dist

kept = []


def average(params):
    if not kept:
        kept.extend(param.grad for param in params if param.grad is not None)
    for grad in kept:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
""",
        (
            "the gradients of an earlier step: read param.grad anew in every step, since it may be another tensor "
            "by then"
        ),
    ),
    "zeros for an unused parameter": Mistake(
        """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
""",
        "a parameter that no rank used must keep grad = None: skip it",
    ),
    "by way of float32": Mistake(
        edit(
            AVERAGE,
            _SUM,
            "            mean = param.grad.float()\n            dist.all_reduce(mean)\n",
            "param.grad /= dist.get_world_size()",
            "param.grad.copy_(mean / dist.get_world_size())",
        ),
        "right to seven digits only: the gradient went through float32; buffers need the gradients' dtype",
    ),
    "waits for the last only": Mistake(
        edit(AVERAGE_ASYNC, "    for work in started:\n        work.wait()", "    started[-1].wait()"),
        (
            "a forgotten wait: all_reduce was started 3 times without waiting for it, so this is still the rank's "
            "own gradient"
        ),
    ),
    "divides before the wait": Mistake(
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            work = dist.all_reduce(param.grad, async_op=True)
            param.grad /= dist.get_world_size()
            work.wait()
""",
        "changed before the wait: the sum came in later and overwrote what you had divided",
    ),
    "sum for mean": Mistake(
        edit(AVERAGE, "            param.grad /= dist.get_world_size()\n", ""),
        "summed over ranks, not averaged",
    ),
    "divided twice": Mistake(
        edit(
            AVERAGE, "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size(); dist.all_reduce(param.grad)"
        ),
        "divided by N twice",
    ),
    "forgotten wait": Mistake(
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        (
            "a forgotten wait: all_reduce was started 4 times without waiting for it, so this is still the rank's "
            "own gradient"
        ),
    ),
    "averages the parameter": Mistake(
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param.data)", "param.grad /=", "param.data /="),
        "the parameters were averaged (or changed), not their gradients: use param.grad",
    ),
    "reduces a copy": Mistake(
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "grad = param.grad.clone(); dist.all_reduce(grad)",
            "param.grad /=",
            "grad /=",
        ),
        "the rank's own gradient: it was not reduced, or the result was not written back",
    ),
    "only divides": Mistake(
        edit(AVERAGE, "            dist.all_reduce(param.grad)\n", ""),
        "the rank's own gradient: nothing was sent",
    ),
    "reduces to rank 0": Mistake(
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.reduce(param.grad, dst=0)"),
        "the result reached rank 0 only: reduce() leaves it on one rank, all_reduce() on all of them",
    ),
    "broadcasts": Mistake(
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "dist.broadcast(param.grad, src=0)",
            "            param.grad /= dist.get_world_size()\n",
            "",
        ),
        "a broadcast copies one rank's gradient to all; the exercise asks for the mean over all ranks",
    ),
    "a number of ranks by heart": Mistake(
        edit(AVERAGE, "dist.get_world_size()", "2"),
        "the sum over the ranks was divided by 2, but there are 1",
    ),
    "no gradient": Mistake(
        edit(AVERAGE, "if param.grad is not None:", "if param is not None:"),
        "a parameter that was not used has no gradient (grad is None)",
    ),
    "only rank 0 calls": Mistake(
        edit(AVERAGE, "if param.grad is not None:", "if param.grad is not None and dist.get_rank() == 0:"),
        "not every rank makes the same calls: some are done while others wait",
    ),
    "another order on every rank": Mistake(
        edit(AVERAGE, "for param in params:", "for param in params[:: -1 if dist.get_rank() else 1]:"),
        "the ranks make different calls, or the same calls in different orders",
    ),
    "gathers everything": Mistake(
        """\
import torch
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            grads = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(grads, param.grad)
            param.grad = torch.stack(grads).mean(0)
""",
        "extra traffic (all_gather): one all-reduce is enough",
    ),
}

# ---------------------------------------------------------------------- 03.2

BUCKET_OF_VIEWS = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params = params

    def collect(self):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.flat = torch.cat([grad.reshape(-1) for grad in grads]).detach()

    def reduce(self):
        self.flat.div_(dist.get_world_size())
        self.work = dist.all_reduce(self.flat, async_op=True)

    def write_back(self):
        self.work.wait()
        offset = 0
        for p in self.params:  # the gradients stay in the bucket, as DDP's gradient_as_bucket_view does it
            p.grad = self.flat[offset : offset + p.numel()].view(p.shape)
            offset += p.numel()
"""

BUCKET_IN_TWO_HALVES = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params, self.N = params, dist.get_world_size()
        numel = sum(p.numel() for p in params)
        self.numels = [p.numel() for p in params]
        self.flat = torch.zeros(numel + -numel % self.N)

    def collect(self):
        self.flat.zero_()
        pieces = self.flat[: sum(self.numels)].split(self.numels)
        for p, piece in zip(self.params, pieces):
            if p.grad is not None:
                piece += p.grad.flatten()

    def reduce(self):  # an all-to-all and a sum: a reduce-scatter; then an all-gather
        received = torch.empty_like(self.flat)
        dist.all_to_all_single(received, self.flat)
        mine = received.view(self.N, -1).sum(0) / self.N
        dist.all_gather(list(self.flat.view(self.N, -1)), mine)

    def write_back(self):
        for p, piece in zip(self.params, self.flat[: sum(self.numels)].split(self.numels)):
            p.grad = piece.reshape(p.shape).clone()
"""

BUCKET_BY_A_FUTURE = edit(
    BUCKET,
    "        dist.all_reduce(self.flat)\n        self.flat /= dist.get_world_size()\n",
    "        N = dist.get_world_size()\n"
    "        summed = dist.all_reduce(self.flat, async_op=True).get_future()\n"
    "        self.mean = summed.then(lambda future: future.value()[0].div_(N))\n",
    "    def write_back(self) -> None:\n",
    "    def write_back(self) -> None:\n        self.mean.wait()\n",
)

BUCKET_OF_LISTS = """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params, self.N = list(params), dist.get_world_size()
        numels = [param.numel() for param in params]
        self.flat = params[0].detach().new_zeros(sum(numels) + -sum(numels) % self.N)
        self.views = [v.view_as(p) for v, p in zip(self.flat[: sum(numels)].split(numels), params)]

    def collect(self):
        torch._foreach_copy_(self.views, [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params])

    def reduce(self):
        shards = list(self.flat.chunk(self.N))
        mine = torch.empty_like(shards[0])
        dist.reduce_scatter(mine, shards)
        dist.all_gather(shards, mine / self.N)

    def write_back(self):
        for param, view in zip(self.params, self.views):
            param.grad = view
"""

_DIVIDE = "        self.flat /= dist.get_world_size()\n"

_ASYNC = "dist.all_reduce(self.flat, async_op=True)"

BUCKET_MISTAKES = {
    "another flat than the views'": Mistake(
        edit(BUCKET, "self.flat /= dist.get_world_size()", "self.flat = self.flat / dist.get_world_size()"),
        ("`self.flat = ...` makes another tensor, and the views still look into the old one: change it in place (/=)"),
    ),
    "written into gradients that are there": Mistake(
        edit(BUCKET, "param.grad = view.clone()", "param.grad.copy_(view)"),
        "a parameter that was not used has no gradient (grad is None)",
    ),
    "zeros where this rank had none": Mistake(
        edit(
            BUCKET,
            "param.grad = view.clone()",
            "param.grad = torch.zeros_like(param) if param.grad is None else view.clone()",
        ),
        "this rank had no gradient, but another one had: the mean of all is in the bucket",
    ),
    "zeroes the gradients that it lent": Mistake(
        edit(
            BUCKET,
            "            if param.grad is None:\n                view.zero_()\n            else:\n",
            "            if param.grad is not None:\n",
            "    def collect(self) -> None:\n",
            "    def collect(self) -> None:\n        self.flat.zero_()\n",
            "view.clone()",
            "view",
        ),
        (
            "collect() zeroed self.flat, of which write_back() had made param.grad a view, so the new gradients "
            "went with it (zero_grad(set_to_none=False) keeps that view): clone() in write_back()"
        ),
    ),
    "uses what all_reduce returns": Mistake(
        edit(BUCKET, "        dist.all_reduce(self.flat)", "        self.flat = dist.all_reduce(self.flat)"),
        "dist.all_reduce() returns None: it leaves the result in the tensor that you give it",
    ),
    "keeps the gradients that it was made with": Mistake(
        edit(
            BUCKET,
            "        self.params = params\n",
            "        self.params = params\n        self.grads = [param.grad for param in params]\n",
            "for param, view in zip(self.params, self.views):\n            if param.grad is None",
            "for grad, view in zip(self.grads, self.views):\n            if grad is None",
            "view.copy_(param.grad)",
            "view.copy_(grad)",
        ),
        (
            "the gradients of an earlier step: read param.grad anew in every step, since it may be another tensor "
            "by then"
        ),
    ),
    "views of the class": Mistake(
        edit(
            BUCKET,
            "class Bucket:\n",
            "class Bucket:\n    views = []\n\n",
            "        self.views, offset = [], 0\n",
            "        offset = 0\n",
        ),
        "self.views do not fit the parameters: make them anew for each bucket, in __init__",
    ),
    "grows with every step": Mistake(
        """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params, self.pieces = params, []

    def collect(self):
        self.pieces += [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.params]
        self.flat = torch.cat(self.pieces).detach()

    def reduce(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()

    def write_back(self):
        for p, piece in zip(self.params, self.flat.split([p.numel() for p in self.params])):
            p.grad = piece.view_as(p).clone()
""",
        "it grows with every step: start each collect() with an empty list, or with the same buffer",
    ),
    "only rank 0 divides": Mistake(
        edit(BUCKET, "        self.flat /=", "        if dist.get_rank() == 0:\n            self.flat /="),
        "only rank 0 divided by the number of ranks: every rank must do that",
    ),
    "divides before the wait": Mistake(
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n        self.flat /= dist.get_world_size()\n",
            "        work = dist.all_reduce(self.flat, async_op=True)\n"
            "        self.flat /= dist.get_world_size()\n"
            "        work.wait()\n",
        ),
        "changed before the wait: the sum came in later and overwrote what you had divided",
    ),
    "adds up before the wait": Mistake(
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n        self.flat /= dist.get_world_size()\n",
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        work = dist.all_gather(flats, self.flat, async_op=True)\n"
            "        mean = sum(flats) / len(flats)\n"
            "        work.wait()\n"
            "        self.flat.copy_(mean)\n",
        ),
        "used before the wait: what a call with async_op=True brings is there only after its wait()",
    ),
    "divides by the number of GPUs": Mistake(
        edit(BUCKET, "dist.get_world_size()", "torch.cuda.device_count()"),
        ("a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"),
    ),
    "in two pieces": Mistake(
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(half) for half in self.flat.split(6)]"),
        "the buffer is sent in pieces: one all-reduce of the flat buffer is the point",
    ),
    "no place for what has no gradient": Mistake(
        """\
import torch
import torch.distributed as dist


class Bucket:
    def __init__(self, params):
        self.params = params

    def collect(self):
        self.flat = torch.cat([param.grad.flatten() for param in self.params if param.grad is not None])

    def reduce(self):
        dist.all_reduce(self.flat)
        self.flat /= dist.get_world_size()

    def write_back(self):
        offset = 0
        for param in self.params:
            if param.grad is not None:
                param.grad = self.flat[offset : offset + param.numel()].view_as(param).clone()
                offset += param.numel()
""",
        ("it needs one place for each element: a parameter without a gradient keeps its place, and zeros go there"),
    ),
    "keeps its own where the mean is zero": Mistake(
        edit(
            BUCKET,
            "            param.grad = view.clone()",
            "            if view.any():\n                param.grad = view.clone()",
        ),
        "this rank's own gradient is still there: a mean of zero replaces it too",
    ),
    "the mean added to the own gradient": Mistake(
        edit(
            BUCKET,
            "param.grad = view.clone()",
            "param.grad = view.clone() if param.grad is None else param.grad + view",
        ),
        "the mean was added to this rank's own gradient: write_back() replaces param.grad",
    ),
    "added to what was there": Mistake(
        edit(BUCKET, "view.copy_(param.grad)", "view.add_(param.grad)"),
        "the previous step's values were left in and added to: every step starts with an empty buffer",
    ),
    "sum for mean": Mistake(
        edit(BUCKET, _DIVIDE, ""),
        "summed over ranks, not averaged",
    ),
    "divided twice": Mistake(
        edit(BUCKET, "view.clone()", "view / dist.get_world_size()"),
        "divided by N twice",
    ),
    "forgotten wait": Mistake(
        edit(BUCKET, "dist.all_reduce(self.flat)", _ASYNC),
        (
            "a forgotten wait: all_reduce was started once without waiting for it, so this is still the rank's "
            "own gradient"
        ),
    ),
    "left over from the step before": Mistake(
        edit(BUCKET, "                view.zero_()", "                pass"),
        "left over from the previous step: where a parameter has no gradient, write zeros",
    ),
    "no gradient": Mistake(
        edit(BUCKET, "if param.grad is None:", "if param is None:"),
        "a parameter that was not used has no gradient (grad is None)",
    ),
    "divided in write_back": Mistake(
        edit(
            BUCKET, "\n        self.flat /= dist.get_world_size()", "", "view.clone()", "view / dist.get_world_size()"
        ),
        "after reduce() self.flat must hold the mean, and it holds the sum: divide there, not in write_back()",
    ),
    "from the last to the first": Mistake(
        edit(
            BUCKET,
            "self.params = params",
            "self.params = list(reversed(params))",
            "for param in params:\n",
            "for param in self.params:\n",
        ),
        "self.flat holds the gradients in the order of `params`, one after another",
    ),
    "one call per parameter": Mistake(
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(view) for view in self.views]"),
        "one call per parameter: one all-reduce of the flat buffer is the point",
    ),
    "not written back": Mistake(
        edit(BUCKET, "            param.grad = view.clone()", "            pass"),
        "the rank's own gradient: it was not reduced, or the result was not written back",
    ),
    "written back to some": Mistake(
        edit(
            BUCKET,
            "            param.grad = view",
            "            if param.grad is not None:\n                param.grad = view",
        ),
        "write_back() skipped a parameter without a gradient on this rank; another rank may have one",
    ),
    "collects the parameters": Mistake(
        edit(BUCKET, "view.copy_(param.grad)", "view.copy_(param.data)"),
        "the parameters were collected, not their gradients",
    ),
    "writes into the parameters": Mistake(
        edit(BUCKET, "param.grad = view.clone()", "param.data.copy_(view)"),
        "the parameters were averaged (or changed), not their gradients: use param.grad",
    ),
    "all at the same place": Mistake(
        edit(BUCKET, "            offset += param.numel()\n", ""),
        "another gradient is here: look at the offsets",
    ),
    "flat gradients": Mistake(
        edit(BUCKET, "param.grad = view.clone()", "param.grad = view.flatten()"),
        "a piece of a flat buffer has one dimension: a gradient needs view_as(param)",
    ),
    "reduces to rank 0": Mistake(
        edit(BUCKET, "dist.all_reduce(self.flat)", "dist.reduce(self.flat, dst=0)"),
        "the result reached rank 0 only: reduce() leaves it on one rank, all_reduce() on all of them",
    ),
    "gathers everything": Mistake(
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n" + _DIVIDE,
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(flats, self.flat)\n"
            "        self.flat.copy_(torch.stack(flats).mean(0))\n",
        ),
        "extra traffic (all_gather): one all-reduce is enough",
    ),
}

# ---------------------------------------------------------------------- 03.3

DDP_SYNCHRONOUS = """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if not self.reduces(unit):
            return
        self.reduce(unit)

    def reduce(self, unit):
        dist.all_reduce(unit.bucket.full, group=self.comm.group)
        unit.bucket.full /= self.world_size
        unit.bucket.grad = unit.bucket.full
"""

DDP_DIVIDED_FIRST = """\
import torch.distributed as dist
from zerolab import DDP


class MyDDP(DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full / self.world_size
        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)
"""

DDP_BY_A_FUTURE = """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full
        summed = dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True).get_future()
        return summed.then(lambda future: future.value()[0].div_(self.world_size))
"""

DDP_IN_TWO_HALVES = """\
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        unit.bucket.grad = unit.bucket.full
        shard = unit.layout.shard(unit.bucket.grad, self.rank)
        self.comm.reduce_scatter(shard, unit.bucket.grad, unit.name).wait()
        return self.comm.all_gather(unit.bucket.grad, shard, unit.name)
"""

_COMM = "return self.comm.all_reduce(unit.bucket.grad, unit.name)"

DDP_MISTAKES = {
    "gives the memory back at once": Mistake(
        edit(
            DDP,
            _COMM,
            "work = self.comm.all_reduce(unit.bucket.grad, unit.name)\n"
            "        unit.bucket.full.untyped_storage().resize_(0)\n"
            "        return work",
        ),
        "memory was given back (its storage resized to 0) while it was still needed: wait first",
    ),
    "leaves out unit.name": Mistake(
        edit(DDP, ", unit.name)", ")"),
        "self.comm's methods take two arguments: the tensor, and unit.name",
    ),
    "takes the work for the mean": Mistake(
        edit(DDP, _COMM, "unit.bucket.grad = self.comm.all_reduce(unit.bucket.full, unit.name)"),
        (
            "self.comm.all_reduce() returns something to wait for, and the mean will be in the tensor that it was "
            "given: that tensor is unit.bucket.grad"
        ),
    ),
    "uses what all_reduce returns": Mistake(
        edit(
            DDP_SYNCHRONOUS,
            "        unit.bucket.full /= self.world_size\n        unit.bucket.grad = unit.bucket.full\n",
            "",
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "unit.bucket.grad = dist.all_reduce(unit.bucket.full) / self.world_size",
        ),
        "dist.all_reduce() returns None: it leaves the result in the tensor that you give it",
    ),
    "divides before the wait": Mistake(
        edit(
            DDP,
            _COMM,
            "work = self.comm.all_reduce(unit.bucket.grad, unit.name)\n"
            "        unit.bucket.grad /= self.world_size\n"
            "        return work",
        ),
        ("changed before the wait: between the start and the wait() the network reads the tensor, so leave it alone"),
    ),
    "divides the sum before the wait": Mistake(
        edit(
            DDP_DIVIDED_FIRST,
            "        unit.bucket.grad = unit.bucket.full / self.world_size\n"
            "        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)",
            "        work = dist.all_reduce(unit.bucket.full, group=self.comm.group, async_op=True)\n"
            "        unit.bucket.grad = unit.bucket.full / self.world_size\n"
            "        return work",
        ),
        ("the rank's own gradient: it was not reduced, was used before the wait, or the result was not written back"),
    ),
    "forgets the future": Mistake(
        edit(DDP_BY_A_FUTURE, "return summed.then", "summed.then"),
        (
            "a forgotten wait: all_reduce was started 3 times without waiting for it, so this is still the rank's "
            "own gradient"
        ),
    ),
    "returns the tensor": Mistake(
        edit(DDP, _COMM, "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return unit.bucket.grad"),
        "unit.bucket.reduction is for something with a wait(), or None if the mean is there already",
    ),
    "keeps the first step's bucket": Mistake(
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "kept = self.__dict__.setdefault('kept', {})\n"
            "        unit.bucket.grad = kept.setdefault(unit.name, unit.bucket.full)",
        ),
        "only the first micro-batch counts: what unit.bucket.full was then is reduced ever after. Ask for it each time",
    ),
    "only rank 0 divides": Mistake(
        edit(DDP_SYNCHRONOUS, "unit.bucket.full /=", "if self.rank == 0: unit.bucket.full /="),
        "only rank 0 divided by the number of ranks: every rank must do that",
    ),
    "divides by the number of all processes": Mistake(
        edit(DDP_SYNCHRONOUS, "/= self.world_size", "/= dist.get_world_size()"),
        (
            "all processes are counted by dist.get_world_size(), and only some of them share this model: "
            "self.rank, self.world_size"
        ),
    ),
    "talks to all processes": Mistake(
        edit(DDP_SYNCHRONOUS, ", group=self.comm.group", ""),
        (
            "dist.all_reduce() talks to all processes, and only some of them share this model: pass "
            "group=self.comm.group"
        ),
    ),
    "passes all processes as the group": Mistake(
        edit(DDP_DIVIDED_FIRST, "group=self.comm.group", "group=dist.group.WORLD"),
        (
            "dist.all_reduce() talks to all processes, and only some of them share this model: pass "
            "group=self.comm.group"
        ),
    ),
    "divides by the number of GPUs": Mistake(
        edit(
            DDP_SYNCHRONOUS,
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full /= __import__('torch').cuda.device_count()",
        ),
        ("a division by zero: the number of ranks is dist.get_world_size(); torch.cuda.device_count() counts GPUs"),
    ),
    "a buffer in float32": Mistake(
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.bucket.full.float()",
        ),
        "a buffer for gradients has their dtype: torch.empty_like(unit.bucket.full)",
    ),
    "the parameters' own gradients": Mistake(
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(param.grad) for param in unit.params]",
        ),
        "the parameters have no .grad yet: the unit's gradients are in unit.bucket.full",
    ),
    "one call per parameter": Mistake(
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(view, group=self.comm.group) for view in unit.layout.views(unit.bucket.full)]",
        ),
        "one call per parameter: unit.bucket.full holds all of them, so one all-reduce is enough",
    ),
    "only a shard": Mistake(
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)",
            _COMM,
            "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
        ),
        "unit.bucket.grad must be as long as unit.bucket.full: here every rank keeps the full mean",
    ),
    "loses what no_sync kept back": Mistake(
        edit(
            DDP,
            "unit.bucket.reduction = self.reduce(unit)",
            "unit.bucket.reduction = self.reduce(unit)\n        unit.bucket.full = None",
        ),
        "only the last micro-batch: what no_sync() kept back is lost",
    ),
    "the package's, by super()": Mistake(
        "import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    def post_backward(self, unit):\n"
        "        super().post_backward(unit)\n\n    def reduce(self, unit):\n        return super().reduce(unit)\n",
        "MyDDP has the package's post_backward() or reduce(), inherited or by super(): write your own",
    ),
    "copies into unit.bucket.grad": Mistake(
        edit(DDP, "unit.bucket.grad = unit.bucket.full", "unit.bucket.grad.copy_(unit.bucket.full)"),
        (
            "unit.bucket.grad is None until reduce() sets it, and the parameters have no .grad yet: the unit's "
            "gradients are in unit.bucket.full"
        ),
    ),
    "nothing of its own": Mistake(
        "import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    pass\n",
        "MyDDP has the package's post_backward() or reduce(), inherited or by super(): write your own",
    ),
    "sum for mean": Mistake(
        edit(DDP_SYNCHRONOUS, "        unit.bucket.full /= self.world_size\n", ""),
        "summed over ranks, not averaged",
    ),
    "divided twice": Mistake(
        edit(
            DDP,
            _COMM,
            "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        unit.bucket.grad /= self.world_size",
        ),
        "divided by N twice",
    ),
    "forgotten wait: nothing returned": Mistake(
        edit(DDP, "return self", "self"),
        (
            "a forgotten wait: self.comm.all_reduce was started without waiting for it, so this is still the "
            "rank's own gradient"
        ),
    ),
    "forgotten wait: not kept": Mistake(
        edit(DDP, "unit.bucket.reduction = self", "self"),
        (
            "a forgotten wait: self.comm.all_reduce was started without waiting for it, so this is still the "
            "rank's own gradient"
        ),
    ),
    "ignores no_sync": Mistake(
        edit(DDP, "if self.reduces(unit):", "if True:"),
        "no_sync() was ignored: in post_backward, reduce only if self.reduces(unit)",
    ),
    "never reduces": Mistake(
        edit(DDP, "if self.reduces(unit):", "if False:"),
        "reduce() was not called, or did not leave the mean in unit.bucket.grad",
    ),
    "reduces what is not there": Mistake(
        edit(DDP, "unit.bucket.grad = unit.bucket.full\n        ", ""),
        "unit.bucket.grad is where the mean belongs; what is to be averaged is in unit.bucket.full",
    ),
    "skips zeros": Mistake(
        edit(DDP, _COMM, f"{_COMM} if unit.bucket.full.any() else None"),
        "a rank whose gradients are all zero took no part, and the others' are not: every rank makes the same calls",
    ),
    "returns what it averaged": Mistake(
        edit(
            DDP,
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
            "return self.comm.all_reduce(unit.bucket.grad, unit.name)",
            "dist.all_reduce(unit.bucket.grad, group=self.comm.group)\n"
            "        unit.bucket.grad /= self.world_size\n"
            "        return unit.bucket.grad",
        ),
        "unit.bucket.reduction is for something with a wait(), or None if the mean is there already",
    ),
    "unit.bucket.grad not set": Mistake(
        edit(DDP, "unit.bucket.grad = unit.bucket.full\n        ", "", "unit.bucket.grad", "unit.bucket.full"),
        "reduce() was not called, or did not leave the mean in unit.bucket.grad",
    ),
    "reduces a copy": Mistake(
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.bucket.grad.clone()"),
        ("the rank's own gradient: it was not reduced, was used before the wait, or the result was not written back"),
    ),
    "averages the parameters": Mistake(
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.full.data"),
        ("the rank's own gradient: it was not reduced, was used before the wait, or the result was not written back"),
    ),
    "changes the parameters": Mistake(
        edit(
            DDP,
            _COMM,
            "dist.all_reduce(unit.full.data)",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        "the parameters were averaged (or changed), not unit.bucket.full",
    ),
    "reduces twice": Mistake(
        edit(DDP, "        return", "        self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return"),
        "extra traffic (self.comm.all_reduce): one all-reduce is enough",
    ),
    "reduces to rank 0": Mistake(
        edit(DDP_SYNCHRONOUS, "all_reduce(unit.bucket.full, ", "reduce(unit.bucket.full, dst=0, "),
        "the result reached rank 0 only: reduce() leaves it on one rank, all_reduce() on all of them",
    ),
    "only rank 0 calls": Mistake(
        edit(DDP_SYNCHRONOUS, "if not self.reduces(unit):", "if not self.reduces(unit) or self.rank > 0:"),
        "reduce() was not called, or did not leave the mean in unit.bucket.grad",
    ),
    "gathers everything": Mistake(
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "all = [unit.bucket.full.clone() for _ in range(self.world_size)]; dist.all_gather(all, unit.bucket.full)",
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full = sum(all) / self.world_size",
        ),
        "extra traffic (all_gather): one all-reduce is enough",
    ),
}

RIGHT = {
    "03.1": (
        AVERAGE_ASKS,
        AVERAGE_ASYNC,
        AVERAGE_NATIVE,
        AVERAGE_BY_FUTURES,
        AVERAGE_TOGETHER,
        AVERAGE_IN_A_RING,
        AVERAGE_FUNCTIONAL,
    ),
    "03.2": (BUCKET_OF_VIEWS, BUCKET_IN_TWO_HALVES, BUCKET_BY_A_FUTURE, BUCKET_OF_LISTS),
    "03.3": (DDP_SYNCHRONOUS, DDP_DIVIDED_FIRST, DDP_BY_A_FUTURE, DDP_IN_TWO_HALVES),
}

MISTAKES = {
    "03.1": AVERAGE_MISTAKES,
    "03.2": BUCKET_MISTAKES,
    "03.3": DDP_MISTAKES,
}
