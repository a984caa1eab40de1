"""Lesson 08: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson08 import SCALER

from .sources import edit

HEAD = SCALER.split("    def unscale_(")[0]

# Finds the overflow in the sum of absolute values, gathers everyone's flag, and counts down.
SCALER_BY_GATHER = f"""{HEAD}    def unscale_(self, optimizer):
        norms = [torch.zeros(())]
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                if param.grad.dtype != param.dtype:
                    self.gradients()
                grad = to_local(param.grad)
                grad.mul_(1.0 / self.factor)
                if grad.numel():
                    norms.append(grad.abs().max().float())
        mine = torch.isfinite(torch.stack(norms)).all().to(torch.int64).view(1)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        self.overflow = sum(int(one) for one in every) < len(every)

    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        return None if self.overflow else optimizer.step()

    def update(self):
        skipped, self.overflow = self.overflow, None
        if skipped:
            self.factor *= 0.5
            self.good_steps = 0
            return
        self.good_steps = (self.good_steps + 1) % self.growth_interval
        if self.good_steps == 0:
            self.factor *= 2.0
"""

# The engine's own collective, one call per parameter, a scale that is a tensor.
_AS_TENSOR = edit(HEAD, "zero, init_scale, growth_interval", "zero, torch.tensor(float(init_scale)), growth_interval")
SCALER_BY_TENSORS = f"""{_AS_TENSOR}\
    def unscale_(self, optimizer):
        flags = []
        for grad in self.gradients():
            grad.copy_(grad / self.factor)
            flag = (~torch.isfinite(grad)).any().float()
            dist.all_reduce(flag)
            flags.append(flag)
        self.overflow = any(bool(flag > 0) for flag in flags)

    def step(self, optimizer):
        if self.overflow is None:
            self.unscale_(optimizer)
        if self.overflow:
            optimizer.zero_grad()
        else:
            optimizer.step()
            self.good_steps += 1

    def update(self):
        if self.overflow:
            self.factor = self.factor * 0.5
            self.good_steps = 0
        elif self.good_steps >= self.growth_interval:
            self.factor = self.factor * 2
            self.good_steps = 0
        self.overflow = None
"""

# Asks for the overflow before it divides; one message to rank 0 and one back.
SCALER_BY_REDUCE = edit(
    SCALER,
    """\
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
""",
    """\
        grads = self.gradients()
        finite = all(g.isfinite().all().item() for g in grads)
        found = torch.tensor([0.0 if finite else 1.0])
        dist.reduce(found, dst=0, op=dist.ReduceOp.SUM)
        dist.broadcast(found, src=0)
        self.overflow = found.item() != 0
        torch._foreach_div_(grads, self.factor)
