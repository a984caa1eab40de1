"""Lesson 24: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson24 import OUTER

OUTER_WITH_SGD = """\
import torch
import torch.distributed as dist


class Outer:
    def __init__(self, params, lr=0.7, momentum=0.9, group=None):
        self.params, self.group = [*params], group
        self.old = [param.detach().clone() for param in self.params]
        self.sgd = torch.optim.SGD(self.old, lr=lr, momentum=momentum, nesterov=momentum > 0)

    @torch.no_grad()
    def step(self):
        for param, old in zip(self.params, self.old):
            old.grad = (old - param).contiguous()
            dist.all_reduce(old.grad, group=self.group)
            old.grad /= dist.get_world_size(self.group)
        self.sgd.step()
        for param, old in zip(self.params, self.old):
            param.copy_(old)
"""

OUTER_FLAT = """\
import torch
import torch.distributed as dist


class Outer:
    def __init__(self, params, lr=0.7, momentum=0.9, group=None):
        self.params, self.lr, self.momentum, self.group = list(params), lr, momentum, group
        self.old = self.flat()
        self.speed = torch.zeros_like(self.old)

    def flat(self):
        return torch.cat([param.detach().reshape(-1) for param in self.params])

    @torch.no_grad()
    def step(self):
        new = self.flat() / dist.get_world_size(self.group)
        dist.all_reduce(new, group=self.group)
        gradient = self.old - new
        self.speed = self.momentum * self.speed + gradient
        self.old = self.old - self.lr * (gradient + self.momentum * self.speed)
        start = 0
        for param in self.params:
            param.copy_(self.old[start : start + param.numel()].view(param.shape))
            start += param.numel()
