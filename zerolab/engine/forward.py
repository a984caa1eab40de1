"""Forward: around every call of a module, the units that it needs show their full parameters.

Any module that holds parameters may be called by itself, so each takes care of the units that it needs: `enter` before
its forward, `leave` after it. What is inside of another call finds its units at work, and costs little.
"""

from __future__ import annotations

import functools
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from zerolab.engine.backward import Backward
from zerolab.engine.partition import Structure, modules_within, units_needed
from zerolab.engine.precision import Precision
from zerolab.engine.pytree import cast_floats, detached_from, grad_tensors, kept_by_modules, made_since
from zerolab.engine.stage import Stage
from zerolab.engine.step import Step
from zerolab.engine.unit import Unit


class Forward:
    """The calls that are under way in the model of `stage`."""

    def __init__(
        self, stage: Stage, precision: Precision, step: Step, backward: Backward, structure: Structure
    ) -> None:
        self._stage, self._step, self._backward, self._structure = stage, step, backward, structure
        self._turns = backward.turns
        self._inputs = precision.compute if precision.cast_inputs else None  # their dtype; None: as they come
        self.bypassed = False  # the model shows something else, and calls mean nothing
        self._calls: list[tuple[nn.Module, Any, list[Unit]]] = []  # module, exception before, units it began
        self._outermost: Any = None  # the frame of the first of them
        self._training = False  # whether that one began with gradients enabled
        self._begun: dict[Unit, tuple[int, int]] = {}  # version of the full parameters, number of autograd's next node
        self._hooked: set[nn.Module] = set()  # modules with hooks of a script, whose results are watched

    def install(self, unit_modules: set[int]) -> None:
        """Put hooks on every module that needs units. `unit_modules`: identities of those that are units."""
        unit_of = {id(param): unit for unit in self._stage.units for param in unit.params}
        # torch.compile must not trace them: what they do depends on autograd, on the step, on the other ranks.
        on_enter, on_leave = torch.compiler.disable(self.enter), torch.compiler.disable(self.leave)
        self._watcher = torch.compiler.disable(self._watch)
        for module in self._stage.model.modules():
            if module._parameters or id(module) in unit_modules:
                inside = list(modules_within(module, unit_modules))
                needs = units_needed(inside, unit_of)
                enter, leave = partial(on_enter, needs, inside), partial(on_leave, needs, inside)
                if id(module) not in unit_modules:
                    _Inside(needs, enter, leave).install(module)
                else:
                    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
                    module.register_forward_hook(leave, with_kwargs=True, always_call=True)

    def as_forward(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of the model, as an entry point like its forward."""
        root, model = self._stage.root, self._stage.model

        @functools.wraps(method)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self.enter(root, [], model, args, kwargs)
            try:
                output = method(*args, **kwargs)
            except BaseException:
                self.leave(root, [], model, args, kwargs, None)
                raise
            return self.leave(root, [], model, args, kwargs, output)

        return wrapped

    # -- around a call -----------------------------------------------------------------------------------------------

    def enter(
        self, needs: list[Unit], inside: list[nn.Module], module: nn.Module, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Before a module's forward: make the units that it needs show their full parameters."""
        if self.bypassed:
            return args, kwargs
        if module is self._stage.model:
            self.forget_calls()
        new = [unit for unit in needs if unit.depth == 0]
        if new and torch._C._functorch.peek_interpreter_stack() is not None:
            self._refuse_transform(new[0])
        if not self._calls and not _autograd_runs():
            self._structure.check()
        self._calls.append((module, sys.exc_info()[1], new))
        for unit in needs:
            unit.depth += 1
        if not new and len(self._calls) > 1:  # inside of a unit that is at work
            return args, kwargs
        recompute = _autograd_runs()  # activation checkpointing
        if len(self._calls) == 1 and not recompute:
            self._outermost = _caller(sys._getframe(1))
            self._begin(module)
        if len(self._calls) == 1 and self._inputs is not None:
            args, kwargs = cast_floats((args, kwargs), self._inputs)
        for unit in new:
            if self._training or recompute:  # of what the checkpoint called without gradients
                self._turns.used(unit)
            self._stage.pre_forward(unit)
            unit.show_full()
            self._begun[unit] = unit.writes, torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
        if new and torch.is_grad_enabled() and not recompute:
            self._turns.call_begins(new, grad_tensors((args, kwargs), objects=False)[0])
            if self._stage.stage == 3:
                self._watch_hooked(inside)
        return args, kwargs

    def leave(
        self, needs: list[Unit], inside: list[nn.Module], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """After a module's forward, even one that failed: show the optimizer's parameters again."""
        if self.bypassed or not self._calls or self._calls[-1][0] is not module:  # a hook before `enter` failed
            return output
        _, before, _ = self._calls.pop()
        for unit in needs:
            unit.depth -= 1
        over = [unit for unit in needs if unit.depth == 0]
        if not over and self._calls:
            return output
        ended, unwatched = self._turns.call_ends(over)
        if _autograd_runs():  # a recompute releases nothing: backward is about to use it
            return output
        failed = output is None and sys.exc_info()[1] is not before
        stuck = False
        if over:  # a result that is part of a parameter must outlive it
            output, stuck = detached_from({unit.full.untyped_storage()._cdata for unit in over}, output)
        tensors: list[Tensor] = []
        stay = False
        if over and torch.is_grad_enabled() and not failed:
            # If backward may enter through something that cannot be seen, the units must stay.
            since = self._begun[over[0]][1]
            filled = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
            results = [output, *kept_by_modules(inside, since), *(made_since(since, filled) if filled else ())]
            tensors, stay = grad_tensors(results)
            around = [unit for *_, new in self._calls for unit in new]  # backward goes on into them
            for tensor in tensors:
                tensor.register_hook(partial(self._backward.at_outputs, over, around, ended, unwatched))
            if stay:
                self._backward.held.update(over, around)
        for unit in over:
            unit.show(unit.params)
            if unit not in self._backward.held:
                # A method that turns gradients off itself, such as generate(), has no backward either.
                with torch.set_grad_enabled(bool(tensors)):
                    self._stage.post_forward(unit)
            if not failed:
                self._notice_writes(unit)
        if not self._calls:
            self._outermost = None
            self._stage.prefetcher.end()
            if module is self._stage.model and not failed:
                self._stage.gather_stale()  # another rank may have needed what this one did not
        if stuck and any(unit.unsealed is not None for unit in over):
            raise RuntimeError(
                f"rank {self._stage.rank}: {over[0].name} returned a parameter in a {type(output).__name__}, and it "
                "does not last longer than the forward. Return parameter.clone(), or put it into a dataclass, a "
                "tuple, a list or a dictionary"
            )
        return output

    def _refuse_transform(self, unit: Unit) -> None:
        raise RuntimeError(
            f"rank {self._stage.rank}: a transform of torch.func (grad, vmap, jvp ...) reached {unit.name}, and what "
            "the engine does around a forward cannot be transformed. Transform what lies inside of the forward of one "
            "unit, or take torch.autograd.grad or torch.autograd.forward_ad"
        )

    def _watch_hooked(self, inside: list[nn.Module]) -> None:
        """What a script's hook keeps of a module inside of a unit is a way into the unit, as its outputs are."""
        everywhere = nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks
        for module in inside:
            ours = 1 if module is inside[0] or module._parameters else 0
            hooked = len(module._forward_hooks) > ours or len(module._forward_pre_hooks) > ours or everywhere
            if hooked and module not in self._hooked:
                self._hooked.add(module)
                module.register_forward_hook(self._watcher, prepend=True)  # before another hook changes it

    def _watch(self, module: nn.Module, args: Any, output: Any) -> None:
        if not (self._calls and torch.is_grad_enabled()) or _autograd_runs():
            return
        tensors = grad_tensors([output, *args])[0]
        for unit in self._stage.units:
            if unit.depth:
                for tensor in tensors:
                    tensor.register_hook(partial(self._backward.at_inside, unit))

    def _begin(self, module: nn.Module) -> None:
        """The outermost call begins: tidy up after an error, and notice parameters that were edited."""
        if not vars(self._stage.model).get("require_backward_grad_sync", True):
            raise RuntimeError(
                "model.require_backward_grad_sync = False is for torch's DistributedDataParallel; run forward and "
                "backward inside `with zero.no_sync():` instead"
            )
        compiler = sys.modules.get("torch._dynamo.compiled_autograd")
        if getattr(compiler, "compiled_autograd_enabled", False):
            raise RuntimeError(
                f"rank {self._stage.rank}: compiled autograd traces backward before it runs, and so would the engine's "
                "collectives be; compile forward alone, with torch._dynamo.config.compiled_autograd = False"
            )
        if self._backward.under_way:
            self._backward.drop()
        self._step.forward_begins()
        self._stage.comm.phase = "forward"
        self._training = torch.is_grad_enabled()
        self._stage.prefetcher.begin((id(module), self._training))
        self._stage.notice_edits()

    def _notice_writes(self, unit: Unit) -> None:
        """Forward has ended. What all ranks wrote into the masters is kept; what a copy of them got would be lost."""
        if unit.writes == self._begun[unit][0]:
            return
        if unit.full.untyped_storage()._cdata != unit.master.untyped_storage()._cdata:
            raise RuntimeError(
                f"rank {self._stage.rank}: forward wrote into parameters of {unit.name}, but it sees a copy that will "
                "not last (in stage 3, and where Precision computes in another dtype). Edit parameters outside of "
                "forward"
            )
        written: Any = unit.full.detach().cpu().view(torch.uint8).numpy()
        what = f"comparison of what forward wrote into {unit.name}"
        if len(set(self._stage.comm.exchange_bytes(zlib.crc32(written).to_bytes(4), what))) > 1:
            raise RuntimeError(
                f"rank {self._stage.rank}: forward wrote into parameters of {unit.name}, and not the same on every "
                "rank (an Embedding with max_norm rescales what its own batch looks up). Edit parameters outside of "
                "forward, alike on all ranks"
            )
        unit.version = unit.changes

    def is_idle(self) -> bool:
        """Whether no forward, backward or full_parameters() is under way."""
        self.forget_calls()
        return not (self._calls or self.bypassed or _autograd_runs())

    def forget_calls(self) -> None:
        """Control-C can skip `leave`. If the outermost call is over all the same, show the optimizer's parameters."""
        if not self._calls or _on_stack(self._outermost):
            return
        self._calls.clear()
        for unit in self._stage.units:
            if unit.depth:
                unit.depth = 0
                unit.show(unit.params)

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Inside, the model may show something else, and calls of it are not the engine's concern."""
        self.bypassed = True
        try:
            yield
        finally:
            self.bypassed = False
            for unit in self._stage.units:
                unit.show(unit.params)


class _Inside:
    """What hooks of a module inside a unit know: `enter` and `leave` are for calls that do not find `units` at work.

    Nearly all calls find them at work, and a block makes many. So these cost little, and torch.compile can trace them.
    All such modules have the same two hooks under the same number: a graph of one block is then a graph of every block.
    """

    handle = RemovableHandle(OrderedDict())

    def __init__(self, units: list[Unit], enter: Any, leave: Any) -> None:
        self.units, self.enter, self.leave = units, enter, leave
        self.open_calls = 0  # calls that entered, and calls of the same module inside them

    def install(self, module: Any) -> None:
        module._zerolab, number = self, self.handle.id
        for hooks, with_kwargs, hook in (
            (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, _entering),
            (module._forward_hooks, module._forward_hooks_with_kwargs, _leaving),
        ):
            hooks[number], with_kwargs[number] = hook, True
        module._forward_pre_hooks.move_to_end(number, last=False)
        module._forward_hooks_always_called[number] = True


def _entering(module: Any, args: Any, kwargs: Any) -> Any:
    inside = module._zerolab
    if inside.open_calls == 0:
        for unit in inside.units:
            if unit.depth == 0:
                break
        else:
            return None
    inside.open_calls += 1
    return inside.enter(module, args, kwargs)


def _leaving(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
    inside = module._zerolab
    if inside.open_calls == 0:
        return None
    inside.open_calls -= 1
    return inside.leave(module, args, kwargs, output)


def _on_stack(frame: Any) -> bool:
    """Whether the call that `frame` is of is still under way."""
    here: Any = sys._getframe()
    while here is not None and here is not frame:
        here = here.f_back
    return here is not None


def _autograd_runs() -> bool:
    return torch._C._current_graph_task_id() != -1


def _caller(frame: Any) -> Any:
    """Of a hook: the first frame that lasts as long as the call it is about. Those between only pass it on."""
    passing = ("torch._dynamo", "torch._compile", __name__)
    while frame.f_globals.get("__name__", "").startswith(passing) and frame.f_code.co_name != "wrapped":
        frame = frame.f_back
    return frame
