"""Lesson 03: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson03 import AVERAGE, BUCKET, DDP

from .sources import edit

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

AVERAGE_MUTANTS = {
    "functional: rank 0 goes another way": (
        edit(AVERAGE_FUNCTIONAL, "is not None:", "is not None and dist.get_rank():"),
        "not every rank makes the same calls",
    ),
    "functional: twice": (
        edit(
            AVERAGE_FUNCTIONAL,
            " = all_reduce(param.grad,",
            " = all_reduce(all_reduce(param.grad, 'avg', dist.group.WORLD),",
        ),
        "extra traffic",
    ),
    "stops at an unused parameter": (
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is None:
            break
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
""",
        "go on with the next one",
    ),
    "rounds down": (edit(AVERAGE, "/= dist", "//= dist"), "`//` rounds down"),
    "asks whether the gradient is true": (
        edit(AVERAGE, "if param.grad is not None", "if param.grad"),
        "neither true nor",
    ),
    "uses what all_reduce returns": (
        edit(
            AVERAGE,
            _SUM + "            param.grad /= dist.get_world_size()\n",
            "            param.grad = dist.all_reduce(param.grad) / dist.get_world_size()\n",
        ),
        "dist.all_reduce() returns None",
    ),
    "keeps what all_reduce returns": (
        edit(
            AVERAGE,
            _SUM + "            param.grad /= dist.get_world_size()\n",
            "            param.grad /= dist.get_world_size()\n            param.grad = dist.all_reduce(param.grad)\n",
        ),
        "dist.all_reduce() returns None",
    ),
    "waits for None": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad).wait()"),
        "nothing is left to wait for",
    ),
    "keeps the work": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "param.grad = dist.all_reduce(param.grad, async_op=True)"),
        "returns something to wait for",
    ),
    "reduces the parameter itself": (
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param)"),
        "the parameters were averaged",
    ),
    "divides by the number of GPUs": (
        edit(AVERAGE, "dist.get_world_size()", "__import__('torch').cuda.device_count()"),
        "torch.cuda.device_count() counts GPUs",
    ),
    "multiplies by 1 / the number of GPUs": (
        edit(AVERAGE, "/= dist.get_world_size()", "*= 1 / __import__('torch').cuda.device_count()"),
        "torch.cuda.device_count() counts GPUs",
    ),
    "only rank 0 divides": (
        edit(AVERAGE, "param.grad /=", "if dist.get_rank() == 0: param.grad /="),
        "only rank 0 divided",
    ),
    "divides into nothing": (edit(AVERAGE, "param.grad /=", "param.grad /"), "summed over ranks"),
    "uses the sum before the wait": (
        edit(
            AVERAGE,
            _SUM,
            "            work = dist.all_reduce(param.grad, async_op=True)\n"
            "            mean = param.grad / dist.get_world_size()\n"
            "            work.wait()\n",
            "param.grad /= dist.get_world_size()",
            "param.grad = mean",
        ),
        "used before the wait",
    ),
    "keeps the first step's gradients": (
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
        "the gradients of an earlier step",
    ),
    "zeros for an unused parameter": (
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
        "must keep grad = None",
    ),
    "by way of float32": (
        edit(
            AVERAGE,
            _SUM,
            "            mean = param.grad.float()\n            dist.all_reduce(mean)\n",
            "param.grad /= dist.get_world_size()",
            "param.grad.copy_(mean / dist.get_world_size())",
        ),
        "went through float32",
    ),
    "waits for the last only": (
        edit(AVERAGE_ASYNC, "    for work in started:\n        work.wait()", "    started[-1].wait()"),
        "a forgotten wait: all_reduce was started 3 times",
    ),
    "divides before the wait": (
        """\
import torch.distributed as dist


def average(params):
    for param in params:
        if param.grad is not None:
            work = dist.all_reduce(param.grad, async_op=True)
            param.grad /= dist.get_world_size()
            work.wait()
""",
        "changed before the wait",
    ),
    "sum for mean": (edit(AVERAGE, "            param.grad /= dist.get_world_size()\n", ""), "summed over ranks"),
    "divided twice": (
        edit(
            AVERAGE, "dist.all_reduce(param.grad)", "param.grad /= dist.get_world_size(); dist.all_reduce(param.grad)"
        ),
        "divided by N twice",
    ),
    "forgotten wait": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.all_reduce(param.grad, async_op=True)"),
        "a forgotten wait",
    ),
    "averages the parameter": (
        edit(AVERAGE, "all_reduce(param.grad)", "all_reduce(param.data)", "param.grad /=", "param.data /="),
        "the parameters were averaged",
    ),
    "reduces a copy": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "grad = param.grad.clone(); dist.all_reduce(grad)",
            "param.grad /=",
            "grad /=",
        ),
        "was not written back",
    ),
    "only divides": (edit(AVERAGE, "            dist.all_reduce(param.grad)\n", ""), "nothing was sent"),
    "reduces to rank 0": (
        edit(AVERAGE, "dist.all_reduce(param.grad)", "dist.reduce(param.grad, dst=0)"),
        "reached rank 0 only",
    ),
    "broadcasts": (
        edit(
            AVERAGE,
            "dist.all_reduce(param.grad)",
            "dist.broadcast(param.grad, src=0)",
            "            param.grad /= dist.get_world_size()\n",
            "",
        ),
        "a broadcast copies one rank's gradient",
    ),
    "a number of ranks by heart": (edit(AVERAGE, "dist.get_world_size()", "2"), "was divided by 2, but there are"),
    "no gradient": (
        edit(AVERAGE, "if param.grad is not None:", "if param is not None:"),
        "has no gradient (grad is None)",
    ),
    "only rank 0 calls": (
        edit(AVERAGE, "if param.grad is not None:", "if param.grad is not None and dist.get_rank() == 0:"),
        "not every rank makes the same calls",
    ),
    "another order on every rank": (
        edit(AVERAGE, "for param in params:", "for param in params[:: -1 if dist.get_rank() else 1]:"),
        "different orders",
    ),
    "gathers everything": (
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
        "extra traffic",
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

BUCKET_MUTANTS = {
    "another flat than the views'": (
        edit(BUCKET, "self.flat /= dist.get_world_size()", "self.flat = self.flat / dist.get_world_size()"),
        "makes another tensor",
    ),
    "written into gradients that are there": (
        edit(BUCKET, "param.grad = view.clone()", "param.grad.copy_(view)"),
        "has no gradient (grad is None)",
    ),
    "zeros where this rank had none": (
        edit(
            BUCKET,
            "param.grad = view.clone()",
            "param.grad = torch.zeros_like(param) if param.grad is None else view.clone()",
        ),
        "but another one had",
    ),
    "zeroes the gradients that it lent": (
        edit(
            BUCKET,
            "            if param.grad is None:\n                view.zero_()\n            else:\n",
            "            if param.grad is not None:\n",
            "    def collect(self) -> None:\n",
            "    def collect(self) -> None:\n        self.flat.zero_()\n",
            "view.clone()",
            "view",
        ),
        "of which write_back() had made param.grad a view",
    ),
    "uses what all_reduce returns": (
        edit(BUCKET, "        dist.all_reduce(self.flat)", "        self.flat = dist.all_reduce(self.flat)"),
        "dist.all_reduce() returns None",
    ),
    "keeps the gradients that it was made with": (
        edit(
            BUCKET,
            "        self.params = params\n",
            "        self.params = params\n        self.grads = [param.grad for param in params]\n",
            "for param, view in zip(self.params, self.views):\n            if param.grad is None",
            "for grad, view in zip(self.grads, self.views):\n            if grad is None",
            "view.copy_(param.grad)",
            "view.copy_(grad)",
        ),
        "the gradients of an earlier step",
    ),
    "views of the class": (
        edit(
            BUCKET,
            "class Bucket:\n",
            "class Bucket:\n    views = []\n\n",
            "        self.views, offset = [], 0\n",
            "        offset = 0\n",
        ),
        "make them anew for each bucket",
    ),
    "grows with every step": (
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
        "it grows with every step",
    ),
    "only rank 0 divides": (
        edit(BUCKET, "        self.flat /=", "        if dist.get_rank() == 0:\n            self.flat /="),
        "only rank 0 divided",
    ),
    "divides before the wait": (
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n        self.flat /= dist.get_world_size()\n",
            "        work = dist.all_reduce(self.flat, async_op=True)\n"
            "        self.flat /= dist.get_world_size()\n"
            "        work.wait()\n",
        ),
        "changed before the wait",
    ),
    "adds up before the wait": (
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n        self.flat /= dist.get_world_size()\n",
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        work = dist.all_gather(flats, self.flat, async_op=True)\n"
            "        mean = sum(flats) / len(flats)\n"
            "        work.wait()\n"
            "        self.flat.copy_(mean)\n",
        ),
        "used before the wait",
    ),
    "divides by the number of GPUs": (
        edit(BUCKET, "dist.get_world_size()", "torch.cuda.device_count()"),
        "torch.cuda.device_count() counts GPUs",
    ),
    "in two pieces": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(half) for half in self.flat.split(6)]"),
        "the buffer is sent in pieces",
    ),
    "no place for what has no gradient": (
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
        "keeps its place",
    ),
    "keeps its own where the mean is zero": (
        edit(
            BUCKET,
            "            param.grad = view.clone()",
            "            if view.any():\n                param.grad = view.clone()",
        ),
        "a mean of zero replaces it too",
    ),
    "the mean added to the own gradient": (
        edit(
            BUCKET,
            "param.grad = view.clone()",
            "param.grad = view.clone() if param.grad is None else param.grad + view",
        ),
        "was added to this rank's own gradient",
    ),
    "added to what was there": (
        edit(BUCKET, "view.copy_(param.grad)", "view.add_(param.grad)"),
        "every step starts with an empty buffer",
    ),
    "sum for mean": (edit(BUCKET, _DIVIDE, ""), "summed over ranks"),
    "divided twice": (edit(BUCKET, "view.clone()", "view / dist.get_world_size()"), "divided by N twice"),
    "forgotten wait": (edit(BUCKET, "dist.all_reduce(self.flat)", _ASYNC), "a forgotten wait"),
    "left over from the step before": (
        edit(BUCKET, "                view.zero_()", "                pass"),
        "left over from the previous step",
    ),
    "no gradient": (
        edit(BUCKET, "if param.grad is None:", "if param is None:"),
        "has no gradient (grad is None)",
    ),
    "one call per parameter": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "[dist.all_reduce(view) for view in self.views]"),
        "one call per parameter",
    ),
    "not written back": (
        edit(BUCKET, "            param.grad = view.clone()", "            pass"),
        "was not written back",
    ),
    "written back to some": (
        edit(
            BUCKET,
            "            param.grad = view",
            "            if param.grad is not None:\n                param.grad = view",
        ),
        "skipped a parameter",
    ),
    "collects the parameters": (
        edit(BUCKET, "view.copy_(param.grad)", "view.copy_(param.data)"),
        "the parameters were collected",
    ),
    "writes into the parameters": (
        edit(BUCKET, "param.grad = view.clone()", "param.data.copy_(view)"),
        "the parameters were averaged",
    ),
    "all at the same place": (
        edit(BUCKET, "            offset += param.numel()\n", ""),
        "look at the offsets",
    ),
    "flat gradients": (
        edit(BUCKET, "param.grad = view.clone()", "param.grad = view.flatten()"),
        "a piece of a flat buffer has one dimension",
    ),
    "reduces to rank 0": (
        edit(BUCKET, "dist.all_reduce(self.flat)", "dist.reduce(self.flat, dst=0)"),
        "reached rank 0 only",
    ),
    "gathers everything": (
        edit(
            BUCKET,
            "        dist.all_reduce(self.flat)\n" + _DIVIDE,
            "        flats = [torch.empty_like(self.flat) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(flats, self.flat)\n"
            "        self.flat.copy_(torch.stack(flats).mean(0))\n",
        ),
        "extra traffic",
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

DDP_MUTANTS = {
    "gives the memory back at once": (
        edit(
            DDP,
            _COMM,
            "work = self.comm.all_reduce(unit.bucket.grad, unit.name)\n"
            "        unit.bucket.full.untyped_storage().resize_(0)\n"
            "        return work",
        ),
        "memory was given back",
    ),
    "leaves out unit.name": (edit(DDP, ", unit.name)", ")"), "and unit.name"),
    "takes the work for the mean": (
        edit(DDP, _COMM, "unit.bucket.grad = self.comm.all_reduce(unit.bucket.full, unit.name)"),
        "unit.bucket.grad is a Pending, not a tensor",
    ),
    "uses what all_reduce returns": (
        edit(
            DDP_SYNCHRONOUS,
            "        unit.bucket.full /= self.world_size\n        unit.bucket.grad = unit.bucket.full\n",
            "",
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "unit.bucket.grad = dist.all_reduce(unit.bucket.full) / self.world_size",
        ),
        "dist.all_reduce() returns None",
    ),
    "divides before the wait": (
        edit(
            DDP,
            _COMM,
            "work = self.comm.all_reduce(unit.bucket.grad, unit.name)\n"
            "        unit.bucket.grad /= self.world_size\n"
            "        return work",
        ),
        "changed before the wait",
    ),
    "divides the sum before the wait": (
        edit(
            DDP_DIVIDED_FIRST,
            "        unit.bucket.grad = unit.bucket.full / self.world_size\n"
            "        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)",
            "        work = dist.all_reduce(unit.bucket.full, group=self.comm.group, async_op=True)\n"
            "        unit.bucket.grad = unit.bucket.full / self.world_size\n"
            "        return work",
        ),
        "used before the wait",
    ),
    "forgets the future": (
        edit(DDP_BY_A_FUTURE, "return summed.then", "summed.then"),
        "a forgotten wait",
    ),
    "returns the tensor": (
        edit(DDP, _COMM, "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return unit.bucket.grad"),
        "without a wait()",
    ),
    "keeps the first step's bucket": (
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "kept = self.__dict__.setdefault('kept', {})\n"
            "        unit.bucket.grad = kept.setdefault(unit.name, unit.bucket.full)",
        ),
        "only the first",
    ),
    "only rank 0 divides": (
        edit(DDP_SYNCHRONOUS, "unit.bucket.full /=", "if self.rank == 0: unit.bucket.full /="),
        "only rank 0 divided",
    ),
    "divides by the number of all processes": (
        edit(DDP_SYNCHRONOUS, "/= self.world_size", "/= dist.get_world_size()"),
        "all processes are counted by dist.get_world_size()",
    ),
    "talks to all processes": (
        edit(DDP_SYNCHRONOUS, ", group=self.comm.group", ""),
        "dist.all_reduce() talks to all processes",
    ),
    "passes all processes as the group": (
        edit(DDP_DIVIDED_FIRST, "group=self.comm.group", "group=dist.group.WORLD"),
        "dist.all_reduce() talks to all processes",
    ),
    "divides by the number of GPUs": (
        edit(
            DDP_SYNCHRONOUS,
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full /= __import__('torch').cuda.device_count()",
        ),
        "torch.cuda.device_count() counts GPUs",
    ),
    "a buffer in float32": (
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.bucket.full.float()",
        ),
        "a buffer for gradients has their dtype",
    ),
    "the parameters' own gradients": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(param.grad) for param in unit.params]",
        ),
        "the unit's gradients are in unit.bucket.full",
    ),
    "one call per parameter": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "[dist.all_reduce(view) for view in unit.layout.views(unit.bucket.full)]",
        ),
        "one call per parameter",
    ),
    "only a shard": (
        edit(
            DDP,
            "unit.bucket.grad = unit.bucket.full",
            "unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)",
            _COMM,
            "return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)",
        ),
        "here every rank keeps the full mean",
    ),
    "loses what no_sync kept back": (
        edit(
            DDP,
            "unit.bucket.reduction = self.reduce(unit)",
            "unit.bucket.reduction = self.reduce(unit)\n        unit.bucket.full = None",
        ),
        "what no_sync() kept back",
    ),
    "the package's, by super()": (
        "import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    def post_backward(self, unit):\n"
        "        super().post_backward(unit)\n\n    def reduce(self, unit):\n        return super().reduce(unit)\n",
        "write your own",
    ),
    "copies into unit.bucket.grad": (
        edit(DDP, "unit.bucket.grad = unit.bucket.full", "unit.bucket.grad.copy_(unit.bucket.full)"),
        "is None until reduce() sets it",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyDDP(zerolab.DDP):\n    pass\n", "write your own"),
    "sum for mean": (
        edit(DDP_SYNCHRONOUS, "        unit.bucket.full /= self.world_size\n", ""),
        "summed over ranks",
    ),
    "divided twice": (
        edit(
            DDP,
            _COMM,
            "self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        unit.bucket.grad /= self.world_size",
        ),
        "divided by N twice",
    ),
    "forgotten wait: nothing returned": (edit(DDP, "return self", "self"), "a forgotten wait"),
    "forgotten wait: not kept": (edit(DDP, "unit.bucket.reduction = self", "self"), "a forgotten wait"),
    "ignores no_sync": (edit(DDP, "if self.reduces(unit):", "if True:"), "no_sync() was ignored"),
    "never reduces": (edit(DDP, "if self.reduces(unit):", "if False:"), "reduce() was not called"),
    "unit.bucket.grad not set": (
        edit(DDP, "unit.bucket.grad = unit.bucket.full\n        ", "", "unit.bucket.grad", "unit.bucket.full"),
        "did not leave the mean in unit.bucket.grad",
    ),
    "reduces a copy": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.bucket.grad.clone()"),
        "was not written back",
    ),
    "averages the parameters": (
        edit(DDP, "all_reduce(unit.bucket.grad", "all_reduce(unit.full.data"),
        "it was not reduced",
    ),
    "changes the parameters": (
        edit(
            DDP,
            _COMM,
            "dist.all_reduce(unit.full.data)",
            "import zerolab\n",
            "import torch.distributed as dist\nimport zerolab\n",
        ),
        "the parameters were averaged",
    ),
    "reduces twice": (
        edit(DDP, "        return", "        self.comm.all_reduce(unit.bucket.grad, unit.name).wait()\n        return"),
        "extra traffic",
    ),
    "reduces to rank 0": (
        edit(DDP_SYNCHRONOUS, "all_reduce(unit.bucket.full, ", "reduce(unit.bucket.full, dst=0, "),
        "reached rank 0 only",
    ),
    "only rank 0 calls": (
        edit(DDP_SYNCHRONOUS, "if not self.reduces(unit):", "if not self.reduces(unit) or self.rank > 0:"),
        "reduce() was not called",
    ),
    "gathers everything": (
        edit(
            DDP_SYNCHRONOUS,
            "dist.all_reduce(unit.bucket.full, group=self.comm.group)",
            "all = [unit.bucket.full.clone() for _ in range(self.world_size)]; dist.all_gather(all, unit.bucket.full)",
            "unit.bucket.full /= self.world_size",
            "unit.bucket.full = sum(all) / self.world_size",
        ),
        "extra traffic",
    ),
}

RIGHT = {
    "03.1": (
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

WRONG = {
    "03.1": AVERAGE_MUTANTS,
    "03.2": BUCKET_MUTANTS,
    "03.3": DDP_MUTANTS,
}
