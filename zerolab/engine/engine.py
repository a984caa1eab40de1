"""The engine: takes a model apart into units, hooks itself into forward, backward and the optimizer's step, and
calls the stage's methods. What a stage does there stands in ddp.py, zero1.py, zero2.py and zero3.py.

One step, as the hooks see it:

    forward of the model          _enter: gradients of an earlier backward that broke off are dropped; inputs are cast
      forward of a unit's module  _enter: pre_forward, show whole parameters
                                  _leave: show the optimizer's parameters, post_forward
    backward                      _begin_backward, once: order a call of _end_backward
      gradient at its outputs     _pre_backward: pre_backward, show whole parameters
      gradient of a parameter     _on_gradient: take it over
      gradient at its inputs,     _done: the unit waits for its turn, which is the same on every rank;
        or all parameters'               then post_backward, which reduces
    end of backward               _end_backward: the rest of the turns; what was used anywhere; show gradients
    optimizer.step()              _before_step: float32 gradients; _after_step: after_step
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable

from zerolab.comm.collectives import Comm, CommError
from zerolab.engine import step as optimizers
from zerolab.engine.clip import clip_grad_norm_
from zerolab.engine.full import full_parameters, full_state_dict, load_full_state_dict, refuse_state_dict
from zerolab.engine.partition import Part, agree_on_parts, modules_within, units_needed
from zerolab.engine.precision import KEEP, Precision
from zerolab.engine.prefetch import Prefetcher
from zerolab.engine.pytree import cast_floats, detached_from, grad_tensors, kept_by_modules
from zerolab.engine.unit import ForwardCall, Unit

USED, TRAINABLE, LATE = 1, 2, 4  # the bits that ranks exchange about each parameter after a backward


class Engine:
    """Base of the four stages; see the contract in their docstrings.

    model: an `nn.Module`, sharded in place. It keeps its class and the names of its parameters.
    units: module classes that become one unit each; what is left over is the root unit. Default: the blocks that
        repeat in the model, else its largest modules of at most 25 MB.
    precision: a `Precision`; default: everything in the parameters' own dtype.
    group: the process group to share the work with; default: the world.
    mesh: (replicas, ranks that share one), in stages 1 to 3 of the whole world: shards are shared by so many
        neighbours, in a node say, and each replica holds all of them. Gathers stay inside a replica, and only the
        means of shards travel between replicas (hybrid sharding; Zhao et al., arXiv 2304.11277, section 3.2.2).
    offload: "optimizer", in stages 1 to 3: masters, gradients and the optimizer's state are kept on the host, and the
        optimizer works there (Ren et al., "ZeRO-Offload", arXiv 2101.06840). The device keeps what forward needs.
    init: for a model on the meta device: called with every module that holds parameters or buffers of its own, once
        these have (uninitialised) memory, to give them values; for example `lambda module: module.reset_parameters()`.

    The values of the group's first rank count: parameters and buffers are broadcast from it.
    Raises `ValueError`, on every rank alike, if some rank was given something that cannot be sharded, and
    `CommError` if the ranks do not agree on the model.
    """

    stage: int
    prefetch = True  # gather the next unit while one computes; False: not before it is needed
    overlap = True  # reduce a unit's gradients while backward computes the next; False: wait for that first
    keep_grad_memory = False  # True: what zero_grad() lets go is kept for the next backward, in stages 0 and 1

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
        self.rank, self.world_size = self.comm.rank, self.comm.world_size

        self.stale: deque[Unit] = deque()  # units whose whole parameters are old, in the order of their gathers
        self._held: list[Unit] = []  # units that stay gathered until backward ends
        self._depth = 0  # how many hooked calls are under way
        self._sync = True  # False inside no_sync()
        self._bypassed = False  # True inside full_parameters(): modules hold plain whole parameters
        self._stepping = False  # inside optimizer.step()
        self._stepped = False  # since the last forward
        self._in_backward = False
        self._training = False  # whether the outermost forward call began with gradients enabled
        self._outermost: Any = None  # its frame
        self._clock = 0  # counts calls of units, as they begin and as they end
        self._unwatched: list[ForwardCall] = []  # whose backward has begun, and which have no inputs to tell its end
        self._turns: deque[Unit] = deque()  # units still to be reduced in this backward
        self._in_flight: deque[Unit] = deque()  # units whose reduction is under way
        self._first_uses: list[Unit] | None = []  # order of first use, until the ranks have agreed on one

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
        self._order = list(self.units)  # of first use in forward; gradients are reduced the other way round
        self._install_hooks(parts)

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
        """Average `unit.whole_grad` over the ranks and leave it in `unit.grad`, laid out as `unit.master` is.

        Either it is there when this returns None, or what is returned has a `wait()` after which it is there.
        """
        raise NotImplementedError

    def after_step(self, unit: Unit) -> None:
        raise NotImplementedError

    # -- for users -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward inside only adds up this rank's gradients; the next backward outside reduces the sum.

        Saves the traffic of all micro-batches but the last, and holds whole gradients meanwhile, in every stage.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale all gradients so that their joint norm is at most `max_norm`; the norm before, equal on every rank.

        norm_type: p of the p-norm, greater than 0, or inf. Stages 1 to 3 all-reduce one number, stage 0 nothing.
        """
        self._check_grads_final(self.units)
        self._promote_grads(self.units)
        return clip_grad_norm_(self, max_norm, norm_type)

    def broadcast_buffers(self) -> None:
        """Give every rank the first rank's buffers, BatchNorm's running statistics for instance.

        Each rank's batches leave it statistics of its own. Call this before a validation that shall not depend on
        the rank; `full_state_dict()` has the first rank's in any case. On GPUs, `nn.SyncBatchNorm.
        convert_sync_batchnorm(model)` before sharding keeps them equal in every forward; torch has none for the CPU.
        """
        for name, buffer in self.model.named_buffers():
            self.comm.broadcast(buffer, name)

    full_parameters = full_parameters
    full_state_dict = full_state_dict
    load_full_state_dict = load_full_state_dict

    def register_forward_method(self, name: str) -> None:
        """Let `model.<name>(...)`, "generate" for instance, see whole parameters, as calling the model does."""
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

    def reduces(self, unit: Unit) -> bool:
        """Whether it is the turn of `unit` to be reduced: not under no_sync, not if it is frozen."""
        return unit.complete

    def gather_stale(self, until: Unit | None = None) -> None:
        """Gather the units in `stale`, in order, up to `until` or all of them."""
        while self.stale and (until is None or not until.gathered):
            self.stale.popleft().gather()
        if self.stale and self.prefetch:  # the next one is on its way while `until` computes
            self.stale[0].start_gather()

    def gather(self, unit: Unit) -> None:
        """Gather `unit`, and start with the one that will be needed next."""
        self._prefetcher.visit(unit)
        unit.gather()
        self.prefetch_next()

    def prefetch_next(self) -> None:
        """Start to gather the unit that will be needed next, if that is known and only one is whole."""
        if self.prefetch:
            self._prefetcher.start_next()

    # -- construction --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _shard(self, unit: Unit, part: Part, init: Any) -> None:
        """Make the storages of one unit, and let its original parameters go before the next unit's turn."""
        self._materialise([module for sites in unit.sites for module, _ in sites], init)
        unit.fill([sites[0][0]._parameters[sites[0][1]] for sites in unit.sites], self.comm.device)
        unit.adopt(self.optimizer_params(unit), [param.requires_grad for _, param in part.named], self._on_gradient)
        for (name, original), param, whole in zip(part.named, unit.params, unit.wholes, strict=True):
            optimizers.mark_replaced(original, name)
            optimizers.mark_whole(whole, name)
            optimizers.mark_owned(param, self, unit)
        part.named.clear()

    def _materialise(self, modules: Iterable[nn.Module], init: Callable[[nn.Module], Any] | None) -> None:
        """Give what is on the meta device in `modules` themselves memory, and values by the user's `init`."""
        for module in modules:
            on_meta = [
                (tensors, key, tensor)
                for tensors in (module._parameters, module._buffers)
                for key, tensor in tensors.items()
                if tensor is not None and tensor.is_meta
            ]
            for tensors, key, tensor in on_meta:
                empty = torch.empty_like(tensor, device=self.comm.device)
                tensors[key] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
            if on_meta and init is not None:
                init(module)

    def _install_hooks(self, parts: list[Part]) -> None:
        """Every module that holds parameters may be called by itself, so each sees to the units that it needs."""
        unit_of = {id(param): unit for unit in self.units for param in unit.params}
        unit_modules = {id(part.module) for part in parts} | {id(self.model)}
        # Not for torch.compile to trace: what they do depends on autograd, on the step, on the other ranks.
        on_enter, on_leave = torch.compiler.disable(self._enter), torch.compiler.disable(self._leave)
        for module in self.model.modules():
            if self.stage > 0:
                refuse_state_dict(self, module)
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
        """Before a module's forward: see to it that the units that it needs show whole parameters."""
        if self._bypassed:
            return args, kwargs
        if module is self.model:
            self._forget_calls()
        self._depth += 1
        new = [unit for unit in needs if unit.depth == 0]
        for unit in needs:
            unit.depth += 1
        if not new and self._depth > 1:  # inside of a unit that is at work
            return args, kwargs
        recompute = _in_backward()  # activation checkpointing
        if self._depth == 1 and not recompute:
            self._outermost = sys._getframe(1)
            self._start_forward(module)
        if self._depth == 1 and self.precision.cast_inputs and self.precision.compute is not None:
            args, kwargs = cast_floats((args, kwargs), self.precision.compute)
        for unit in new:
            if self._training and not unit.ran:
                unit.ran = True
                if self._first_uses is not None and unit not in self._first_uses:
                    self._first_uses.append(unit)
            self.pre_forward(unit)
            unit.show_whole()
        if new and torch.is_grad_enabled() and not recompute:
            self._clock += 1
            self._watch_inputs(new, self._clock, (args, kwargs))
        return args, kwargs

    def _leave(
        self, needs: list[Unit], inside: list[nn.Module], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """After a module's forward, also one that failed: show the optimizer's parameters again."""
        if self._bypassed:
            return output
        self._depth -= 1
        for unit in needs:
            unit.depth -= 1
        over = [unit for unit in needs if unit.depth == 0]
        if not over and self._depth:
            return output
        self._clock += 1
        ended, unwatched = self._clock, over[0].unwatched if over else None
        for unit in over:
            unit.unwatched = None
        if _in_backward():  # a recompute releases nothing: backward is about to use it
            return output
        failed = output is None and sys.exc_info()[0] is not None
        if over:  # a result that is a part of a parameter must not go with it
            output = detached_from({unit.whole.untyped_storage()._cdata for unit in over}, output)
        tensors, stay = [], False
        if over and torch.is_grad_enabled() and not failed:
            # If backward may come in through something that cannot be seen, the units must stay.
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
        if self._depth == 0:
            self._outermost = None
            self._prefetcher.end()
            if module is self.model and not failed:
                self.gather_stale()  # what this rank did not need, another may have needed
        return output

    def _start_forward(self, module: nn.Module) -> None:
        """The outermost call of a forward: tidy up what an error left, and notice parameters changed by hand."""
        if self._in_backward:
            self._drop_backward()
        self._stepped = False
        self.comm.phase = "forward"
        self._training = torch.is_grad_enabled()
        self._prefetcher.begin((id(module), self._training))
        self._notice_changes()

    def _notice_changes(self) -> None:
        """Parameters may have been changed by hand."""
        for unit in self.units:
            if unit.master._version != unit.version:
                self._changed(unit)

    def _changed(self, unit: Unit) -> None:
        """The optimizer, or somebody else, wrote new values into the parameters of `unit`."""
        unit.follow_master()
        self.after_step(unit)  # which may gather at once, into what the master is a view of
        unit.mark_followed()

    def _watch_inputs(self, units: list[Unit], begun: int, inputs: Any) -> None:
        """Learn when backward has passed the units: when a gradient arrives at one of their inputs.

        Autograd runs what was created last first. What made an input is older than all that the unit did with it,
        so when it is its turn, nothing of the unit is left to run. If there is no such input, it is known when a
        gradient reaches the outputs of a call that had ended before this one began. (That all parameters have their
        gradients would often be known earlier, but not on every rank at the same point between the gathers.)
        """
        call = ForwardCall(units, begun)
        made = [tensor for tensor in grad_tensors(inputs, objects=False)[0] if tensor.grad_fn is not None]
        for tensor in made:
            tensor.register_hook(partial(self._at_inputs, call))
        for unit in units:
            unit.calls.add(call)
            unit.unwatched = None if made else call

    def _forget_calls(self) -> None:
        """Ctrl-C gets past _leave: if the outermost call is over all the same, show the optimizer's parameters."""
        if self._depth == 0 or _on_stack(self._outermost):
            return
        self._depth = 0
        for unit in self.units:
            if unit.depth:
                unit.depth = 0
                unit.show_params()

    # -- backward ------------------------------------------------------------------------------------------------

    def _begin_backward(self) -> None:
        if self._in_backward:
            return
        if torch.is_grad_enabled():
            raise NotImplementedError("backward(create_graph=True) through a sharded model is not supported")
        Variable._execution_engine.queue_callback(self._end_backward)
        self._in_backward = True
        self.comm.phase = "backward"
        self._prefetcher.begin("backward")
        self._notice_changes()
        self.gather_stale()
        for unit in self.units:
            unit.resume()
        self._turns = deque(unit for unit in reversed(self._order) if unit.trainable and self._sync)

    def _pre_backward(self, units: list[Unit], ended: int, unwatched: ForwardCall | None, grad: Tensor) -> None:
        """A gradient reached the outputs of a call of `units` that was over when the clock showed `ended`."""
        self._begin_backward()
        for unit in units:
            if not unit.opened:
                unit.opened = True
                self.pre_backward(unit)
                unit.show(unit.wholes)  # for recomputation
        for call in [call for call in self._unwatched if call.begun > ended]:
            self._unwatched.remove(call)
            self._passed(call)
        if unwatched and unwatched not in self._unwatched:
            self._unwatched.append(unwatched)

    def _on_gradient(self, unit: Unit, i: int, leaf: nn.Parameter) -> None:
        self._begin_backward()
        unit.collect(i)
        # With a gradient for every parameter, backward needs none of them any more.
        if len(unit.arrived) == len(unit.params) and not unit.calls:
            self._done(unit)

    def _at_inputs(self, call: ForwardCall, grad: Tensor) -> None:
        self._begin_backward()
        self._passed(call)

    def _passed(self, call: ForwardCall) -> None:
        """Backward is through with `call`."""
        for unit in call.units:
            unit.calls.discard(call)
            if not unit.calls:
                self._done(unit)

    def _done(self, unit: Unit) -> None:
        """Backward has passed `unit`. It is reduced when it is its turn, which is the same on every rank."""
        if unit.ready:
            return
        unit.ready = True
        if unit.trainable and self._sync:
            self._take_turns()
        else:
            self._finish(unit)

    def _take_turns(self, everyone: bool = False) -> None:
        """A unit without a forward has nothing to wait for, but other ranks may need its zeros."""
        while self._turns:
            unit = self._turns[0]
            if not (everyone or unit.ready or not (unit.ran or unit.opened)):
                return
            self._turns.popleft()
            self._advance_reductions()
            unit.complete_grad()
            self._finish(unit)

    def _finish(self, unit: Unit) -> None:
        unit.opened = False
        unit.show_params()
        reduces = self.reduces(unit)
        self.post_backward(unit)
        if reduces:
            if unit.grad is None:
                raise RuntimeError(f"{type(self).__name__}.reduce() has left no unit.grad (unit {unit.name})")
            self._in_flight.append(unit)
            unit.complete = False
            if self.keep_grad_memory:
                unit.kept_memory = unit.whole_grad
            unit.whole_grad = None  # what of it is still wanted is held by the reduction, and by unit.grad
            if not self.overlap:
                self._advance_reductions(to_the_end=True)

    def _advance_reductions(self, to_the_end: bool = False) -> None:
        """One step further with each reduction under way: most take one step, so that one at a time is in flight."""
        while self._in_flight:
            self._in_flight = deque(unit for unit in self._in_flight if not unit.advance_reduction())
            if not to_the_end:
                return

    def _end_backward(self) -> None:
        """Runs when autograd is through: what is left to reduce, and what the ranks must tell each other."""
        if self._sync:
            self._take_turns(everyone=True)
            flags = self.comm.start_exchange(self._flags(), "exchange of used parameters")
            self._advance_reductions(to_the_end=True)
            self._end_reductions(flags())
        for unit in self.units:
            if unit.opened or unit in self._held:
                self._finish(unit)
            if not self._sync:
                unit.keep_back()
        self._prefetcher.end()
        for call in self._unwatched:
            for unit in call.units:
                unit.calls.discard(call)
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        for unit in self.units:
            unit.end_backward(keep_ran=keep_graph)
        self._held = []
        self._unwatched = []
        self._in_backward = False
        if self._stepping:  # a closure: the optimizer goes on to use the gradients at once
            self._promote_grads(self.units)

    def _flags(self) -> bytes:
        """One byte for each parameter: what this rank knows of it."""
        flags = bytearray()
        for unit in self.units:
            for used, late, param in zip(unit.used, unit.have, unit.params, strict=True):
                flags.append(USED * used + TRAINABLE * param.requires_grad + LATE * late)
        return bytes(flags)

    def _end_reductions(self, flags: list[bytes]) -> None:
        """Show the averaged gradients of what some rank used. `flags`: of every rank."""
        self._compare_trainable(flags)
        some = _any_of(flags)
        used, late = ([bool(flag & bit) for flag in some] for bit in (USED, LATE))
        start = 0
        for unit in self.units:
            mine = slice(start, start + len(unit.params))
            start = mine.stop
            unit.show_grad(used[mine])
            if any(late[mine]):  # gradients that came after the unit's turn: reduced once more, by all
                unit.complete_grad()
                self._finish(unit)
                self._advance_reductions(to_the_end=True)
                unit.show_grad(late[mine])
            unit.trainable = any(param.requires_grad for param in unit.params)
        if self._first_uses is not None:
            self._learn_order()

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

    def _learn_order(self) -> None:
        """After the first backward: reduce in the order of use, as the first rank saw it."""
        numbers = [self.units.index(unit) for unit in self._first_uses]
        numbers += [i for i in range(len(self.units)) if i not in numbers]
        self._order = [self.units[i] for i in self.comm.exchange(numbers, "order of the units")[0]]
        self._first_uses = None

    def _drop_backward(self) -> None:
        """A backward that an error broke off: its gradients are not complete, and none is shown."""
        self._advance_reductions(to_the_end=True)
        for unit in self.units:
            unit.drop_grads()
            if unit.opened or unit in self._held:
                self._finish(unit)
            unit.end_backward(keep_ran=False)
        self._held = []
        self._unwatched = []
        self._in_backward = False

    # -- the optimizer's step ------------------------------------------------------------------------------------

    def _before_step(self, units: list[Unit]) -> None:
        self._forget_calls()
        self._check_grads_final(units)
        self._stepping = True
        self.comm.phase = "step"
        self._promote_grads(units)

    def _after_step(self, units: list[Unit]) -> None:
        self._stepping = False
        for unit in units:
            unit.demote_grads()
            self._changed(unit)
        if not self._stepped:  # several optimizers make one step
            self.comm.step += 1
            self._stepped = True

    def _check_grads_final(self, units: list[Unit]) -> None:
        if self._in_backward:
            raise RuntimeError(f"rank {self.rank}: the last backward broke off; run forward and backward again")
        for unit in units:
            if unit.kept_back and any(unit.params[i].grad is not None for i in unit.kept_back):
                raise RuntimeError(
                    f"rank {self.rank}: the gradients of {unit.name} were added up under no_sync() and are not yet "
                    "averaged; run the last micro-batch's backward outside no_sync()"
                )

    def _promote_grads(self, units: list[Unit]) -> None:
        for unit in units:
            unit.promote_grads()


def _unless_at_work(units: list[Unit], enter: Any, leave: Any) -> tuple[Any, Any]:
    """`enter` and `leave` of a module inside of a unit, for calls that do not find all of `units` at work already.

    Nearly all calls do, and a block makes many: so these cost little, and torch.compile sees through them.
    """
    open_calls = 0  # those that entered, and calls of the same module inside of them

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
    """Bit by bit, what is set in any of the rows, which are equally long."""
    either = functools.reduce(operator.or_, (int.from_bytes(row) for row in rows))
    return either.to_bytes(len(rows[0]))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _on_stack(frame: Any) -> bool:
    here = sys._getframe()
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
    """Where the model is, or, if it is nowhere yet, where this process computes."""
    for param in model.parameters():
        if not param.is_meta:
            return param.device
    if torch.cuda.is_available() and dist.is_initialized() and "nccl" in dist.get_backend_config():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