""",
)

_REDUCE = "        dist.all_reduce(found, op=dist.ReduceOp.MAX)\n"
_FINITE = "not grad.isfinite().all()"

SCALER_MUTANTS = {
    "decides alone": (edit(SCALER, _REDUCE, ""), "each rank decided for itself"),
    "reduces on one branch": (
        edit(SCALER, _REDUCE, "        if found:\n            dist.all_reduce(found, op=dist.ReduceOp.MAX)\n"),
        "every rank must make the same calls",
    ),
    "reduces where it is finite": (
        edit(SCALER, _REDUCE, "        if not found:\n            dist.all_reduce(found, op=dist.ReduceOp.MAX)\n"),
        "every rank must make the same calls",
    ),
    "MIN": (edit(SCALER, "ReduceOp.MAX", "ReduceOp.MIN"), "MIN says yes only if all do"),
    "rank 0's flag": (edit(SCALER, _REDUCE, "        dist.broadcast(found, src=0)\n"), "does not win"),
    "inf, not NaN": (edit(SCALER, _FINITE, "grad.isinf().any()"), "an overflow can also be NaN"),
    "NaN, not inf": (edit(SCALER, _FINITE, "grad.isnan().any()"), "goes unnoticed"),
    "inf, not -inf": (edit(SCALER, _FINITE, "(grad == torch.inf).any() or grad.isnan().any()"), "-inf is an overflow"),
    "never skips": (edit(SCALER, "        if not self.overflow:\n", "        if True:\n"), "goes unnoticed"),
    "never looks": (edit(SCALER, "found.fill_(1)", "pass"), "goes unnoticed"),
    "zeros the inf and steps": (
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        if self.overflow:\n            for grad in self.gradients():\n                grad.zero_()\n"
            "        optimizer.step()",
        ),
        "momentum, weight decay",
    ),
    "zeros what is not finite": (
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        for grad in self.gradients():\n            grad.nan_to_num_(0.0, 0.0, 0.0)\n"
            "        optimizer.step()",
        ),
        "do not call optimizer.step() at all",
    ),
    "the last parameter's flag": (
        edit(
            SCALER,
            "            if not grad.isfinite().all():\n                found.fill_(1)\n",
            "            found.fill_(float(not grad.isfinite().all()))\n",
        ),
        "once the flag is set, it must stay set",
    ),
    "one overflow and no more": (
        edit(SCALER, "ReduceOp.MAX", "ReduceOp.SUM", "bool(found)", "found.item() == 1"),
        "an overflow on several ranks at once",
    ),
    "divides by the ranks too": (
        edit(SCALER, "grad /= self.factor", "grad /= self.factor * dist.get_world_size()"),
        "the mean already",
    ),
    "divides by a constant": (edit(SCALER, "grad /= self.factor", "grad /= 2.0**16"), "a fixed 2**16"),
    "halves whole numbers": (edit(SCALER, "self.factor / 2", "self.factor // 2"), "must not end at 0"),
    "an upper limit": (
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor * 2, 0",
            "self.factor = min(self.factor * 2, 2.0**16)\n            self.good_steps = 0",
        ),
        "has an upper limit",
    ),
    "raises on an overflow": (
        edit(
            SCALER,
            "        if not self.overflow:\n",
            "        if self.overflow:\n            raise OverflowError\n        if not self.overflow:\n",
        ),
        "which is no error",
    ),
    "raises on its own overflow": (
        edit(SCALER, "found.fill_(1)", "raise FloatingPointError(f'{grad}')"),
        "which is no error",
    ),
    "clears the gradients": (
        edit(
            SCALER,
            "        self.overflow = bool(found)\n",
            "        self.overflow = bool(found)\n        optimizer.zero_grad()\n",
        ),
        "are still needed for the step",
    ),
    "no NaN by comparison": (
        edit(SCALER, "not grad.isfinite().all()", "(grad.abs() > 65504).any()"),
        "an overflow can also be NaN",
    ),
    "forgets to False": (
        edit(SCALER, "        self.overflow = None\n", "        self.overflow = False\n"),
        "update() must forget",
    ),
    "the loss in place": (
        edit(SCALER, "return loss * self.factor", "return loss.mul_(self.factor)"),
        "a new tensor",
    ),
    "keeps the gradients": (
        edit(SCALER, "for grad in self.gradients():", "self.grads = self.gradients()\n        for grad in self.grads:"),
        "the scaler keeps the gradients",
    ),
    "does not wait": (
        edit(SCALER, "op=dist.ReduceOp.MAX)", "op=dist.ReduceOp.MAX, async_op=True)"),
        "a forgotten wait",
    ),
    "unscales in step alone": (
        edit(
            SCALER,
            "            grad /= self.factor\n",
            "",
            "        if not self.overflow:\n",
            "        for grad in self.gradients():\n            grad /= self.factor\n        if not self.overflow:\n",
        ),
        "clipping needs the true one",
    ),
    "unscales again in step": (
        edit(
            SCALER,
            "        if self.overflow is None:\n            self.unscale_",
            "        self.unscale_",
            "self.unscale_(optimizer)\n",
            "self.unscale_(optimizer)\n",
        ),
        "divided by the scale twice",
    ),
    "step does not unscale": (
        edit(SCALER, "        if self.overflow is None:\n            self.unscale_(optimizer)\n", ""),
        "step() used scaled gradients",
    ),
    "multiplies": (edit(SCALER, "grad /= self.factor", "grad *= self.factor"), "divide by it"),
    "not in place": (edit(SCALER, "grad /= self.factor", "grad = grad / self.factor"), "divide in place"),
    "in float16": (
        edit(
            SCALER,
            "for grad in self.gradients():",
            "for param in self.zero.model.parameters():\n            grad = param.grad\n"
            "            if grad is None:\n                continue",
        ),
        "float32",
    ),
    "all parameters": (
        edit(
            SCALER,
            "for grad in self.gradients():\n",
            "self.gradients()\n        for param in self.zero.model.parameters():\n            grad = param.grad\n",
        ),
        "param.grad is None",
    ),
    "largest of nothing": (edit(SCALER, _FINITE, "not grad.abs().max().isfinite()"), "an empty tensor has no largest"),
    "forgets to forget": (
        edit(SCALER, "        self.overflow = None\n", "", ": bool | None = None  #", ": bool | None = None  #"),
        "update() must forget",
    ),
    "keeps the overflow": (
        edit(
            SCALER,
            "        self.overflow = None\n",
            "        if not self.overflow:\n            self.overflow = None\n",
        ),
        "still remembered",
    ),
    "never shrinks": (edit(SCALER, "self.factor / 2, 0", "self.factor, 0"), "every later step overflows too"),
    "shrinks in step and update": (
        edit(
            SCALER,
            "            optimizer.step()\n",
            "            optimizer.step()\n        else:\n            self.factor /= 2\n",
        ),
        "halved more than once",
    ),
    "shrinks per overflow": (
        edit(
            SCALER,
            "ReduceOp.MAX",
            "ReduceOp.SUM",
            "self.overflow = bool(found)",
            "self.overflow = int(found)",
            "self.factor / 2, 0",
            "self.factor / 2**self.overflow, 0",
        ),
        "however many ranks",
    ),
    "shrinks to a quarter": (edit(SCALER, "self.factor / 2, 0", "self.factor / 4, 0"), "halved more than once"),
    "shrinks a little": (edit(SCALER, "self.factor / 2, 0", "self.factor * 0.9, 0"), "the scale is halved"),
    "counts the bad step too": (edit(SCALER, "self.factor / 2, 0", "self.factor / 2, 1"), "sets the count back"),
    "count not reset by an overflow": (
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor / 2, 0",
            "self.factor = self.factor / 2\n            self.good_steps -= 1",
        ),
        "sets the count back to 0",
    ),
    "count not reset by growth": (
        edit(SCALER, "self.factor, self.good_steps = self.factor * 2, 0", "self.factor = self.factor * 2"),
        "right for the first growth only",
    ),
    "grows ever after": (
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor * 2, 0",
            "self.factor = self.factor * 2",
            "self.good_steps == self",
            "self.good_steps >= self",
        ),
        "begins again at 0",
    ),
    "grows one step early": (
        edit(SCALER, "self.good_steps == self.growth_interval", "self.good_steps + 1 == self.growth_interval"),
        "doubles after growth_interval good steps",
    ),
    "grows one step late": (
        edit(SCALER, "self.good_steps == self.growth_interval", "self.good_steps > self.growth_interval"),
        "must double the scale",
    ),
    "never grows": (edit(SCALER, "self.factor * 2, 0", "self.factor, 0"), "must double the scale"),
    "grows in every step": (
        edit(SCALER, "elif self.good_steps == self.growth_interval:", "else:"),
        "doubles after growth_interval good steps",
    ),
    "grows after a skip": (
        edit(
            SCALER,
            "        elif self.good",
            "        if self.good",
            "        self.good_steps += 1\n        if self.overflow:\n"
            "            self.factor, self.good_steps = self.factor / 2, 0",
            "        self.good_steps += 1\n        if self.overflow:\n            self.factor = self.factor / 2",
        ),
        "sets the count back",
    ),
    "rank 0 alone shrinks": (
        edit(
            SCALER,
            "        if self.overflow:\n            self.factor",
            "        if self.overflow and dist.get_rank() > 0:\n            self.good_steps = 0\n"
            "        elif self.overflow:\n            self.factor",
        ),
        "scales differ",
    ),
    "the rank that overflowed shrinks": (
        edit(
            SCALER,
            "        dist.all_reduce(found",
            "        self.mine = bool(found)\n        dist.all_reduce(found",
            "        if self.overflow:\n            self.factor, self.good_steps = self.factor / 2, 0",
            "        if self.overflow:\n"
            "            self.factor, self.good_steps = self.factor / (2 if self.mine else 1), 0",
        ),
        "scales differ",
    ),
    "asks for all gradients": (
        edit(
            SCALER,
            _REDUCE,
            "        for grad in self.gradients():\n"
            "            every = [torch.zeros(400) for _ in range(dist.get_world_size())]\n"
            "            padding = (0, 400 - grad.numel())\n"
            "            dist.all_gather(every, torch.nn.functional.pad(grad.flatten().float(), padding))\n"
            "            found += float(not torch.stack(every).isfinite().all())\n",
        ),
        "one number is enough",
    ),
    "steps in unscale_": (
        edit(
            SCALER,
            "        self.overflow = bool(found)\n",
            "        self.overflow = bool(found)\n        if not self.overflow:\n            optimizer.step()\n",
        ),
        "only step() may change weights",
    ),
    "steps in update": (
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()\n",
            "        self.optimizer = optimizer\n",
            "    def update(self) -> None:\n",
            "    def update(self) -> None:\n        if not self.overflow:\n            self.optimizer.step()\n",
        ),
        "update() adjusts the scale",
    ),
    "never steps": (edit(SCALER, "            optimizer.step()\n", "            pass\n"), "must call optimizer.step()"),
    "a scale for all scalers": (
        edit(
            SCALER,
            "class MyScaler:\n",
            "state = {}\n\n\nclass MyScaler:\n",
            "self.factor, self.growth_interval = zero, init_scale, growth_interval",
            "self.growth_interval = zero, growth_interval\n        state.setdefault('factor', init_scale)",
            "self.factor",
            "state['factor']",
        ),
        "another scaler",
    ),
    "an interval of two": (edit(SCALER, "== self.growth_interval", "== 2"), "take the scale and the interval"),
    "torch's": (
        "import torch\n\n\nclass MyScaler(torch.amp.GradScaler):\n    def __init__(self, zero, init_scale=2.0**16, "
        "growth_interval=2000):\n"
        "        super().__init__('cpu', init_scale=init_scale, growth_interval=growth_interval)\n",
        "without torch's GradScaler",
    ),
    "looks after clipping": (
        edit(
            SCALER,
            """\
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
""",
            "        self.overflow = False\n",
            "        if not self.overflow:\n",
            """\
        found = torch.zeros(1)
        for grad in self.gradients():
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
        if not self.overflow:
