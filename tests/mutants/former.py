"""Right answers in the engine's former names, as learners wrote them before the names changed."""

from __future__ import annotations

FORMER = {
    "03.3": """\
import torch.distributed as dist
import zerolab


class MyDDP(zerolab.DDP):
    def post_backward(self, unit):
        if self.reduces(unit):
            assert unit.bucket.complete
            unit.bucket.reduction = self.reduce(unit)

    def reduce(self, unit):
        views = unit.layout.views(unit.bucket.full)
        assert [view.shape for view in views] == [whole.shape for whole in unit.full_params]
        for view in views:
            view /= self.world_size
        unit.bucket.grad = unit.bucket.full
        return dist.all_reduce(unit.bucket.grad, group=self.comm.group, async_op=True)
""",
    "04.2": """\
import zerolab


class MyZero1(zerolab.DDP):
    stage = 1

    def optimizer_params(self, unit):
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def reduce(self, unit):
        unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)
        return self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)

    def after_step(self, unit):
        self.comm.all_gather(unit.full, unit.master.to(unit.full.dtype), unit.name).wait()
""",
    "05.1": """\
import zerolab


class MyZero2(zerolab.Zero1):
    stage = 2

    def post_backward(self, unit):
        super().post_backward(unit)
        if unit.bucket.reduction is not None:
            unit.bucket.release()
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
        unit.full.untyped_storage().resize_(0)
        unit.gathered = False
        return unit.layout.slices(unit.keep_shard(), self.rank)

    def pre_forward(self, unit):
        unit.gather()
        unit.show_full()

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
            unit.bucket.grad = unit.layout.shard(unit.bucket.full, self.rank)
            unit.bucket.reduction = self.comm.reduce_scatter(unit.bucket.grad, unit.bucket.full, unit.name)
        unit.bucket.release()

    def after_step(self, unit):
        if unit.full.untyped_storage().size():
            unit.release()
""",
}
