"""An exponential moving average (EMA) of a sharded model's parameters (Polyak and Juditsky, 1992).

    ema = zerolab.EMA(zero, decay=0.999)
    for x, y in loader:
        ...
        optimizer.step()
        ema.update()
    with ema.average_parameters():        # the model computes with the averages
        evaluate(model)

It is taken element by element. So a rank averages its shard of the masters, and an update moves nothing. With fp32
masters that is 4Ψ/N bytes in stages 1 to 3 and 4Ψ in stage 0, and as much again inside `average_parameters()`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from zerolab.comm.native import each_once
from zerolab.comm.waiting import CommError
from zerolab.engine.engine import Engine
from zerolab.engine.step import averaged
from zerolab.engine.unit import Unit


class EMA:
    """average = decay * average + (1 - decay) * parameter, for each parameter of a sharded model, also a frozen one.

    zero: the sharded model. decay: from 0 to less than 1. It may be set before any update, alike on all ranks; to warm
    up, `ema.decay = min(0.999, (1 + ema.updates) / (10 + ema.updates))`.

    The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`. So the first
    update copies the parameters: their initial values leave no trace. The averages have the dtype of the masters and
    lie where they do. Buffers are not averaged.

    `zerolab.save(..., ema=ema)` and `zerolab.load(..., ema=ema)` fit any stage and number of ranks.
    """

    def __init__(self, zero: Engine, decay: float = 0.999) -> None:
        if not isinstance(zero, Engine):
            raise TypeError(
                f"EMA takes what Zero3(model) or another stage returned, not a {type(zero).__name__}; a model that is "
                "not sharded has torch.optim.swa_utils.AveragedModel"
            )
        self.zero, self.decay = zero, decay
        self.updates = 0
        self._decays = 0  # a checksum of those so far
        self._check_decay()
        self.averages = {unit: unit.master.detach().clone() for unit in zero.units}  # laid out as the masters

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as they are now. Call it on all ranks, after each step of the optimizer."""
        self._check_decay()
        self._check_rest("update()", self.zero.units)
        for unit, average in self.averages.items():
            if self.updates and (average.is_floating_point() or average.is_complex()):
                average.lerp_(unit.master, 1 - self.decay)
            else:  # the first time; and integers, which nothing trains
                average.copy_(unit.master)
        self.updates += 1
        self._decays = zlib.crc32(repr(self.decay).encode(), self._decays)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Inside, the model has the averages for parameters, in every stage and precision. All ranks must take part.

        Afterwards, also after an error, parameters and buffers are what they were, bit for bit: what is written into
        them inside is lost. There are no steps and no checkpoints inside. `zerolab.export_weights(path, zero)` writes
        the averages there.
        """
        zero, name = self.zero, "average_parameters()"
        self._check_rest(name, [])
        zero.comm.phase = "average_parameters"
        if problem := difference(zero.comm.exchange(self.progress(), f"start of {name}")):
            raise CommError(problem)
        trained = {unit: unit.master.detach().clone() for unit in zero.units}
        buffers = [
            (m, k, b, each_once(b).clone())
            for m in zero.model.modules()
            for k, b in m._buffers.items()
            if b is not None
        ]
        averaged.add(zero)
        try:
            self._write(self.averages)
            yield
            zero.comm.phase = "average_parameters"
            zero.comm.exchange_bytes(b"", f"end of {name}")
        finally:
            averaged.discard(zero)
            self._write(trained)
            with torch.no_grad():
                for module, key, buffer, before in buffers:
                    each_once(buffer).copy_(before)
                    module._buffers[key] = buffer

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """`zero.full_state_dict()` with the averages; buffers are the model's. All ranks must take part."""
        with self.average_parameters():
            return self.zero.full_state_dict(rank0_only)

    # -- for checkpoint/ -----------------------------------------------------------------------------------------

    def progress(self) -> list[Any]:
        """What all ranks must have alike: see `difference`."""
        return [self.updates, self.decay, self._decays]

    def parts(self) -> list[Tensor]:
        """The average of each parameter, unit by unit, in the shape that the model shows: a slice in stages 1 to 3."""
        return [part for unit, average in self.averages.items() for part in unit.parts(average)]

    def resume(self, updates: int) -> None:
        """The averages were loaded, after so many updates."""
        self.updates, self._decays = updates, 0

    # -- the masters, which are at rest --------------------------------------------------------------------------

    @torch.no_grad()
    def _write(self, values: dict[Unit, Tensor]) -> None:
        for unit, value in values.items():
            unit.master.copy_(value)
        for unit in values:
            self.zero.master_changed(unit)
            unit.show(unit.params)  # a backward that broke off may have left the full ones, which are old now

    def _check_decay(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"decay={self.decay}: from 0 to less than 1")

    def _check_rest(self, what: str, final: list[Unit]) -> None:
        """Raises `RuntimeError` unless the masters are the trained ones, at rest, with the gradients of `final`."""
        if self.zero in averaged or not self.zero.is_idle():
            where = "average_parameters()" if self.zero in averaged else "forward, backward or full_parameters()"
            raise RuntimeError(f"rank {self.zero.rank}: {what} of an EMA was called inside {where}")
        self.zero.check_grads_final(final)


def difference(everyone: list[list[Any] | None]) -> str | None:
    """Where the averages are not alike, by every rank's `progress()` (None: it has none)."""
    for rank, one in enumerate(everyone):
        if one != everyone[0]:
            has = [f"one after {p[0]} updates, with decay {p[1]}" if p else "none" for p in (everyone[0], one)]
            alike = "make, update and save it on all ranks alike, with the same decays"
            return f"the EMAs differ: rank 0 has {has[0]}, rank {rank} has {has[1]}; {alike}"
    return None