""",
            "        found = torch.zeros(1)\n        for grad in self.gradients():\n            grad /=",
            "        for grad in self.gradients():\n            grad /=",
        ),
        "must find the overflow and remember it",
    ),
    "the loss's flag": (
        edit(
            SCALER,
            "        return loss * self.factor\n",
            "        self.loss = loss * self.factor\n        return self.loss\n",
            "            if not grad.isfinite().all():\n                found.fill_(1)\n",
            "        if not self.loss.isfinite().all():\n            found.fill_(1)\n",
        ),
        "goes unnoticed",
    ),
    "a flag in the gradient's place": (
        edit(
            SCALER,
            "        found = torch.zeros(1)\n",
            "        found = torch.zeros(1, dtype=torch.float16)\n",
            "found.fill_(1)",
            "found.fill_(torch.inf)",
            "ReduceOp.MAX",
            "ReduceOp.SUM",
            "bool(found)",
            "bool(found.isnan())",
        ),
        "goes unnoticed",
    ),
    "no `return` of the loss": (
        edit(SCALER, "        return loss * self.factor\n", "        loss * self.factor\n"),
        "scale() was given",
    ),
}

# A gradient of its own in float32 for each parameter; the flag goes by the engine's group.
SCALER_BY_ASSIGNMENT = edit(
    SCALER,
    """\
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
""",
    """\
        count = 0
        for param in self.zero.model.parameters():
            if param.grad is not None:
                param.grad = param.grad.to(param.dtype) / self.factor
                count += int((~param.grad.isfinite()).sum())
        counts = torch.tensor([count])
        work = dist.all_reduce(counts, group=self.zero.comm.group, async_op=True)
        work.wait()
        self.overflow = counts.item() > 0
