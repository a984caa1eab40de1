"""Below the hooks: what the engine calls of a stage, and what a stage may use of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zerolab.comm.collectives import Comm
from zerolab.engine.prefetch import Prefetcher
from zerolab.engine.shown import ShownParameter
from zerolab.engine.unit import Unit


class Stage:
    """A sharded model. The phases (forward.py, backward.py, step.py) know the engine as this."""

    stage: int
    prefetch = True  # gather the next unit while one computes; False: not before it is needed
    overlap = True  # reduce a unit's gradients while backward computes the next; False: wait for each reduction
    keep_grad_memory = False  # True: in stages 0 and 1, memory that zero_grad() frees is kept for the next backward

    model: nn.Module
    comm: Comm
    rank: int
    world_size: int
    units: list[Unit]
    root: list[Unit]  # those of what `units=` left over
    plain = False  # True while an optimizer works on parameters and gradients as they are
    stale: deque[Unit]  # units whose full parameters are old, in the order of their gathers
    prefetcher: Prefetcher
    listeners: dict[int, ShownParameter]  # parameters with hooks of the user's

    # The override points, which ddp.py, zero1.py, zero2.py and zero3.py define. ddp.py says when each is called.
    optimizer_params: Callable[[Unit], list[Tensor]]
    pre_forward: Callable[[Unit], None]
    post_forward: Callable[[Unit], None]
    pre_backward: Callable[[Unit], None]
    post_backward: Callable[[Unit], None]
    # Average `unit.bucket.full` over the ranks. The mean goes to `unit.bucket.grad`, laid out as `unit.master`.
    # Returns None if the mean is there, or something whose `wait()` returns once it is there.
    reduce: Callable[[Unit], Any]
    after_step: Callable[[Unit], None]

    def reduces(self, unit: Unit) -> bool:
        """Whether it is the turn of `unit` to be reduced: not under no_sync, and not if it is frozen."""
        return unit.bucket.complete

    def gather_stale(self, until: Unit | None = None) -> None:
        """Gather the units in `stale`, in order, up to `until` or all of them."""
        while self.stale and (until is None or not until.gathered):
            self.stale.popleft().gather()
        if self.stale and self.prefetch:  # the next one is on its way while `until` computes
            self.stale[0].start_gather()

    def gather(self, unit: Unit) -> None:
        """Gather `unit`, and start on the one that will be needed next."""
        self.prefetcher.visit(unit)
        unit.gather()
        self.prefetch_next()

    def prefetch_next(self) -> None:
        """Start to gather the unit that will be needed next, if that is known and there is room."""
        if self.prefetch:
            self.prefetcher.start_next()

    def master_changed(self, unit: Unit) -> None:
        """The optimizer, or somebody else, has written new values into the masters of `unit`."""
        unit.follow_master()
        self.after_step(unit)  # which may gather at once, into what the master is a view of
        unit.mark_followed()

    def notice_edits(self) -> None:
        """What was written into masters since we last looked."""
        for unit in self.units:
            if unit.changes != unit.version:
                self.master_changed(unit)
