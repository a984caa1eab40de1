"""Lesson 07: other right answers, and known mistakes with what a learner is told."""

from __future__ import annotations

from zerolab.lab.exercises.mistakes import Mistake, edit
from zerolab.lab.lessons.lesson06.mistakes import GATHER_BY_HAND
from zerolab.lab.lessons.lesson07 import BACKWARD

BACKWARD_BY_HAND = """\
from zerolab import Zero2


class MyZero3(Zero2):
    def pre_backward(self, unit):
        if not unit.gathered:
            unit.start_gather()
            unit.gather()

    def post_backward(self, unit):
        unit.release()
        if self.reduces(unit):
            unit.bucket.reduction = self.reduce(unit)
        unit.bucket.release()

    def after_step(self, unit):
        if unit.full.untyped_storage().size():
            unit.release()
"""

BACKWARD_PREFETCHED = """\
from zerolab import Zero2


class MyZero3(Zero2):
    def pre_backward(self, unit):
        unit.gather()
        blocks = [each for each in self.units if each not in self.root]
        if unit in blocks and (place := blocks.index(unit)) > 0:
            blocks[place - 1].start_gather()

    def post_backward(self, unit):
        unit.release()
        Zero2.post_backward(self, unit)

    def after_step(self, unit):
        self.stale.clear()
        unit.release()
"""

BACKWARD_GATHERS = edit(
    BACKWARD,
    "        unit.gather()\n",
    GATHER_BY_HAND,
    "import zerolab\n",
    "import torch\nimport zerolab\n",
)

_PRE = "    def pre_backward(self, unit: Unit) -> None:\n        unit.gather()\n"

_POST = "        unit.release()\n        super().post_backward(unit)\n"

_AFTER = "    def after_step(self, unit: Unit) -> None:\n        unit.release()\n"