""",
)

# Everyone's list of flags as objects; the scale as a power of two; nothing is kept for a step that is over.
SCALER_BY_OBJECTS = """\
import torch
import torch.distributed as dist


class MyScaler:
    def __init__(self, zero, init_scale=2.0**16, growth_interval=2000):
        self.zero, self.interval, self.since = zero, growth_interval, 0
        self.power = torch.tensor(init_scale).log2().round().int().item()
        self.state = {}

    def scale(self, loss):
        return torch.ldexp(loss, torch.tensor(self.power))

    def unscale_(self, optimizer):
        self.zero.promote_grads(self.zero.units)
        params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        for p in params:
            p.grad = torch.ldexp(p.grad, torch.tensor(-self.power))
        flags = [None] * dist.get_world_size()
        dist.all_gather_object(flags, any(bool(torch.isnan(p.grad * 0).any()) for p in params))
        self.state["bad"] = any(flags)

    def step(self, optimizer):
        if "bad" not in self.state:
            self.unscale_(optimizer)
        if self.state["bad"]:
            return None
        return optimizer.step()

    def update(self):
        if self.state.pop("bad"):
            self.power, self.since = max(self.power - 1, 0), 0
        elif self.since + 1 < self.interval:
            self.since += 1
        else:
            self.power, self.since = self.power + 1, 0
"""

# torch's own kernel for both: it divides, and sets the flag; on shards the gradients ask the other ranks themselves.
SCALER_BY_KERNEL = edit(
    SCALER,
    """\
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
""",
    """\
        found, inverse = torch.zeros(1), torch.tensor([1 / self.factor])
        torch._amp_foreach_non_finite_check_and_unscale_(self.gradients(), found, inverse)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = found.item() > 0
""",
)

RIGHT = {
    "08.1": (
        SCALER_BY_OBJECTS,
        SCALER_BY_KERNEL,
        SCALER_BY_ASSIGNMENT,
        SCALER_BY_GATHER,
        SCALER_BY_TENSORS,
        SCALER_BY_REDUCE,
    )
}

WRONG = {"08.1": SCALER_MUTANTS}
