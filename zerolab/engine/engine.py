"""The engine: splits a model into units, hooks itself into forward, backward and the optimizer's step, and calls the
stage's methods. Each stage's behaviour is in ddp.py, zero1.py, zero2.py and zero3.py.

One step, in the order of the hooks:

    forward of the model          _enter: drop what an interrupted backward left, cast the inputs
      forward of a unit's module  _enter: pre_forward, show the full parameters
                                  _leave: show the optimizer's parameters, post_forward
    backward                      _begin_backward, once: have autograd call _end_backward
      gradient at its outputs     _pre_backward: pre_backward, show the full parameters
      gradient of a parameter     _on_gradient: put it into the unit's bucket
      backward has passed it      _on_passed: the unit waits for its turn, which is the same on every rank;
                                  then post_backward, which reduces
    end of backward               _end_backward: the remaining turns; what was used on any rank; show gradients
    optimizer.step()              before_step: float32 gradients; after_step: the stage's after_step
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from zerolab.comm.collectives import Comm
from zerolab.comm.waiting import CommError
from zerolab.engine import full, step
from zerolab.engine.backward import Backward, ForwardCall
from zerolab.engine.clip import clip_to_norm
from zerolab.engine.hyperparameters import DIGEST, Hyperparameters
from zerolab.engine.partition import Part, agree_on_parts, modules_within, units_needed
from zerolab.engine.precision import KEEP, Precision
from zerolab.engine.prefetch import Prefetcher
from zerolab.engine.pytree import cast_floats, detached_from, grad_tensors, kept_by_modules
from zerolab.engine.shown import ShownParameter, become_plain, become_shown
from zerolab.engine.slices import plainly
from zerolab.engine.structure import Structure
from zerolab.engine.unit import Unit

USED, TRAINABLE, LATE = 1, 2, 4  # the bits that ranks exchange about each parameter after a backward


class Engine:
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
    init: for a model on the meta device. It is called with every module that has parameters or buffers of its own,
        once they have (uninitialised) memory, to give them values; for example `lambda m: m.reset_parameters()`.

    The group's first rank decides the values: its parameters and buffers are broadcast.
    Raises `ValueError`, on every rank alike, if some rank was given something that cannot be sharded, and `CommError`
    if the ranks do not agree on the model.
    """

    stage: int
    prefetch = True  # gather the next unit while one computes; False: not before it is needed
    overlap = True  # reduce a unit's gradients while backward computes the next; False: wait for each reduction
    keep_grad_memory = False  # True: in stages 0 and 1, memory that zero_grad() frees is kept for the next backward

    def __init__(
        self,
        model: nn.Module,
        units: Iterable[type[nn.Module]] | type[nn.Module] | None = None,
        precision: Precision | None = None,
        group: dist.ProcessGroup | None = None,
        init: Callable[[nn.Module], Any] | None = None,
        offload: str | None = None,
        mesh: tuple[int, int] | None = None,
    ) -> None:
        if offload not in (None, "optimizer") or (offload and self.stage == 0):
            raise ValueError(f'offload={offload!r} in stage {self.stage}: "optimizer" or None; stage 0 has no offload')
        self.model = model
        self.offload = offload is not None
        self.precision = precision or KEEP
        self.comm = Comm(group, _device_of(model), _checked_mesh(mesh, group, self.stage))
        self.comm.progress.stage = self.stage
        self.rank, self.world_size = self.comm.rank, self.comm.world_size

        self.stale: deque[Unit] = deque()  # units whose full parameters are old, in the order of their gathers
        self.bypassed = False  # inside full_parameters(): modules hold plain full parameters
        self.in_backward = False  # from the first gradient to the end of backward, or until a broken one is dropped
        self._sync = True  # False inside no_sync()
        self._reduces = False  # whether the backward that began last did so outside no_sync()
        self._depth = 0  # how many hooked calls are under way
        self._outermost: Any = None  # the frame of the first of them
        self._training = False  # whether that one began with gradients enabled
        self.listeners: dict[int, ShownParameter] = {}  # parameters with hooks of the user's
        self._versions: dict[Unit, int] = {}  # of the full parameters as a forward began
        self._held: list[Unit] = []  # units that stay gathered until backward ends
        self._reducing: deque[Unit] = deque()  # units whose reduction is under way
        self._step_frame: Any = None  # of optimizer.step(), inside of it
        self.plain = False  # while an optimizer works on parameters and gradients as they are
        self._stepped = False  # since the last forward
        self.hyperparameters = Hyperparameters(self.comm)

        settings = [type(self).__name__, str(self.precision), f"offload={offload}"]
        parts = agree_on_parts(model, units, self.comm, init is not None, settings)
        kinds = [KEEP if part.batch_norm else self.precision for part in parts]
        dtypes = [kind.dtypes(part.dtype, part.trainable) for kind, part in zip(kinds, parts, strict=True)]
        self.units = [
            Unit(part.name, part.named, part.sites, three, self.comm, self.offload and part.trainable)
            for part, three in zip(parts, dtypes, strict=True)
        ]
        self.root = [unit for unit, part in zip(self.units, parts, strict=True) if part.module is model]
        for unit, part in zip(self.units, parts, strict=True):
            self._shard(unit, part, init)
        self._materialise(model.modules(), init)  # modules that hold only buffers
        self.broadcast_buffers()
        self._prefetcher = Prefetcher(self.root)
        self._backward = Backward(self.units, self._begin_backward, self._on_passed)
        self.structure = Structure(self)
        self._install_hooks(parts)

    __reduce_ex__ = full.refuse_copy

    # -- the override points; ddp.py says when each is called -----------------------------------------------------

    def optimizer_params(self, unit: Unit) -> list[Tensor]:
        raise NotImplementedError

    def pre_forward(self, unit: Unit) -> None:
        raise NotImplementedError

    def post_forward(self, unit: Unit) -> None:
        raise NotImplementedError

    def pre_backward(self, unit: Unit) -> None:
        raise NotImplementedError

    def post_backward(self, unit: Unit) -> None:
        raise NotImplementedError

    def reduce(self, unit: Unit) -> Any:
        """Average `unit.bucket.full` over the ranks. The mean goes to `unit.bucket.grad`, laid out as `unit.master`.

        Returns None if the mean is there, or something whose `wait()` returns once it is there.
        """
        raise NotImplementedError

    def after_step(self, unit: Unit) -> None:
        raise NotImplementedError

    # -- for users -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up this rank's gradients; the next backward outside reduces the sum.

        Saves the traffic of every micro-batch but the last. Meanwhile full gradients are held, in every stage.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`. Returns the norm before, on every rank.

        norm_type: p of the p-norm, greater than 0, or inf. Stages 1 to 3 all-reduce one number, stage 0 nothing.
        The norm is float64 if a gradient is, else float32.
        """
        self.check_grads_final(self.units)
        with plainly():  # gradients as they are: this one knows of the other ranks
            self.promote_grads(self.units)
            return clip_to_norm(self, max_norm, norm_type)

    def full_parameters(self) -> AbstractContextManager[None]:
        """Inside, the model shows full parameters in the masters' dtype, on every rank, to look at or edit.

        The first rank's edits are kept, on all ranks; after an error inside, none are. A parameter may be replaced, by
        `.data = ...`, another `nn.Parameter` or `load_state_dict(assign=True)`, if shape and dtype stay. All ranks must
        take part. The model may be called inside, but not trained.

        Raises `RuntimeError` on every rank, and keeps no edit, if one has replaced a parameter by anything else.
        """
        return full.editing(self)

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Tensor]:
        """The `state_dict` of the unsharded model, on the CPU, in the masters' dtype. All ranks must take part.

        rank0_only: the group's first rank gets it, the others an empty dict. Buffers are the first rank's.
        Gathers unit by unit, so a rank holds one full unit besides the result.
        """
        return full.gather_state_dict(self, rank0_only)

    def load_full_state_dict(self, state: dict[str, Tensor] | None) -> None:
        """Load the `state_dict` of an unsharded model. The first rank's counts; the others may pass None.

        Raises `ValueError` on every rank, before anything is changed, if names are missing or unexpected or shapes
        differ.
        """
        full.spread_state_dict(self, state)

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

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._enter(self.root, self.model, args, kwargs)
            try:
                output = method(*args, **kwargs)
            except BaseException:
                self._leave(self.root, [], self.model, args, kwargs, None)
                raise
            return self._leave(self.root, [], self.model, args, kwargs, output)

        setattr(self.model, name, wrapped)

    # -- for the stages ------------------------------------------------------------------------------------------

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
        self._prefetcher.visit(unit)
        unit.gather()
        self.prefetch_next()

    def prefetch_next(self) -> None:
        """Start to gather the unit that will be needed next, if that is known and there is room."""
        if self.prefetch:
            self._prefetcher.start_next()

    # -- construction --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _shard(self, unit: Unit, part: Part, init: Any) -> None:
        """Make the storages of one unit, and let its original parameters go before the next unit's turn."""
        self._materialise([module for sites in unit.sites for module, _ in sites], init)
        unit.fill([module.get_parameter(name) for module, name in (sites[0] for sites in unit.sites)], self.comm.device)
        unit.adopt(self.optimizer_params(unit), [param.requires_grad for _, param in part.named], self._on_gradient)
        owner = step.Owner(self, unit)
        every = zip(part.named, unit.params, unit.full_params, unit.layout.slots, strict=True)
        for (name, original), param, full_param, slot in every:
            step.mark_replaced(original, name)
            step.mark_full(full_param, name)
            step.mark_owned(param, owner)
            if isinstance(param, ShownParameter):
                param.belong(self, original, unit.layout, slot)
        part.named.clear()

    def _materialise(self, modules: Iterable[nn.Module], init: Callable[[nn.Module], Any] | None) -> None:
        """Give memory to what `modules` themselves have on the meta device, and values by the user's `init`."""
        for module in modules:
            params = [(key, p) for key, p in module._parameters.items() if p is not None and p.is_meta]
            buffers = [(key, b) for key, b in module._buffers.items() if b is not None and b.is_meta]
            for key, param in params:
                empty = torch.empty_like(param, device=self.comm.device)
                module._parameters[key] = nn.Parameter(empty, param.requires_grad)
            for key, buffer in buffers:
                module._buffers[key] = torch.empty_like(buffer, device=self.comm.device)
            if (params or buffers) and init is not None:
                init(module)

    def _install_hooks(self, parts: list[Part]) -> None:
        """Any module that holds parameters may be called by itself, so each takes care of the units that it needs."""
        unit_of = {id(param): unit for unit in self.units for param in unit.params}
        unit_modules = {id(part.module) for part in parts} | {id(self.model)}
        # torch.compile must not trace them: what they do depends on autograd, on the step, on the other ranks.
        on_enter, on_leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        for module in self.model.modules():
            vars(module)["__reduce_ex__"] = full.refuse_copy
            if self.stage > 0:
                full.refuse_state_dict(self, module)
            if module._parameters or id(module) in unit_modules:
                inside = list(modules_within(module, unit_modules))
                needs = units_needed(inside, unit_of)
                enter, leave = partial(on_enter, needs), partial(on_leave, needs, inside)
                if id(module) not in unit_modules:
                    enter, leave = _unless_at_work(needs, enter, leave)
                module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    # -- forward -------------------------------------------------------------------------------------------------

    def _enter(self, needs: list[Unit], module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before a module's forward: make the units that it needs show their full parameters."""
        if self.bypassed:
            return args, kwargs
        if module is self.model:
            self.forget_calls()
        if self._depth == 0 and not _autograd_runs():
            self.structure.check()
        self._depth += 1
        new = [unit for unit in needs if unit.depth == 0]
        for unit in needs:
            unit.depth += 1
        if not new and self._depth > 1:  # inside of a unit that is at work
            return args, kwargs
        recompute = _autograd_runs()  # activation checkpointing
        if self._depth == 1 and not recompute:
            self._outermost = _caller(sys._getframe(1))
            self._start_forward(module)
        if self._depth == 1 and self.precision.cast_inputs and self.precision.compute is not None:
            args, kwargs = cast_floats((args, kwargs), self.precision.compute)
        for unit in new:
            if self._training:
                self._backward.used(unit)
            self.pre_forward(unit)
            unit.show_full()
            self._versions[unit] = unit.full._version
        if new and torch.is_grad_enabled() and not recompute:
            self._backward.call_begins(new, grad_tensors((args, kwargs), objects=False)[0])
        return args, kwargs

    def _leave(
        self, needs: list[Unit], inside: list[nn.Module], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """After a module's forward, even one that failed: show the optimizer's parameters again."""
        if self.bypassed or not self._depth:  # inside full_parameters(), or _enter refused the call
            return output
        self._depth -= 1
        for unit in needs:
            unit.depth -= 1
        over = [unit for unit in needs if unit.depth == 0]
        if not over and self._depth:
            return output
        ended, unwatched = self._backward.call_ends(over)
        if _autograd_runs():  # a recompute releases nothing: backward is about to use it
            return output
        failed = output is None and sys.exc_info()[0] is not None
        if over:  # a result that is part of a parameter must outlive it
            output = detached_from({unit.full.untyped_storage()._cdata for unit in over}, output)
        tensors: list[Tensor] = []
        stay = False
        if over and torch.is_grad_enabled() and not failed:
            # If backward may enter through something that cannot be seen, the units must stay.
            tensors, stay = grad_tensors([output, *kept_by_modules(inside)])
            for tensor in tensors:
                tensor.register_hook(partial(self._pre_backward, over, ended, unwatched))
        for unit in over:
            unit.show_params()
            if stay:
                self._held.append(unit)
            else:  # a method that turns gradients off itself, such as generate(), has no backward either
                with torch.set_grad_enabled(bool(tensors)):
                    self.post_forward(unit)
            if not failed:
                self._notice_writes(unit)
        if self._depth == 0:
            self._outermost = None
            self._prefetcher.end()
            if module is self.model and not failed:
                self.gather_stale()  # another rank may have needed what this one did not
        return output

    def _notice_writes(self, unit: Unit) -> None:
        """Forward has ended. What it wrote into the masters every rank wrote; into a copy of them, it would be lost."""
        if unit.full._version == self._versions[unit]:
            return
        if unit.full.untyped_storage()._cdata != unit.master.untyped_storage()._cdata:
            raise RuntimeError(
                f"rank {self.rank}: forward wrote into parameters of {unit.name}, but it sees a copy that will not "
                "last (in stage 3, and where Precision computes in another dtype). Edit parameters outside of forward"
            )
        unit.version = unit.changes

    def _start_forward(self, module: nn.Module) -> None:
        """The outermost call begins: tidy up after an error, and notice parameters that were edited."""
        if not vars(self.model).get("require_backward_grad_sync", True):
            raise RuntimeError(
                "model.require_backward_grad_sync = False is for torch's DistributedDataParallel; run forward and "
                "backward inside `with zero.no_sync():` instead"
            )
        if self.in_backward:
            self._drop_backward()
        if self._step_frame is not None and not _on_stack(self._step_frame):  # it failed
            self._step_frame = None
            self._become_shown()
        self._stepped = False
        self.comm.phase = "forward"
        self._training = torch.is_grad_enabled()
        self._prefetcher.begin((id(module), self._training))
        self._notice_edits()

    def _notice_edits(self) -> None:
        for unit in self.units:
            if unit.changes != unit.version:
                self.master_changed(unit)

    def master_changed(self, unit: Unit) -> None:
        """The optimizer, or somebody else, has written new values into the masters of `unit`."""
        unit.follow_master()
        self.after_step(unit)  # which may gather at once, into what the master is a view of
        unit.mark_followed()

    def is_idle(self) -> bool:
        """Whether no forward, backward or full_parameters() is under way."""
        self.forget_calls()
        return not (self._depth or self.bypassed or _autograd_runs())

    def forget_calls(self) -> None:
        """Control-C can skip _leave. If the outermost call is over all the same, show the optimizer's parameters."""
        if self._depth == 0 or _on_stack(self._outermost):
            return
        self._depth = 0
        for unit in self.units:
            if unit.depth:
                unit.depth = 0
                unit.show_params()

    # -- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self.in_backward:
            return
        if torch.is_grad_enabled():
            raise NotImplementedError("backward(create_graph=True) through a sharded model is not supported")
        Variable._execution_engine.queue_callback(self._end_backward)
        self.in_backward, self._reduces = True, self._sync
        if self._step_frame is not None:  # a closure
            self._become_shown()
        for param in self.listeners.values():
            param.drop()
        self.comm.phase = "backward"
        self._prefetcher.begin("backward")
        self._notice_edits()
        self.gather_stale()
        with plainly():
            for unit in self.units:
                unit.bucket.kept_back.resume()
        self._backward.set_turns(self._sync)

    def _pre_backward(self, units: list[Unit], ended: int, unwatched: ForwardCall | None, grad: Tensor) -> None:
        """A gradient reached the outputs of a call of `units` that ended when the clock showed `ended`."""
        self._begin_backward()
        for unit in units:
            if self._backward.open(unit):
                self.pre_backward(unit)
                unit.show(unit.full_params)  # for a recompute
        self._backward.at_outputs(ended, unwatched)

    def _on_gradient(self, unit: Unit, i: int) -> None:
        """Autograd has completed the gradient of parameter `i` of `unit`."""
        self._begin_backward()
        unit.bucket.collect(i)
        self._backward.at_parameter(unit, i)

    def _on_passed(self, unit: Unit) -> None:
        """Backward has passed `unit`. It is reduced when its turn comes, which is the same on every rank."""
        if unit.trainable and self._sync:
            self._take_turns()
        else:
            self._finish(unit)

    def _take_turns(self, everyone: bool = False) -> None:
        for unit in self._backward.turns(everyone):
            self._advance_reductions()
            unit.bucket.complete_with_zeros()
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        """Backward is done with `unit`: the stage's post_backward, which reduces if it is the unit's turn."""
        self._backward.close(unit)
        unit.show_params()
        reduces = self.reduces(unit)
        self.post_backward(unit)
        if reduces:
            if unit.bucket.grad is None:
                raise RuntimeError(f"{type(self).__name__}.reduce() left no unit.bucket.grad (unit {unit.name})")
            self._reducing.append(unit)
            unit.bucket.depart(self.keep_grad_memory)
            if not self.overlap:
                self._advance_reductions(to_the_end=True)

    def _advance_reductions(self, to_the_end: bool = False) -> None:
        """Take each reduction under way one step further. Most have a single step, so one at a time is in flight."""
        while self._reducing:
            self._reducing = deque(unit for unit in self._reducing if not unit.bucket.advance())
            if not to_the_end:
                return

    def _end_backward(self) -> None:
        """Autograd has finished: reduce what is left, exchange what was used, show the gradients."""
        if self._sync:
            self._take_turns(everyone=True)
            with plainly():
                message = self.hyperparameters.offer() + self._flags()
            exchanged = self.comm.start_exchange(message, "exchange of used parameters")
            self._advance_reductions(to_the_end=True)
            rows = exchanged()
            self.hyperparameters.settle([row[:DIGEST] for row in rows])
            with plainly():
                self._show_grads([row[DIGEST:] for row in rows])
            self.comm.progress.backwards += 1
        for unit in self.units:
            if self._backward.is_open(unit) or unit in self._held:
                self._finish(unit)
            if not self._sync:
                with plainly():
                    unit.bucket.kept_back.show()
            unit.bucket.end_backward()
        self._prefetcher.end()
        self._backward.end(keep_graph=torch._C._autograd._get_current_graph_task_keep_graph())
        self._held = []
        self.in_backward = False
        for param in list(self.listeners.values()):  # a hook may register another
            param.deliver()
        if self._step_frame is not None:  # a closure: the optimizer goes on to use the gradients at once
            self._prepare_step(self.units)

    def _flags(self) -> bytes:
        """One byte for each parameter: what this rank knows about it."""
        flags = bytearray()
        for unit in self.units:
            for used, late, param in zip(unit.bucket.used, unit.bucket.have, unit.params, strict=True):
                flags.append(USED * used + TRAINABLE * param.requires_grad + LATE * late)
        return bytes(flags)

    def check_in_step(self, what: str) -> None:
        """All ranks are about to do `what`. Raises `CommError` if one does not, or made another number of steps."""
        self.comm.exchange_bytes(b"", what)

    def _show_grads(self, flags: list[bytes]) -> None:
        """Show the averaged gradients of the parameters that some rank used. `flags`: every rank's."""
        self._compare_trainable(flags)
        some = _any_of(flags)
        used, late = ([bool(flag & bit) for flag in some] for bit in (USED, LATE))
        start = 0
        for unit in self.units:
            mine = slice(start, start + len(unit.params))
            start = mine.stop
            unit.bucket.show(used[mine])
            if any(late[mine]):  # gradients that came after the unit's turn: every rank reduces once more
                unit.bucket.complete_with_zeros()
                self._finish(unit)
                self._advance_reductions(to_the_end=True)
                unit.bucket.show(late[mine])
            unit.trainable = any(param.requires_grad for param in unit.params)
        self._backward.learn_order(lambda order: self.comm.exchange(order, "order of the units")[0])

    def _compare_trainable(self, flags: list[bytes]) -> None:
        names = [name for unit in self.units for name in unit.names]
        words = {TRAINABLE: "trainable", 0: "frozen"}
        for rank, row in enumerate(flags):
            if row == flags[0]:
                continue
            for name, mine, first in zip(names, row, flags[0], strict=True):
                if (mine ^ first) & TRAINABLE:
                    raise CommError(
                        f"{name} is {words[mine & TRAINABLE]} on rank {rank} and {words[first & TRAINABLE]} on rank 0; "
                        "set requires_grad alike on all ranks"
                    )

    def _drop_backward(self) -> None:
        """An error broke backward off: its gradients are incomplete, and none is shown."""
        if self._reduces:  # on every rank at the same place, or the ranks would reduce one unit with another
            self.comm.phase = "clean-up"
            issued = [group.log.count for group in self.comm.groups]
            for rank, other in enumerate(self.comm.exchange(issued, "end of a backward that broke off")):
                if other != issued:
                    raise CommError(
                        f"rank {self.rank}: the last backward broke off, on rank {rank} at another place; start the "
                        "ranks again, or build the model and zero anew on all of them"
                    )
        self._advance_reductions(to_the_end=True)
        for unit in self.units:
            unit.bucket.drop()
            if self._backward.is_open(unit) or unit in self._held:
                self._finish(unit)
            unit.bucket.end_backward()
        self._backward.drop()
        self._held = []
        self.in_backward = False

    # -- the optimizer's step: step.py calls these for the units that the optimizer updates -----------------------

    def before_optimizer(self, optimizer: torch.optim.Optimizer, units: list[Unit]) -> None:
        self.forget_calls()
        self.structure.check()
        self.check_grads_final(units)
        self.comm.phase = "step"
        self.comm.progress.steps += 1  # told with the comparison: a rank that left this step out has made one less
        try:
            self.hyperparameters.check(optimizer)
        except CommError:  # it stays counted, for other ranks that ask later
            raise
        except BaseException:
            self.comm.progress.steps -= 1
            raise
        self.comm.progress.steps -= 1
        self._step_frame = sys._getframe(2)  # that of step.py's caller
        self._prepare_step(units)

    def after_optimizer(self, units: list[Unit]) -> None:
        self._step_frame = None
        self._become_shown()
        with plainly():
            for unit in units:
                unit.bucket.demote()
                self.master_changed(unit)
        self.comm.progress.steps += 1
        if not self._stepped:  # several optimizers make one step
            self.comm.step += 1
            self._stepped = True

    def check_grads_final(self, units: list[Unit]) -> None:
        """Raises `RuntimeError` if gradients are incomplete, or not averaged yet."""
        if self.in_backward:
            raise RuntimeError(f"rank {self.rank}: the last backward broke off; run forward and backward again")
        for unit in units:
            if unit.bucket.kept_back.is_shown:
                raise RuntimeError(
                    f"rank {self.rank}: the gradients of {unit.name} were added up under no_sync() and are not yet "
                    "averaged; run the last micro-batch's backward outside no_sync()"
                )

    def _become_shown(self) -> None:
        self.plain = False
        with plainly():
            for unit in self.units:
                become_shown(unit.params)

    def _prepare_step(self, units: list[Unit]) -> None:
        self.plain = True
        with plainly():
            for unit in units:
                become_plain(unit.params)
        self.promote_grads(units)

    def promote_grads(self, units: list[Unit]) -> None:
        with plainly():
            for unit in units:
                unit.bucket.promote()


def _unless_at_work(units: list[Unit], enter: Any, leave: Any) -> tuple[Any, Any]:
    """`enter` and `leave` of a module inside a unit, only for calls that do not find all of `units` at work.

    Nearly all calls find them at work, and a block makes many. So these cost little, and torch.compile can trace them.
    """
    open_calls = 0  # calls that entered, and calls of the same module inside them

    def entering(module: nn.Module, args: Any, kwargs: Any) -> Any:
        nonlocal open_calls
        if open_calls == 0:
            for unit in units:
                if unit.depth == 0:
                    break
            else:
                return None
        open_calls += 1
        return enter(module, args, kwargs)

    def leaving(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        nonlocal open_calls
        if open_calls == 0:
            return None
        open_calls -= 1
        return leave(module, args, kwargs, output)

    return entering, leaving


def _any_of(rows: list[bytes]) -> bytes:
    """Bitwise or of all rows, which are equally long."""
    either = functools.reduce(operator.or_, (int.from_bytes(row) for row in rows))
    return either.to_bytes(len(rows[0]))


def _autograd_runs() -> bool:
    return torch._C._current_graph_task_id() != -1


def _caller(frame: Any) -> Any:
    """Of a hook: the first frame that lasts as long as the call it is about. Those between only pass it on."""
    passing = ("torch._dynamo", "torch._compile", __name__)
    while frame.f_globals.get("__name__", "").startswith(passing) and frame.f_code.co_name != "wrapped":
        frame = frame.f_back
    return frame


def _on_stack(frame: Any) -> bool:
    here: FrameType | None = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def _checked_mesh(mesh: Any, group: dist.ProcessGroup | None, stage: int) -> tuple[int, int] | None:
    if mesh is None:
        return None
    if stage == 0 or group is not None:
        other = "stage 0, which replicates everything anyway" if stage == 0 else "group"
        raise ValueError(f"mesh={mesh!r} does not go with {other}")
    mesh, ranks = tuple(mesh), dist.get_world_size() if dist.is_initialized() else 1
    if len(mesh) != 2 or not all(isinstance(n, int) and n >= 1 for n in mesh) or mesh[0] * mesh[1] != ranks:
        raise ValueError(f"mesh={mesh}: (replicas, ranks that share one), two numbers whose product is {ranks}")
    return mesh


def _device_of(model: nn.Module) -> torch.device:
    """Where the model is or, for a model on the meta device, where this process computes.

    GPUs that are shared (under gloo) have to be chosen: `torch.set_default_device("cuda")`, or `with` it.
    """
    for param in model.parameters():
        if not param.is_meta:
            return param.device
    chosen = torch.get_default_device()
    if chosen.type not in ("cpu", "meta"):
        return chosen
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