BACKWARD_MISTAKES = {
    "does not gather again": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "pass")),
        (
            "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also "
            "in eval mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of "
            "size 0)"
        ),
    ),
    "gathers the root only": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.root]")),
        (
            "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also "
            "in eval mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of "
            "size 0)"
        ),
    ),
    "releases too early": Mistake(
        edit(BACKWARD, _PRE, _PRE + "        unit.release()\n"),
        ("it was gathered, and pre_backward() released it: backward needs it now (gather() keeps what is there)"),
    ),
    "pre_backward lets go": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("gather", "release")),
        ("it was gathered, and pre_backward() released it: backward needs it now (gather() keeps what is there)"),
    ),
    "gathers all at the start": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.units]")),
        ("all units are gathered at once, so all Ψ parameters are in memory: gather only the unit that runs now"),
    ),
    "never releases": Mistake(
        edit(BACKWARD, _POST, "        super().post_backward(unit)\n"),
        "post_backward() does not release the full parameters, which backward no longer needs",
    ),
    "releases after the reduction": Mistake(
        edit(BACKWARD, _POST, "        super().post_backward(unit)\n        unit.release()\n"),
        ("released after the reduction started, so both need memory at once: first unit.release(), then super()"),
    ),
    "keeps the root": Mistake(
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        unit in self.root or unit.release()\n        super",
        ),
        "the root stays from its forward to its reduction, and no longer: post_backward() must release it too",
    ),
    "releases only what is reduced": Mistake(
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        self.reduces(unit) and unit.release()\n        super",
        ),
        "post_backward() also runs when nothing is reduced (no_sync, frozen units): release then too",
    ),
    "does not reduce": Mistake(
        edit(BACKWARD, "        super().post_backward(unit)\n", ""),
        "nothing was reduced: super().post_backward(unit) is missing",
    ),
    "keeps the full gradient": Mistake(
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.reduction = self.reduce(unit)",
        ),
        "the full gradient is kept: super().post_backward(unit) reduces it and keeps only this rank's slice",
    ),
    "gathers again when it is over": Mistake(
        edit(BACKWARD, _POST, _POST + "        unit.gather()\n"),
        "post_backward() does not release the full parameters, which backward no longer needs",
    ),
    "keeps what is old": Mistake(
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "pass")),
        (
            "the optimizer has changed the shards, so gathered parameters are out of date: after_step() must "
            "release them. (unit.gathered is False by then, but their memory is still there)"
        ),
    ),
    "gathers after the step": Mistake(
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "unit.gather()")),
        (
            "the optimizer has changed the shards, so gathered parameters are out of date: after_step() must "
            "release them. (unit.gathered is False by then, but their memory is still there)"
        ),
    ),
    "after the step as ZeRO-2": Mistake(
        edit(BACKWARD, _AFTER, _AFTER + "        super().after_step(unit)\n"),
        (
            "self.stale is ZeRO-2's, whose after_step() fills it: the next forward would begin by gathering all "
            "units in it. Here each is gathered when its turn comes, so unit.release() is all"
        ),
    ),
    "not the root": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if unit not in self.root:\n            unit.gather()")),
        (
            "after two forwards, the first backward releases it: pre_backward() must gather every unit, the root "
            "too (gather() does nothing if it is there)"
        ),
    ),
    "starts and does not wait": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("gather", "start_gather")),
        "started without waiting: start_gather() returns at once; gather() waits until the values are there",
    ),
    "releases every unit": Mistake(
        edit(BACKWARD, _POST, _POST.replace("unit.release()", "[each.release() for each in self.units]")),
        "Each call releases `unit` alone",
    ),
    "reduces inside no_sync": Mistake(
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if unit.bucket.full is not None:\n"
            "            unit.bucket.reduction = self.reduce(unit)\n"
            "            unit.bucket.release()",
        ),
        "no_sync() was ignored: reduce only if self.reduces(unit), as super().post_backward() does",
    ),
    "releases on rank 0": Mistake(
        edit(BACKWARD, _POST, _POST.replace("unit.release()", "self.rank or unit.release()")),
        "post_backward() does not release the full parameters, which backward no longer needs",
    ),
    "releases what trains": Mistake(
        edit(
            BACKWARD,
            _POST,
            "        if unit.trainable:\n            unit.release()\n        super().post_backward(unit)\n",
        ),
        "post_backward() also runs when nothing is reduced (no_sync, frozen units): release then too",
    ),
    "gathers only in training": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if self.model.training:\n            unit.gather()")),
        (
            "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also "
            "in eval mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of "
            "size 0)"
        ),
    ),
    "gathers what trains": Mistake(
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if unit.trainable:\n            unit.gather()")),
        (
            "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also "
            "in eval mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of "
            "size 0)"
        ),
    ),
    "asks whether gradients are enabled": Mistake(
        edit(
            BACKWARD,
            _PRE,
            _PRE.replace("unit.gather()", "if torch.is_grad_enabled():\n            unit.gather()"),
            "import zerolab\n",
            "import torch\nimport zerolab\n",
        ),
        (
            "post_forward() released it, so pre_backward() must gather it again, always: also a frozen unit, also "
            "in eval mode, and although torch.is_grad_enabled() is False in backward (torch would say: storage of "
            "size 0)"
        ),
    ),
    "asks unit.gathered": Mistake(
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "if unit.gathered:\n            unit.release()")),
        (
            "the optimizer has changed the shards, so gathered parameters are out of date: after_step() must "
            "release them. (unit.gathered is False by then, but their memory is still there)"
        ),
    ),
    "all-reduces": Mistake(
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.reduction = zerolab.DDP.reduce(self, unit)\n"
            "        unit.bucket.release()",
        ),
        "gathered once more after its reduction, which makes an all-reduce of it: a rank needs only its shard",
    ),
    "averages twice": Mistake(
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.full /= self.world_size\n"
            "        super().post_backward(unit)",
        ),
        (
            "units come and go as they should, so it is the gradient: super().post_backward(unit) takes the mean "
            "of unit.bucket.full as backward has left it"
        ),
    ),
    "unit.full is None": Mistake(
        edit(BACKWARD, _POST, _POST.replace("unit.release()", "unit.full = None")),
        ("unit.full, unit.shard and unit.master stay tensors: unit.release() lets the memory go, and keeps the tensor"),
    ),
    "reduces twice": Mistake(
        edit(
            BACKWARD, "super().post_backward(unit)", "super().post_backward(unit)\n        super().post_backward(unit)"
        ),
        "unit.bucket.full is gone, it was reduced before: post_backward() must reduce a unit once",
    ),
    "gathers from all processes": Mistake(
        edit(BACKWARD_GATHERS, ", group=self.comm.group", ""),
        (
            "dist.all_gather() talks to all processes, and only some of them share this model: pass "
            "group=self.comm.group"
        ),
    ),
    "as many shards as processes": Mistake(
        edit(BACKWARD_GATHERS, "self.world_size", "torch.distributed.get_world_size()"),
        (
            "all processes are counted by dist.get_world_size(), and only some of them share this model: "
            "self.rank, self.world_size"
        ),
    ),
    "nothing of its own": Mistake(
        "import zerolab\n\n\nclass MyZero3(zerolab.Zero3):\n    pass\n",
        "the class inherits pre_backward(): write your own",
    ),
}

RIGHT = {
    "07.1": (BACKWARD_BY_HAND, BACKWARD_PREFETCHED, BACKWARD_GATHERS),
}

MISTAKES = {
    "07.1": BACKWARD_MISTAKES,
}