"""

_SPEED = "            speed.mul_(self.momentum).add_(gradient)\n"
_OLD = "            old -= self.lr * (gradient + self.momentum * speed)\n"
_BACK = "            param.copy_(old)\n"
_ALL = "            dist.all_reduce(total, group=self.group)\n"
SIGN = (
    "the outer gradient points the wrong way: old - mean, since a step is *subtracted*. The local steps are undone, "
    "and more"
)
SUM = "a sum over ranks, and not their mean: divide by the number of ranks in the group"
NESTEROV = (
    "this is momentum, but not Nesterov's: the step is gradient + momentum * speed, with the speed that has just been "
    "updated"
)
OLD_ALIAS = (
    "`old` is the same memory as the parameter, so the local steps move both, and the outer gradient is gone: keep a "
    "clone"
)
WORLD = "all ranks of the world were taken, and only those of `group` share these parameters: group=self.group"
KEPT = "the round that comes begins from the new parameters: `old` has to become them"
SENT_TOO = (
    "more was sent than the parameters: `old` and the speed are the same on all ranks already, and twice the bytes are "
    "what local steps wanted to save"
)
FIXED = "lr and momentum were written as numbers: take the arguments"
FROM_OLD = (
    "the step is made from `old`, where the round began, and not from where the local steps have come to: what they "
    "moved is in the outer gradient already, and would count twice"
)
OUTER_MISTAKES = {
    "new - old": Mistake(edit(OUTER, "old - total / N", "total / N - old"), SIGN),
    "added": Mistake(edit(OUTER, "old -= self.lr", "old += self.lr"), SIGN),
    "a sum": Mistake(edit(OUTER, "total / N", "total"), SUM),
    "a sum of differences": Mistake(
        edit(
            OUTER,
            "param.detach().clone(memory_format=torch.contiguous_format)",
            "(old - param).contiguous()",
            "old - total / N",
            "total",
        ),
        SUM,
    ),
    "divided by the world": Mistake(edit(OUTER, "get_world_size(self.group)", "get_world_size()"), WORLD),
    "in the world": Mistake(edit(OUTER, _ALL, "            dist.all_reduce(total)\n"), WORLD),
    "no mean": Mistake(
        edit(OUTER, _ALL, "", "total / N", "total"),
        "each rank took its own difference: nothing was sent, and the ranks have drifted apart. The mean is meant",
    ),
    "heavy ball": Mistake(edit(OUTER, "(gradient + self.momentum * speed)", "speed"), NESTEROV),
    "the speed before": Mistake(edit(OUTER, _SPEED, "", _OLD, _OLD + _SPEED), NESTEROV),
    "momentum once": Mistake(edit(OUTER, "gradient + self.momentum * speed", "gradient + speed"), NESTEROV),
    "no momentum": Mistake(
        edit(OUTER, "(gradient + self.momentum * speed)", "gradient"),
        "plain SGD: the speed of the rounds before is not used",
    ),
    "dampened": Mistake(
        edit(OUTER, ".add_(gradient)", ".add_(gradient, alpha=1 - self.momentum)"),
        "speed = momentum * speed + gradient: the gradient is not scaled by 1 - momentum, as Adam's averages are",
    ),
    "learning rate within": Mistake(
        edit(OUTER, "add_(gradient)", "add_(gradient, alpha=self.lr)"),
        "the learning rate was multiplied into the speed: it belongs to the step alone",
    ),
    "fixed rates": Mistake(
        edit(OUTER, "list(params), lr, momentum, group", "list(params), 0.7, 0.9, group"),
        FIXED,
    ),
    "fixed learning rate": Mistake(
        edit(OUTER, "list(params), lr, momentum, group", "list(params), 0.7, momentum, group"), FIXED
    ),
    "fixed momentum": Mistake(edit(OUTER, "list(params), lr, momentum, group", "list(params), lr, 0.9, group"), FIXED),
    "learning rate of the gradient alone": Mistake(
        edit(OUTER, "self.lr * (gradient + self.momentum * speed)", "(self.lr * gradient + self.momentum * speed)"),
        "the learning rate belongs to all of the step: lr * (gradient + momentum * speed), with the brackets",
    ),
    "from the mean": Mistake(
        edit(OUTER, _OLD, "            old.copy_(total / N - self.lr * (gradient + self.momentum * speed))\n"),
        FROM_OLD,
    ),
    "from this rank's parameters": Mistake(
        edit(
            OUTER,
            _OLD + _BACK,
            "            param -= self.lr * (gradient + self.momentum * speed)\n            old.copy_(param)\n",
        ),
        FROM_OLD,
    ),
    "gathered": Mistake(
        edit(
            OUTER,
            _ALL,
            "            parts = [torch.empty_like(total) for _ in range(N)]\n"
            "            dist.all_gather(parts, total, group=self.group)\n            total = sum(parts)\n",
        ),
        "every rank gets the parameters of all, N - 1 times as many bytes as it has: all_reduce sends less than twice",
    ),
    "in bfloat16": Mistake(
        edit(OUTER, "param.detach().clone(", "param.detach().bfloat16().clone("),
        "the parameters were rounded to bfloat16 before the mean: what few steps have moved is lost in that",
    ),
    "no learning rate": Mistake(edit(OUTER, "self.lr * (", "("), "the learning rate `lr` is not used"),
    "old is the parameter": Mistake(
        edit(OUTER, "param.detach().clone() for param in self.params]", "param.detach() for param in self.params]"),
        OLD_ALIAS,
    ),
    "old is the parameter after a step": Mistake(
        edit(
            OUTER, "zip(self.params, self.old, self.speed):\n", "zip(self.params, [*self.old], self.speed):\n"
        ).replace(_BACK, _BACK + "        self.old = [param.detach() for param in self.params]\n"),
        OLD_ALIAS,
    ),
    "old stays": Mistake(
        edit(
            OUTER,
            _OLD + _BACK,
            "            param.copy_(old - self.lr * (gradient + self.momentum * speed))\n",
        ),
        KEPT,
    ),
    "old becomes the mean": Mistake(
        edit(
            OUTER,
            _OLD + _BACK,
            "            param.copy_(old - self.lr * (gradient + self.momentum * speed))\n"
            "            old.copy_(total / N)\n",
        ),
        KEPT,
    ),
    "not written back": Mistake(
        edit(OUTER, _BACK, ""),
        "the parameters are still those of this rank's local steps: param.copy_(old) at the end",
    ),
    "the mean is written back": Mistake(
        edit(OUTER, _BACK, "            param.copy_(total / N)\n"),
        "the parameters became the mean, and the outer step was made on `old` alone: param.copy_(old)",
    ),
    "the steps of rank 0": Mistake(
        edit(
            OUTER,
            _ALL,
            "            dist.broadcast(total, group=self.group, group_src=0)\n",
            "total / N",
            "total",
        ),
        "rank 0's parameters were taken for all: the work of the other ranks is lost. The mean of all is meant",
    ),
    "speed made anew": Mistake(
        edit(
            OUTER,
            _SPEED,
            "            speed = gradient.clone()\n",
        ),
        "the speed begins anew in every round: keep it, and update it in place",
    ),
    "speed on the class": Mistake(
        edit(
            OUTER,
            "class Outer:\n",
            "class Outer:\n    kept = {}\n\n",
            "        self.speed = [torch.zeros_like(old) for old in self.old]\n",
            "        for i, old in enumerate(self.old):\n            Outer.kept[i] = torch.zeros_like(old)\n",
            "self.params, self.old, self.speed)",
            "self.params, self.old, Outer.kept.values())",
        ),
        "the speed is kept on the class, where a second object overwrites it: keep it in self",
    ),
    "a generator used up": Mistake(
        edit(
            OUTER,
            "self.params, self.lr",
            "self.given, self.lr",
            "list(params), lr",
            "params, lr",
            "for param in self.params]",
            "for param in self.given]",
            "zip(self.params,",
            "zip(self.given,",
        ),
        "model.parameters() can be gone through only once, and in __init__ it is: keep list(params)",
    ),
    "view(-1)": Mistake(
        edit(
            OUTER,
            "param.detach().clone(memory_format=torch.contiguous_format)",
            "param.detach().view(-1).clone()",
            "old - total / N",
            "old - (total / N).view(old.shape)",
        ),
        "a parameter may be a transposed tensor, which view(-1) refuses: clone it, or use reshape(-1)",
    ),
    "in float32": Mistake(
        edit(
            OUTER,
            "clone(memory_format=torch.contiguous_format)",
            "float().contiguous().clone()",
        ),
        "float64 parameters were rounded to float32 on the way: keep the dtype",
    ),
    "sent twice": Mistake(
        edit(
            OUTER,
            "            gradient = old - total / N\n",
            "            before = old.contiguous().clone()\n            dist.all_reduce(before, group=self.group)\n"
            "            gradient = (before - total) / N\n",
        ),
        SENT_TOO,
    ),
    "the speed is sent": Mistake(
        edit(
            OUTER,
            _SPEED,
            _SPEED + "            dist.all_reduce(speed, group=self.group)\n            speed /= N\n",
        ),
        SENT_TOO,
    ),
    "the mean on one rank": Mistake(
        edit(OUTER, _ALL, "            dist.reduce(total, group=self.group, group_dst=0)\n"),
        "only one rank got the sum, and the others go on with their own: all_reduce",
    ),
    "autograd's gradient": Mistake(
        edit(OUTER, "old - total / N", "param.grad if param.grad is not None else torch.zeros_like(old)"),
        "the round changed nothing: the outer gradient is no .grad, but what the local steps have changed, old - mean",
    ),
    "one rank less": Mistake(
        edit(OUTER, "total / N", "total / max(N - 1, 1)"),
        "the mean is over all ranks of the group, this one as well: divide by N",
    ),
    "speed begins as the parameters": Mistake(
        edit(OUTER, "torch.zeros_like(old)", "old.clone()"),
        "the speed is 0 before the first round: zeros, and not a copy",
    ),
    "other memory": Mistake(
        edit(OUTER, _BACK, "            param.data = old.clone()\n"),
        "each parameter was given other memory, and whoever has a view of the old one, such as a flat buffer, does not "
        "see it: param.copy_(old)",
    ),
    "a frozen parameter": Mistake(
        edit(OUTER, _BACK, _BACK + "            param.requires_grad_(False)\n"),
        "the parameter no longer requires a gradient: copy into it, under torch.no_grad(), and leave the rest",
    ),
}

RIGHT = {"24.1": [OUTER_WITH_SGD, OUTER_FLAT]}
MISTAKES = {"24.1": OUTER_MISTAKES}
