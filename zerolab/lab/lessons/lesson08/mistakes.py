"""Lesson 08: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson08 import SCALER

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

_UNSCALES = """\
        found = torch.zeros(1)
        for grad in self.gradients():
            grad /= self.factor
            if not grad.isfinite().all():
                found.fill_(1)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        self.overflow = bool(found)
"""

# Asks for the overflow before it divides; one message to rank 0 and one back.
SCALER_BY_REDUCE = edit(
    SCALER,
    _UNSCALES,
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
_FOUND = "            if not grad.isfinite().all():\n                found.fill_(1)\n"
_FINITE = "not grad.isfinite().all()"


BRANCH = (
    "every rank must make the same calls, whether it has an overflow or not: a rank that sees none "
    "cannot know that another one does"
)

LOST_FLAG = (
    "the ranks do send something, but one overflow among them does not win: an all-reduce with MAX "
    "(or SUM > 0) says yes if any rank does; MIN says yes only if all do"
)

NOT_NAN = "an overflow can also be NaN (inf - inf): isfinite() finds inf, -inf and NaN"

NEVER_LOOKED = (
    "the overflow goes unnoticed, or the step is made all the same: ask isfinite() of the gradients "
    "(isnan() does not find inf, and the loss may be finite), and if one is not, leave "
    "optimizer.step() out"
)

REPAIRED = (
    "the step was made with changed gradients: momentum, weight decay and Adam's averages move "
    "weights even where gradients are 0, so do not call optimizer.step() at all"
)

NO_ERROR = (
    "this comes only with an overflow, which is no error: every rank leaves optimizer.step() out, and"
    " update() halves the scale"
)

NOT_UNSCALED = (
    "step() used scaled gradients: it must unscale them itself, unless the loop has called unscale_()"
    " in this same step (so update() must forget that it was done)"
)

NOT_IN_PLACE = (
    "param.grad still has the scaled gradient, and clipping needs the true one: unscale_() must "
    "divide in place, with /= or div_() (grad = grad / ... makes a new tensor, which nobody keeps)"
)

SHRUNK_TWICE = "halved more than once for one overflow: in update(), once, however many ranks or parameters overflowed"

NO_SHRINK = (
    "after an overflow update() must halve the scale, or every later step overflows too (and not double it at "
    "once: every "
    "interval divides a count of 0)"
)

NOT_RESET = (
    "good steps are counted in a row: an overflow sets the count back to 0, or the scale grows before"
    " it has proved itself"
)

A_NORM = (
    "a step was skipped without an overflow: a norm may be larger than any element; only an element that is not"
    " finite is one, as isfinite() says"
)

LATE = "the scale doubles a step too late: count the good step first, and then compare the count with growth_interval"

OFF_BY_ONE = "the scale doubles after growth_interval good steps: with 2, in the second one's update()"

NEVER_GREW = (
    "update() must double the scale after growth_interval good steps, whatever it was at first, or it only ever falls"
)

DIFFERENT = "the ranks' scales differ from here on, so they average gradients of different scales: change it on all"

UPDATES = "only step() may change weights: unscale_() divides the gradients, and update() adjusts the scale"

HALF = (
    "unscaled in float16, where small numbers become 0 again, and what the scale has saved is lost: self.gradients() "
    "gives them in float32"
)

TWICE = "divided by the scale twice: after unscale_(), step() must not unscale again"

CLAMPED = (
    "clamp_() and nan_to_num_() make a finite number of inf, so the overflow is never seen: look "
    "first, and leave the "
    "values as they are"
)

SCALER_MISTAKES = {
    "decides alone": Mistake(
        edit(SCALER, _REDUCE, ""),
        (
            "each rank decided for itself: a rank sees only its slice, so ask all ranks, with an all-reduce "
            "of one number (MAX)"
        ),
    ),
    "reduces on one branch": Mistake(
        edit(SCALER, _REDUCE, "        if found:\n            dist.all_reduce(found, op=dist.ReduceOp.MAX)\n"),
        BRANCH,
    ),
    "reduces where it is finite": Mistake(
        edit(SCALER, _REDUCE, "        if not found:\n            dist.all_reduce(found, op=dist.ReduceOp.MAX)\n"),
        BRANCH,
    ),
    "MIN": Mistake(
        edit(SCALER, "ReduceOp.MAX", "ReduceOp.MIN"),
        LOST_FLAG,
    ),
    "rank 0's flag": Mistake(
        edit(SCALER, _REDUCE, "        dist.broadcast(found, src=0)\n"),
        LOST_FLAG,
    ),
    "inf, not NaN": Mistake(
        edit(SCALER, _FINITE, "grad.isinf().any()"),
        NOT_NAN,
    ),
    "NaN, not inf": Mistake(
        edit(SCALER, _FINITE, "grad.isnan().any()"),
        NEVER_LOOKED,
    ),
    "inf, not -inf": Mistake(
        edit(SCALER, _FINITE, "(grad == torch.inf).any() or grad.isnan().any()"),
        "-inf is an overflow too: isfinite() finds inf, -inf and NaN",
    ),
    "never skips": Mistake(
        edit(SCALER, "        if not self.overflow:\n", "        if True:\n"),
        NEVER_LOOKED,
    ),
    "never looks": Mistake(
        edit(SCALER, "found.fill_(1)", "pass"),
        NEVER_LOOKED,
    ),
    "zeros the inf and steps": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        if self.overflow:\n            for grad in self.gradients():\n                grad.zero_()\n"
            "        optimizer.step()",
        ),
        REPAIRED,
    ),
    "zeros what is not finite": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        for grad in self.gradients():\n            grad.nan_to_num_(0.0, 0.0, 0.0)\n"
            "        optimizer.step()",
        ),
        REPAIRED,
    ),
    "the last parameter's flag": Mistake(
        edit(
            SCALER,
            "            if not grad.isfinite().all():\n                found.fill_(1)\n",
            "            found.fill_(float(not grad.isfinite().all()))\n",
        ),
        (
            "the overflow of one parameter is forgotten when the next one is looked at: once the flag is set,"
            " it must stay set"
        ),
    ),
    "one overflow and no more": Mistake(
        edit(SCALER, "ReduceOp.MAX", "ReduceOp.SUM", "bool(found)", "found.item() == 1"),
        (
            "an overflow on several ranks at once is missed: after an all-reduce with SUM the flag may be 2 "
            "or more, so ask whether it is greater than 0"
        ),
    ),
    "divides by the ranks too": Mistake(
        edit(SCALER, "grad /= self.factor", "grad /= self.factor * dist.get_world_size()"),
        "divided by the number of ranks as well: the gradients are the mean already",
    ),
    "divides by a constant": Mistake(
        edit(SCALER, "grad /= self.factor", "grad /= 2.0**16"),
        "divided by a fixed 2**16: divide by self.factor, which the loss was multiplied by",
    ),
    "halves whole numbers": Mistake(
        edit(SCALER, "self.factor / 2", "self.factor // 2"),
        "halving must not end at 0, which `//` or int() does with a scale of 1: divide by 2",
    ),
    "an upper limit": Mistake(
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor * 2, 0",
            "self.factor = min(self.factor * 2, 2.0**16)\n            self.good_steps = 0",
        ),
        "the scale has an upper limit: it grows for as long as no gradient overflows",
    ),
    "raises on an overflow": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n",
            "        if self.overflow:\n            raise OverflowError\n        if not self.overflow:\n",
        ),
        NO_ERROR,
    ),
    "raises on its own overflow": Mistake(
        edit(SCALER, "found.fill_(1)", "raise FloatingPointError(f'{grad}')"),
        NO_ERROR,
    ),
    "clears the gradients": Mistake(
        edit(
            SCALER,
            "        self.overflow = bool(found)\n",
            "        self.overflow = bool(found)\n        optimizer.zero_grad()\n",
        ),
        "the gradients are still needed for the step: the loop itself calls zero_grad() after it",
    ),
    "no NaN by comparison": Mistake(
        edit(SCALER, "not grad.isfinite().all()", "(grad.abs() > 65504).any()"),
        NOT_NAN,
    ),
    "forgets to False": Mistake(
        edit(SCALER, "        self.overflow = None\n", "        self.overflow = False\n"),
        NOT_UNSCALED,
    ),
    "the loss in place": Mistake(
        edit(SCALER, "return loss * self.factor", "return loss.mul_(self.factor)"),
        NOT_IN_PLACE,
    ),
    "keeps the gradients": Mistake(
        edit(SCALER, "for grad in self.gradients():", "self.grads = self.gradients()\n        for grad in self.grads:"),
        "the scaler keeps the gradients themselves, 4 bytes for each: keep only whether they are finite",
    ),
    "does not wait": Mistake(
        edit(SCALER, "op=dist.ReduceOp.MAX)", "op=dist.ReduceOp.MAX, async_op=True)"),
        "a forgotten wait: with async_op=True the flag has not arrived yet when it is read",
    ),
    "unscales in step alone": Mistake(
        edit(
            SCALER,
            "            grad /= self.factor\n",
            "",
            "        if not self.overflow:\n",
            "        for grad in self.gradients():\n            grad /= self.factor\n        if not self.overflow:\n",
        ),
        NOT_IN_PLACE,
    ),
    "unscales again in step": Mistake(
        edit(
            SCALER,
            "        if self.overflow is None:\n            self.unscale_",
            "        self.unscale_",
            "self.unscale_(optimizer)\n",
            "self.unscale_(optimizer)\n",
        ),
        TWICE,
    ),
    "step does not unscale": Mistake(
        edit(SCALER, "        if self.overflow is None:\n            self.unscale_(optimizer)\n", ""),
        NOT_UNSCALED,
    ),
    "multiplies": Mistake(
        edit(SCALER, "grad /= self.factor", "grad *= self.factor"),
        "multiplied by the scale once more: divide by it",
    ),
    "not in place": Mistake(
        edit(SCALER, "grad /= self.factor", "grad = grad / self.factor"),
        NOT_IN_PLACE,
    ),
    "in float16": Mistake(
        edit(
            SCALER,
            "for grad in self.gradients():",
            "for param in self.zero.model.parameters():\n            grad = param.grad\n"
            "            if grad is None:\n                continue",
        ),
        HALF,
    ),
    "all parameters": Mistake(
        edit(
            SCALER,
            "for grad in self.gradients():\n",
            "self.gradients()\n        for param in self.zero.model.parameters():\n            grad = param.grad\n",
        ),
        "a parameter that was not used has no gradient: param.grad is None (self.gradients() leaves it out)",
    ),
    "largest of nothing": Mistake(
        edit(SCALER, _FINITE, "not grad.abs().max().isfinite()"),
        ("a rank may own nothing of a parameter, and an empty tensor has no largest element: isfinite().all() is True"),
    ),
    "forgets to forget": Mistake(
        edit(SCALER, "        self.overflow = None\n", "", ": bool | None = None  #", ": bool | None = None  #"),
        NOT_UNSCALED,
    ),
    "keeps the overflow": Mistake(
        edit(
            SCALER,
            "        self.overflow = None\n",
            "        if not self.overflow:\n            self.overflow = None\n",
        ),
        (
            "the overflow of the step before is still remembered: every step looks anew, and update() forgets"
            " what it has used"
        ),
    ),
    "never shrinks": Mistake(
        edit(SCALER, "self.factor / 2, 0", "self.factor, 0"),
        NO_SHRINK,
    ),
    "shrinks in step and update": Mistake(
        edit(
            SCALER,
            "            optimizer.step()\n",
            "            optimizer.step()\n        else:\n            self.factor /= 2\n",
        ),
        SHRUNK_TWICE,
    ),
    "shrinks per overflow": Mistake(
        edit(
            SCALER,
            "ReduceOp.MAX",
            "ReduceOp.SUM",
            "self.overflow = bool(found)",
            "self.overflow = int(found)",
            "self.factor / 2, 0",
            "self.factor / 2**self.overflow, 0",
        ),
        SHRUNK_TWICE,
    ),
    "shrinks to a quarter": Mistake(
        edit(SCALER, "self.factor / 2, 0", "self.factor / 4, 0"),
        SHRUNK_TWICE,
    ),
    "shrinks a little": Mistake(
        edit(SCALER, "self.factor / 2, 0", "self.factor * 0.9, 0"),
        (
            "after an overflow the scale is halved: another factor finds no scale that works, or loses more of "
            "it than it must"
        ),
    ),
    "counts the bad step too": Mistake(
        edit(SCALER, "self.factor / 2, 0", "self.factor / 2, 1"),
        NOT_RESET,
    ),
    "count not reset by an overflow": Mistake(
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor / 2, 0",
            "self.factor = self.factor / 2\n            self.good_steps -= 1",
        ),
        NOT_RESET,
    ),
    "count not reset by growth": Mistake(
        edit(SCALER, "self.factor, self.good_steps = self.factor * 2, 0", "self.factor = self.factor * 2"),
        (
            "right for the first growth only: the count must go back to 0 when the scale grows, and begin "
            "again from there"
        ),
    ),
    "grows ever after": Mistake(
        edit(
            SCALER,
            "self.factor, self.good_steps = self.factor * 2, 0",
            "self.factor = self.factor * 2",
            "self.good_steps == self",
            "self.good_steps >= self",
        ),
        "growth_interval good steps double the scale, and the count begins again at 0 when it does",
    ),
    "grows one step early": Mistake(
        edit(SCALER, "self.good_steps == self.growth_interval", "self.good_steps + 1 == self.growth_interval"),
        OFF_BY_ONE,
    ),
    "grows one step late": Mistake(
        edit(SCALER, "self.good_steps == self.growth_interval", "self.good_steps > self.growth_interval"),
        LATE,
    ),
    "never grows": Mistake(
        edit(SCALER, "self.factor * 2, 0", "self.factor, 0"),
        NEVER_GREW,
    ),
    "grows in every step": Mistake(
        edit(SCALER, "elif self.good_steps == self.growth_interval:", "else:"),
        OFF_BY_ONE,
    ),
    "grows after a skip": Mistake(
        edit(
            SCALER,
            "        elif self.good",
            "        if self.good",
            "        self.good_steps += 1\n        if self.overflow:\n"
            "            self.factor, self.good_steps = self.factor / 2, 0",
            "        self.good_steps += 1\n        if self.overflow:\n            self.factor = self.factor / 2",
        ),
        NOT_RESET,
    ),
    "rank 0 alone shrinks": Mistake(
        edit(
            SCALER,
            "        if self.overflow:\n            self.factor",
            "        if self.overflow and dist.get_rank() > 0:\n            self.good_steps = 0\n"
            "        elif self.overflow:\n            self.factor",
        ),
        DIFFERENT,
    ),
    "the rank that overflowed shrinks": Mistake(
        edit(
            SCALER,
            "        dist.all_reduce(found",
            "        self.mine = bool(found)\n        dist.all_reduce(found",
            "        if self.overflow:\n            self.factor, self.good_steps = self.factor / 2, 0",
            "        if self.overflow:\n"
            "            self.factor, self.good_steps = self.factor / (2 if self.mine else 1), 0",
        ),
        DIFFERENT,
    ),
    "asks for all gradients": Mistake(
        edit(
            SCALER,
            _REDUCE,
            "        for grad in self.gradients():\n"
            "            every = [torch.zeros(400) for _ in range(dist.get_world_size())]\n"
            "            padding = (0, 400 - grad.numel())\n"
            "            dist.all_gather(every, torch.nn.functional.pad(grad.flatten().float(), padding))\n"
            "            found += float(not torch.stack(every).isfinite().all())\n",
        ),
        "one number is enough: each rank says only whether its own gradients are finite",
    ),
    "steps in unscale_": Mistake(
        edit(
            SCALER,
            "        self.overflow = bool(found)\n",
            "        self.overflow = bool(found)\n        if not self.overflow:\n            optimizer.step()\n",
        ),
        UPDATES,
    ),
    "steps in update": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()\n",
            "        self.optimizer = optimizer\n",
            "    def update(self) -> None:\n",
            "    def update(self) -> None:\n        if not self.overflow:\n            self.optimizer.step()\n",
        ),
        UPDATES,
    ),
    "never steps": Mistake(
        edit(SCALER, "            optimizer.step()\n", "            pass\n"),
        "step() must call optimizer.step() when all gradients are finite",
    ),
    "a scale for all scalers": Mistake(
        edit(
            SCALER,
            "class MyScaler:\n",
            "state = {}\n\n\nclass MyScaler:\n",
            "self.factor, self.growth_interval = zero, init_scale, growth_interval",
            "self.growth_interval = zero, growth_interval\n        state.setdefault('factor', init_scale)",
            "self.factor",
            "state['factor']",
        ),
        "the scale belongs to one scaler: keep it in self, not in the class or the module",
    ),
    "an interval of two": Mistake(
        edit(SCALER, "== self.growth_interval", "== 2"),
        "right for the first scaler only: take the scale and the interval from __init__",
    ),
    "torch's": Mistake(
        "import torch\n\n\nclass MyScaler(torch.amp.GradScaler):\n    def __init__(self, zero, init_scale=2.0**16, "
        "growth_interval=2000):\n"
        "        super().__init__('cpu', init_scale=init_scale, growth_interval=growth_interval)\n",
        "write unscale_(), step() and update() yourself, without torch's GradScaler",
    ),
    "looks after clipping": Mistake(
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
        ("unscale_() must find the overflow and remember it: clipping turns an inf among the gradients into NaN and 0"),
    ),
    "the loss's flag": Mistake(
        edit(
            SCALER,
            "        return loss * self.factor\n",
            "        self.loss = loss * self.factor\n        return self.loss\n",
            "            if not grad.isfinite().all():\n                found.fill_(1)\n",
            "        if not self.loss.isfinite().all():\n            found.fill_(1)\n",
        ),
        NEVER_LOOKED,
    ),
    "a flag in the gradient's place": Mistake(
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
        NEVER_LOOKED,
    ),
    "no `return` of the loss": Mistake(
        edit(SCALER, "        return loss * self.factor\n", "        loss * self.factor\n"),
        "scale() returns nothing now: it was given, with `return loss * self.factor`",
    ),
    "a sum of squares": Mistake(
        edit(
            SCALER,
            _FOUND,
            "            found += grad.square().sum()\n",
            _REDUCE,
            "        dist.all_reduce(found)\n",
            "bool(found)",
            "not found.isfinite().item()",
        ),
        A_NORM,
    ),
    "tells rank 0 alone": Mistake(
        edit(SCALER, _REDUCE, "        dist.reduce(found, dst=0, op=dist.ReduceOp.MAX)\n"),
        "dist.reduce() gives its result to one rank alone, and every rank has to know: use all_reduce",
    ),
    "forgets in step": Mistake(
        edit(
            SCALER,
            "            optimizer.step()\n",
            "            optimizer.step()\n        self.overflow = None\n",
        ),
        "an overflow was taken for a good step: update() does not look, or step() forgot it (update() forgets it, "
        "when it has used it)",
    ),
    "a norm beyond float16": Mistake(
        edit(
            SCALER,
            _FOUND,
            "            found += grad.norm() ** 2\n",
            _REDUCE,
            "        dist.all_reduce(found)\n",
            "bool(found)",
            "not found.sqrt() * self.factor <= 65504",
        ),
        A_NORM,
    ),
    "the majority's flag": Mistake(
        edit(SCALER, "ReduceOp.MAX", "ReduceOp.SUM", "bool(found)", "found.item() > dist.get_world_size() / 2"),
        LOST_FLAG,
    ),
    "agrees in update": Mistake(
        edit(
            SCALER,
            _REDUCE,
            "",
            "    def update(self) -> None:\n",
            "    def update(self) -> None:\n        found = torch.tensor([float(self.overflow)])\n"
            f"{_REDUCE}        self.overflow = bool(found)\n",
        ),
        (
            "the ranks agree only in update(), when some have made the step already: ask all ranks in "
            "unscale_(), before "
            "anyone steps"
        ),
    ),
    "doubles at a count of 0": Mistake(
        edit(
            SCALER, "elif self.good_steps == self.growth_interval:", "if self.good_steps % self.growth_interval == 0:"
        ),
        NO_SHRINK,
    ),
    "keeps the flag when it grows": Mistake(
        edit(SCALER, "self.factor * 2, 0\n", "self.factor * 2, 0\n            return\n"),
        NOT_UNSCALED,
    ),
    "unscales unless there was an overflow": Mistake(
        edit(SCALER, "if self.overflow is None:", "if not self.overflow:"),
        "divided by the scale twice: after unscale_(), step() must not unscale again",
    ),
    "clamps them first": Mistake(
        edit(SCALER, _FOUND, f"            grad.clamp_(-65504, 65504)\n{_FOUND}"),
        CLAMPED,
    ),
    "one group of the optimizer's": Mistake(
        edit(
            SCALER,
            "for grad in self.gradients():",
            "self.gradients()\n        params = optimizer.param_groups[0]['params']\n"
            "        for grad in [to_local(param.grad) for param in params if param.grad is not None]:",
        ),
        "an optimizer may have several groups of parameters, and only the first was unscaled: self.gradients() has all",
    ),
    "by way of float16": Mistake(
        edit(SCALER, "grad /= self.factor", "grad.copy_(grad.half() / self.factor)"),
        HALF,
    ),
    "one gradient looked at": Mistake(
        edit(
            SCALER,
            _FOUND,
            "",
            _REDUCE,
            f"        if not self.gradients()[0].isfinite().all():\n            found.fill_(1)\n{_REDUCE}",
        ),
        "only one parameter's gradient was looked at, and an overflow may be in any: ask isfinite() of every one",
    ),
    "reduces before it looks": Mistake(
        edit(SCALER, _REDUCE, "", "        found = torch.zeros(1)\n", f"        found = torch.zeros(1)\n{_REDUCE}"),
        (
            "the flag was sent before it was set, so every rank decides for itself: look at the gradients "
            "first, then reduce"
        ),
    ),
    "a step without gradients": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        if self.overflow:\n            optimizer.zero_grad()\n        optimizer.step()",
        ),
        (
            "optimizer.step() was called without gradients: that skips nothing for hooks, schedules and "
            "counters; do not "
            "call it at all"
        ),
    ),
    "the first scale as a limit": Mistake(
        edit(
            SCALER,
            "self.factor * 2, 0",
            "min(self.factor * 2, self.limit), 0",
            "        self.good_steps = 0  #",
            "        self.limit = init_scale\n        self.good_steps = 0  #",
        ),
        NEVER_GREW,
    ),
    "the neighbour's flag": Mistake(
        edit(
            SCALER,
            _REDUCE,
            "        every = [torch.zeros(1) for _ in range(dist.get_world_size())]\n"
            "        dist.all_gather(every, found)\n        found += every[(dist.get_rank() + 1) % len(every)]\n",
        ),
        LOST_FLAG,
    ),
    "the count begins at another place": Mistake(
        edit(
            SCALER,
            "        self.good_steps += 1\n        if self.overflow:",
            "        if self.overflow:",
            "elif self.good_steps ==",
            "elif self.good_steps + 1 ==",
        ),
        NEVER_GREW,
    ),
    "halves in step": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        if self.overflow:\n            self.factor, self.good_steps = self.factor / 2, -1\n"
            "            self.overflow = False\n            return\n        optimizer.step()",
        ),
        "step() divides by a scale that is not the one that the loss was multiplied by: only update() may change it",
    ),
    "divides by the first scale": Mistake(
        edit(
            SCALER,
            "grad /= self.factor",
            "grad /= self.first",
            "        self.good_steps = 0  #",
            "        self.first = init_scale\n        self.good_steps = 0  #",
        ),
        "divided by the first scale for ever: divide by self.factor, which the loss was multiplied by in this step",
    ),
    "rank 0 alone grows": Mistake(
        edit(
            SCALER,
            "            self.factor, self.good_steps = self.factor * 2, 0\n",
            "            self.good_steps = 0\n            if dist.get_rank() == 0:\n                self.factor *= 2\n",
        ),
        DIFFERENT,
    ),
    "steps, and puts the weights back": Mistake(
        edit(
            SCALER,
            "        if not self.overflow:\n            optimizer.step()",
            "        params = [to_local(param) for param in self.zero.model.parameters()]\n"
            "        before = [param.detach().clone() for param in params]\n        optimizer.step()\n"
            "        if self.overflow:\n            with torch.no_grad():\n"
            "                torch._foreach_copy_(params, before)",
        ),
        (
            "the weights were put back, but the optimizer's own averages have seen the overflow: do not call "
            "optimizer.step() at all"
        ),
    ),
    "divides a second time": Mistake(
        edit(SCALER, "grad /= self.factor", "grad /= self.factor**2"),
        TWICE,
    ),
    "the weights looked at": Mistake(
        edit(
            SCALER,
            _FOUND,
            "",
            _REDUCE,
            "        if not all(to_local(param).isfinite().all() for param in self.zero.model.parameters()):\n"
            f"            found.fill_(1)\n{_REDUCE}",
        ),
        "the weights were looked at, which are finite until it is too late: look at the gradients, before the step",
    ),
    "NaN made finite first": Mistake(
        edit(SCALER, _FOUND, f"            grad.nan_to_num_()\n{_FOUND}"),
        CLAMPED,
    ),
    "unscales and makes no step": Mistake(
        edit(
            SCALER,
            "            self.unscale_(optimizer)\n",
            "            self.unscale_(optimizer)\n            return\n",
        ),
        "step() must call optimizer.step() when all gradients are finite",
    ),
}

# A gradient of its own in float32 for each parameter; the flag goes by the engine's group.
SCALER_BY_ASSIGNMENT = edit(
    SCALER,
    _UNSCALES,
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
    _UNSCALES,
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

MISTAKES = {"08.1": SCALER_MISTAKES}
