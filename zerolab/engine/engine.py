"""The engine: a model, cut into units, whose forward, backward and optimizer's step call the stage's methods.

Each stage's behaviour is in ddp.py, zero1.py, zero2.py and zero3.py. Each phase has a room of its own, with the state
that it alone changes; stage.py is what they all know of the engine:

    partition.py      once: from a model to units
    forward.py        around every call of a module
    backward.py       from the first gradient until autograd has finished
    step.py           around the optimizer's step
    full.py           between them: the full model, to look at, edit, save or load
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from zerolab.comm.collectives import Comm
from zerolab.comm.groups import checked_mesh
from zerolab.engine.backward import Backward
from zerolab.engine.blockwise import refuse_disorder
from zerolab.engine.clip import clip_to_norm
from zerolab.engine.forward import Forward
from zerolab.engine.full import FullModel, refuse_copy
from zerolab.engine.partition import Init, Part, Structure, UnitClasses, agree_on_parts, device_of, materialise
from zerolab.engine.precision import KEEP, Precision
from zerolab.engine.prefetch import Prefetcher
from zerolab.engine.shown import ShownParameter, replaced
from zerolab.engine.slices import plainly
from zerolab.engine.stage import Stage
from zerolab.engine.step import Owner, Step, mark
from zerolab.engine.unit import Unit


class Engine(Stage):
    """Base of the four stages; the contract is in their docstrings.

    model: an `nn.Module`, sharded in place. It keeps its class and the names of its parameters.
    units: module classes that become one unit each; what is left over is the root unit. Default: the blocks that
        repeat in the model, or else its largest modules of at most 25 MB.
    precision: a `Precision`; default: everything in the parameters' own dtype.
    group: the process group to share the work with; default: the world.
    mesh: (replicas, ranks that share one), in stages 1 to 3, for the whole world. Neighbours, in a node say, form a
        shard group, and each replica holds every shard. Gathers stay inside a replica, and only the means of shards
        travel between replicas (hybrid sharding; Zhao et al., arXiv 2304.11277, section 3.2.2).
    offload: "optimizer", in stages 1 to 3: masters, gradients and the optimizer's state stay on the host, and the
        optimizer works there (Ren et al., "ZeRO-Offload", arXiv 2101.06840). The device keeps what forward needs.
    granularity: in stages 1 to 3, every rank's slice of a parameter starts at a multiple of this many of its elements,
        for optimizers that treat blocks of elements together: see `declare_blockwise`. It costs padding: a parameter
        less than this many elements, a unit less than this many for each rank.
    init: for a model on the meta device. It is called with every module that has parameters or buffers of its own,
        once they have (uninitialised) memory, to give them values; for example `lambda m: m.reset_parameters()`.

    The group's first rank decides the values: its parameters and buffers are broadcast.
    Raises `ValueError`, on every rank alike, if some rank was given something that cannot be sharded, and `CommError`
    if the ranks do not agree on the model.
    """

    def __init__(
        self,
        model: nn.Module,
        units: UnitClasses = None,
        precision: Precision | None = None,
        group: dist.ProcessGroup | None = None,
        init: Init = None,
        offload: str | None = None,
        mesh: tuple[int, int] | None = None,
        granularity: int = 1,
    ) -> None:
        if offload not in (None, "optimizer") or (offload and self.stage == 0):
            raise ValueError(f'offload={offload!r} in stage {self.stage}: "optimizer" or None; stage 0 has no offload')
        if not isinstance(granularity, int) or granularity < 1:
            raise ValueError(f"granularity={granularity!r} must be a number of elements, at least 1")
        self.model = model
        self.granularity = granularity
        self.offload = offload is not None
        self.precision = precision or KEEP
        self.comm = Comm(group, device_of(model), checked_mesh(mesh, group, self.stage))
        self.comm.progress.stage = self.stage
        self.rank, self.world_size = self.comm.rank, self.comm.world_size

        settings = [type(self).__name__, str(self.precision), f"offload={offload}", f"granularity={granularity}"]
        parts = agree_on_parts(model, units, self.comm, init is not None, settings)
        refuse_disorder((pair for part in parts for pair in part.named), granularity)
        kinds = [KEEP if part.batch_norm else self.precision for part in parts]
        dtypes = [kind.dtypes(part.dtype, part.trainable) for kind, part in zip(kinds, parts, strict=True)]
        self.units = [
            Unit(part.name, part.named, part.sites, three, self.comm, self.offload and part.trainable, granularity)
            for part, three in zip(parts, dtypes, strict=True)
        ]
        self.root = [unit for unit, part in zip(self.units, parts, strict=True) if part.module is model]
        self.stale = deque()
        self.prefetcher = Prefetcher(self.root)
        self.listeners = {}

        self._structure = Structure(model, self.units, self.rank)
        self._step = Step(self)
        self._backward = Backward(self, self._step)
        self._forward = Forward(self, self.precision, self._step, self._backward, self._structure)
        self.is_idle, self.check_grads_final = self._forward.is_idle, self._backward.check_grads_final
        self.enter_optimizer, self.pause_optimizer = self._step.enter, self._step.pause
        self.leave_optimizer, self.after_optimizer = self._step.leave, self._step.end
        self.note_numbers = self._step.hyperparameters.note
        self.full_model = FullModel(self, self._forward, self._backward, self._structure)

        for unit, part in zip(self.units, parts, strict=True):
            self._fill(unit, part, init)
        materialise(model.modules(), init, self.comm.device)  # modules that hold only buffers
        self.broadcast_buffers()
        self._forward.install({id(part.module) for part in parts} | {id(model)})
        self.full_model.refuse_elsewhere()

    @torch.no_grad()
    def _fill(self, unit: Unit, part: Part, init: Init) -> None:
        """Make the storages of one unit, and let its original parameters go before the next unit's turn."""
        device, trainable = self.comm.device, [param.requires_grad for _, param in part.named]
        materialise([module for sites in unit.sites for module, _ in sites], init, device)
        unit.fill([module.get_parameter(name) for module, name in (sites[0] for sites in unit.sites)], device)
        unit.adopt(self.optimizer_params(unit), trainable, self._backward.on_gradient)
        owner = Owner(self, unit)
        every = zip(part.named, unit.params, unit.full_params, unit.layout.slots, strict=True)
        for (name, original), param, full_param, slot in every:
            mark(original, full_param, param, name, owner)
            if isinstance(param, ShownParameter):
                param.belong(self, original, unit.layout, slot)
            replaced(original, name)
        part.named.clear()

    __reduce_ex__ = refuse_copy

    # -- for users -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up this rank's gradients; the next backward outside reduces the sum.

        Saves the traffic of every micro-batch but the last. Meanwhile full gradients are held, in every stage.
        """
        before, self._backward.sync = self._backward.sync, False
        try:
            yield
        finally:
            self._backward.sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`. Returns the norm before, on every rank.

        norm_type: p of the p-norm, greater than 0, or inf. Stages 1 to 3 all-reduce one number, stage 0 nothing.
        The norm is float64 if a gradient is, else float32.
        """
        self.promote_grads(self.units)
        self.note_numbers("clip_grad_norm_", [max_norm, norm_type])
        with plainly():  # gradients as they are: this one knows of the other ranks
            return clip_to_norm(self, max_norm, norm_type)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, the model shows full parameters in the masters' dtype, on every rank, to look at or edit.

        The first rank's edits are kept, on all ranks; after an error inside, none are. A parameter may be replaced, by
        `.data = ...`, another `nn.Parameter` or `load_state_dict(assign=True)`, if shape and dtype stay. All ranks must
        take part. The model may be called inside, but not trained.

        Raises `RuntimeError` on every rank, and keeps no edit, if one has replaced a parameter by anything else.
        """
        return self.full_model.editing()

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """The `state_dict` of the unsharded model, on the CPU, in the masters' dtype. All ranks must take part.

        rank0_only: the group's first rank gets it, the others an empty dict. Buffers are the first rank's.
        Gathers unit by unit, so a rank holds one full unit besides the result.
        """
        return self.full_model.gather_state_dict(rank0_only)

    def load_full_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Load the `state_dict` of an unsharded model. The first rank's counts; the others may pass None.

        Raises `ValueError` on every rank, before anything is changed, if names are missing or unexpected or shapes
        differ, and `RuntimeError` if a module's `set_extra_state()` fails.
        """
        self.full_model.spread_state_dict(state)

    def broadcast_buffers(self) -> None:
        """Give every rank the first rank's buffers: BatchNorm's running statistics, for instance.

        Each rank's batches leave it statistics of its own. Call this before a validation whose result must not depend
        on the rank; `full_state_dict()` has the first rank's in any case. On GPUs, `nn.SyncBatchNorm.
        convert_sync_batchnorm(model)` before sharding keeps them equal in every forward; torch has none for the CPU.
        """
        for name, buffer in self.model.named_buffers():
            self.comm.broadcast(buffer, name)

    def register_forward_method(self, name: str) -> None:
        """Let `model.<name>(...)`, "generate" for instance, see full parameters, as calling the model does."""
        method = getattr(self.model, name, None)
        if not callable(method):
            raise ValueError(f"{type(self.model).__name__} has no method {name!r}")
        setattr(self.model, name, self._forward.as_forward(method))

    # -- for the other rooms ---------------------------------------------------------------------------------------

    def promote_grads(self, units: list[Unit]) -> None:
        """Show gradients, which must be final, in the dtype of the masters."""
        self.check_grads_final(units)
        with plainly():
            for unit in units:
                unit.bucket.promote()

    def before_optimizer(self, optimizer: Optimizer, units: list[Unit]) -> None:
        """`optimizer` is about to update `units`."""
        self._forward.forget_calls()
        self._structure.check()
        self.check_grads_final(units)
        self._step.begin(optimizer, units)
