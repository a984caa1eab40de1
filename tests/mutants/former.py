"""Right answers in the engine's former names, as learners wrote them before the names changed."""

from __future__ import annotations

FORMER = {
    "03.3": """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            assert unit.complete
            unit.reduction = self.reduce(unit)

    def reduce(self, unit):
        views = unit.layout.wholes(unit.whole_grad)
        assert [view.shape for view in views] == [whole.shape for whole in unit.wholes]
        for view in views:
            view /= self.world_size
        unit.grad = unit.whole_grad
        return dist.all_reduce(unit.grad, group=self.comm.group, async_op=True)
""",
    "04.2": """\
import zerolab


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit):
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit):
        unit.grad = unit.layout.shard(unit.whole_grad, self.rank)
        return self.comm.reduce_scatter(unit.grad, unit.whole_grad, unit.name)

    def after_step(self, unit):
        self.comm.all_gather(unit.whole, unit.master.to(unit.whole.dtype), unit.name).wait()
""",
    "05.1": """\
import zerolab


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit):
        super().post_backward(unit)
        if unit.reduction is not None:
            unit.release_grad()
""",
    "06.1": """\
import torch.distributed as dist


def release(whole):
    whole.untyped_storage().resize_(0)


def gather(whole, shard):
    whole.untyped_storage().resize_(whole.nbytes)
    dist.all_gather(list(whole.chunk(dist.get_world_size())), shard)
""",
    "06.2": """\
import torch
import zerolab


class MyZero3Forward(zerolab.Zero2):
    def optimizer_params(self, unit):
        unit.shard = unit.shard.clone()
        unit.whole.untyped_storage().resize_(0)
        unit.gathered = False
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def pre_forward(self, unit):
        unit.gather()
        unit.show_whole()

    def post_forward(self, unit):
        if unit not in self.root or not torch.is_grad_enabled():
            unit.release()
""",
    "07.1": """\
import zerolab


class MyZero3(zerolab.Zero2):
    def pre_backward(self, unit):
        unit.gather()

    def post_backward(self, unit):
        unit.release()
        if self.reduces(unit):
            unit.grad = unit.layout.shard(unit.whole_grad, self.rank)
            unit.reduction = self.comm.reduce_scatter(unit.grad, unit.whole_grad, unit.name)
        unit.release_grad()

    def after_step(self, unit):
        if unit.whole.untyped_storage().size():
            unit.release()
""",
}
