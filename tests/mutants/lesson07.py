"""Lesson 07: other right answers, and the mistakes that the checks must name."""

from __future__ import annotations

from zerolab.lab.exercises.checks.lesson07 import BACKWARD

from .lesson06 import GATHER_BY_HAND
from .sources import edit

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

BACKWARD_MUTANTS = {
    "does not gather again": (edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "pass")), "must gather it again"),
    "gathers the root only": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.root]")),
        "must gather it again",
    ),
    "releases too early": (edit(BACKWARD, _PRE, _PRE + "        unit.release()\n"), "pre_backward() released it"),
    "pre_backward lets go": (
        edit(BACKWARD, _PRE, _PRE.replace("gather", "release")),
        "pre_backward() released it",
    ),
    "gathers all at the start": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "[each.gather() for each in self.units]")),
        "all units are gathered at once",
    ),
    "never releases": (
        edit(BACKWARD, _POST, "        super().post_backward(unit)\n"),
        "does not release the full parameters",
    ),
    "releases after the reduction": (
        edit(BACKWARD, _POST, "        super().post_backward(unit)\n        unit.release()\n"),
        "first unit.release()",
    ),
    "keeps the root": (
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        unit in self.root or unit.release()\n        super",
        ),
        "the root stays from its forward to its reduction, and no longer",
    ),
    "releases only what is reduced": (
        edit(
            BACKWARD,
            "        unit.release()\n        super",
            "        self.reduces(unit) and unit.release()\n        super",
        ),
        "when nothing is reduced",
    ),
    "does not reduce": (
        edit(BACKWARD, "        super().post_backward(unit)\n", ""),
        "super().post_backward(unit) is missing",
    ),
    "keeps the full gradient": (
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.reduction = self.reduce(unit)",
        ),
        "the full gradient is kept",
    ),
    "gathers again when it is over": (
        edit(BACKWARD, _POST, _POST + "        unit.gather()\n"),
        "does not release the full parameters",
    ),
    "keeps what is old": (edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "pass")), "are out of date"),
    "gathers after the step": (
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "unit.gather()")),
        "after_step() must release them",
    ),
    "after the step as ZeRO-2": (
        edit(BACKWARD, _AFTER, _AFTER + "        super().after_step(unit)\n"),
        "the next forward would begin by gathering",
    ),
    "not the root": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if unit not in self.root:\n            unit.gather()")),
        "after two forwards",
    ),
    "starts and does not wait": (
        edit(BACKWARD, _PRE, _PRE.replace("gather", "start_gather")),
        "started without waiting",
    ),
    "releases every unit": (
        edit(BACKWARD, _POST, _POST.replace("unit.release()", "[each.release() for each in self.units]")),
        "Each call releases `unit` alone",
    ),
    "reduces inside no_sync": (
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if unit.bucket.full is not None:\n"
            "            unit.bucket.reduction = self.reduce(unit)\n"
            "            unit.bucket.release()",
        ),
        "no_sync() was ignored",
    ),
    "releases on rank 0": (
        edit(BACKWARD, _POST, _POST.replace("unit.release()", "self.rank or unit.release()")),
        "does not release the full parameters",
    ),
    "releases what trains": (
        edit(
            BACKWARD,
            _POST,
            "        if unit.trainable:\n            unit.release()\n        super().post_backward(unit)\n",
        ),
        "when nothing is reduced",
    ),
    "gathers only in training": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if self.model.training:\n            unit.gather()")),
        "also in eval mode",
    ),
    "gathers what trains": (
        edit(BACKWARD, _PRE, _PRE.replace("unit.gather()", "if unit.trainable:\n            unit.gather()")),
        "also a frozen unit",
    ),
    "asks whether gradients are enabled": (
        edit(
            BACKWARD,
            _PRE,
            _PRE.replace("unit.gather()", "if torch.is_grad_enabled():\n            unit.gather()"),
            "import zerolab\n",
            "import torch\nimport zerolab\n",
        ),
        "is False in backward",
    ),
    "asks unit.gathered": (
        edit(BACKWARD, _AFTER, _AFTER.replace("unit.release()", "if unit.gathered:\n            unit.release()")),
        "their memory is still there",
    ),
    "all-reduces": (
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.reduction = zerolab.DDP.reduce(self, unit)\n"
            "        unit.bucket.release()",
        ),
        "makes an all-reduce of it",
    ),
    "averages twice": (
        edit(
            BACKWARD,
            "super().post_backward(unit)",
            "if self.reduces(unit):\n            unit.bucket.full /= self.world_size\n"
            "        super().post_backward(unit)",
        ),
        "as backward has left it",
    ),
    "unit.full is None": (edit(BACKWARD, _POST, _POST.replace("unit.release()", "unit.full = None")), "stay tensors"),
    "reduces twice": (
        edit(
            BACKWARD, "super().post_backward(unit)", "super().post_backward(unit)\n        super().post_backward(unit)"
        ),
        "must reduce a unit once",
    ),
    "gathers from all processes": (edit(BACKWARD_GATHERS, ", group=self.comm.group", ""), "talks to all processes"),
    "as many shards as processes": (
        edit(BACKWARD_GATHERS, "self.world_size", "torch.distributed.get_world_size()"),
        "all processes are counted by dist.get_world_size()",
    ),
    "nothing of its own": ("import zerolab\n\n\nclass MyZero3(zerolab.Zero3):\n    pass\n", "write your own"),
}

RIGHT = {
    "07.1": (BACKWARD_BY_HAND, BACKWARD_PREFETCHED, BACKWARD_GATHERS),
}

WRONG = {
    "07.1": BACKWARD_MUTANTS,
}
