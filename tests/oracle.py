"""One training script, run twice: on ranks with zerolab, and in one process without it, which is the oracle.

A script is an importable function of a `Run`, written as if there were one model:

    def script(run):
        optimizer = torch.optim.AdamW(run.parameters(), lr=1e-2)
        for step in range(3):
            run.gradients(step)             # forward and backward of every rank's micro-batch
            run.clip(1.0)
            optimizer.step()
            run.zero_grad(optimizer)

`Sharded` does it with zerolab, each rank with its own micro-batch. `Alone` has one plain replica of the model for each
rank, averages their gradients in rank order (summed in float32, rounded once), and gives them to one optimizer.
`agree` runs a script on ranks in every stage and compares parameters, buffers, losses and notes with the oracle.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from zoo import Case, build

import zerolab
from zerolab import Precision

BF16 = Precision(torch.bfloat16)
Work = Callable[[nn.Module, int], Any]


class Result(NamedTuple):
    state: dict[str, Tensor]  # what `state_dict` of the plain model would be, in the masters' dtype
    losses: list[list[float]]  # losses[rank]; of ranks other than its own a rank knows nothing
    notes: list[Any]  # what the script found worth comparing
    error: str = ""


class Run:
    """What a script may do in both worlds."""

    model: nn.Module
    world_size: int

    def __init__(self, case: Case) -> None:
        self.case = case
        self.notes: list[Any] = []
        self.losses: list[list[float]] = []

    def parameters(self) -> list[nn.Parameter]:
        """What an optimizer holds, as `run.named`."""
        return [param for _, param in self.named]

    def gradients(self, step: int, work: Work | None = None) -> Tensor:
        """Forward and backward of every rank's micro-batch, or other `work`; the (first rank's) loss."""
        return self._gradients(work or (lambda model, rank: self._work(model, rank, step)))

    def _work(self, model: nn.Module, rank: int, step: int) -> Tensor:
        self.case.before(model, rank, step)
        loss = self.case.loss(model, rank, step)
        self.case.backward(loss)
        return loss.detach()


class Sharded(Run):
    def __init__(self, case: Case, stage: int, **options: Any) -> None:
        super().__init__(case)
        self.stage = stage
        self.zero = zerolab.shard(build(case), stage, **{"units": case.units, **options})
        self.model, self.world_size, self.rank = self.zero.model, self.zero.world_size, self.zero.rank
        self.named = list(self.model.named_parameters())
        self.losses = [[] for _ in range(self.world_size)]
        self.no_sync, self.full_parameters = self.zero.no_sync, self.zero.full_parameters

    def _gradients(self, work: Work) -> Tensor:
        loss = work(self.model, self.rank)
        self.losses[self.rank].append(loss.item())
        return loss

    def each(self, work: Work) -> None:
        """Something done with every replica of the model."""
        work(self.model, self.rank)

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        optimizer.zero_grad(set_to_none)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.notes.append(self.zero.clip_grad_norm_(max_norm, norm_type).item())

    def result(self) -> Result:
        return Result(self.zero.full_state_dict(), self.losses, self.notes)


class Alone(Run):
    def __init__(self, case: Case, ranks: int, precision: Precision | None = None) -> None:
        super().__init__(case)
        precision = precision or Precision(None, None, None, cast_inputs=False)
        self.world_size = ranks
        self.model = build(case)
        dtypes = [precision.dtypes(p.dtype, p.requires_grad) for p in self.model.parameters()]
        self.reduce_dtypes = [d.reduce for d in dtypes]
        self.named = [
            (name, nn.Parameter(p.detach().to(d.master, copy=True), p.requires_grad))
            for (name, p), d in zip(self.model.named_parameters(), dtypes, strict=True)
        ]
        for p, d in zip(self.model.parameters(), dtypes, strict=True):
            p.data = p.data.to(d.compute)
        self.replicas = [self.model] + [copy.deepcopy(self.model) for _ in range(ranks - 1)]
        if precision.cast_inputs and precision.compute:
            for replica in self.replicas:
                replica.register_forward_pre_hook(
                    lambda module, args, kwargs: _cast((args, kwargs), precision.compute), with_kwargs=True
                )
        self.losses = [[] for _ in range(ranks)]
        self.sync = True

    def _update(self) -> None:
        """Show the replicas what the optimizer made of the masters."""
        with torch.no_grad():
            for replica in self.replicas:
                for param, (_, master) in zip(replica.parameters(), self.named, strict=True):
                    param.copy_(master)

    def _gradients(self, work: Work) -> Tensor:
        self._update()
        for rank, replica in enumerate(self.replicas):
            self.losses[rank].append(work(replica, rank).item())
        if self.sync:
            for i, (_, master) in enumerate(self.named):
                mean = _mean([list(replica.parameters())[i].grad for replica in self.replicas], self.reduce_dtypes[i])
                if mean is not None:
                    mean = mean.to(master.dtype)
                    master.grad = mean if master.grad is None else master.grad + mean
            for replica in self.replicas:
                replica.zero_grad()
        return torch.tensor(self.losses[0][-1])

    def each(self, work: Work) -> None:
        self._update()
        for rank, replica in enumerate(self.replicas):
            work(replica, rank)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        yield
        self.sync = True

    def full_parameters(self) -> Any:
        return nullcontext()

    def zero_grad(self, optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        """Also of what replicas keep back under no_sync."""
        optimizer.zero_grad(set_to_none)
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
        for replica in self.replicas:
            for param, (_, master) in zip(replica.parameters(), self.named, strict=True):
                if id(master) in held:
                    param.grad = None

    def clip(self, max_norm: float, norm_type: float = 2.0) -> None:
        self.notes.append(torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type).item())

    def result(self) -> Result:
        names = {name: master.detach() for name, master in self.named}
        same = {id(param): names[name] for name, param in self.model.named_parameters()}
        aliases = {name: same[id(param)] for name, param in self.model.named_parameters(remove_duplicate=False)}
        return Result({**self.model.state_dict(), **aliases}, self.losses, self.notes)


def _mean(grads: list[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    if all(grad is None for grad in grads):
        return None
    some = next(grad for grad in grads if grad is not None)
    wide = torch.promote_types(some.dtype, torch.float32)
    total = torch.zeros_like(some, dtype=wide)
    for rank, grad in enumerate(grads):
        grad = torch.zeros_like(some) if grad is None else grad
        grad = grad.to(dtype).to(wide)  # as it travels
        total = grad if rank == 0 else total + grad
    return (total / len(grads)).to(dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


# -- run and compare ------------------------------------------------------------------------------------------------


def run_alone(script: Callable[[Run], None], case: Case, ranks: int, precision: Precision | None) -> Result:
    run = Alone(case, ranks, precision)
    script(run)
    return run.result()


def run_sharded(script: Callable[[Run], None], case: Case, stages: Any, options: dict[str, Any]) -> list[Result]:
    """One result for each stage; an error ends the list, so that no rank is left waiting in a later stage."""
    results = []
    for stage in stages:
        try:
            run = Sharded(case, stage, **options)
            script(run)
            results.append(run.result())
            gathered = [unit.name for unit in run.zero.units if unit.whole.untyped_storage().size()]
            if stage == 3 and gathered:
                results[-1] = results[-1]._replace(error=f"still gathered: {gathered}")
        except Exception:
            results.append(Result({}, [], [], traceback.format_exc()))
            break
    return results


def agree(
    ranks: zerolab.Ranks,
    script: Callable[[Run], None],
    case: Case,
    n: int = 3,
    precision: Precision | None = None,
    exact: bool | None = None,
    stages: Any = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
    **options: Any,
) -> None:
    """Assert that `script` gives on `n` ranks, in every stage, what it gives in one process."""
    exact = case.exact if exact is None else exact
    stages = case.stages if stages is None else stages
    expected = ranks.run(run_alone, script, case, n, precision, ranks=1, timeout=60)[0]
    everyone = ranks.run(
        run_sharded, script, case, stages, {"precision": precision, **options}, ranks=n, timeout=100, group_timeout=20
    )
    for rank, results in enumerate(everyone):
        for stage, got in zip(stages, results):
            where = f"stage {stage}, rank {rank} of {n}"
            assert not got.error, f"{where}: {got.error}"
            assert list(got.state) == list(expected.state), where
            for name, value in expected.state.items():
                mine = got.state[name]
                assert mine.dtype == value.dtype and mine.shape == value.shape, f"{where}: {name}"
                limits = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": atol}
                torch.testing.assert_close(mine, value, **limits, msg=lambda m: f"{where}: {name}: {m}")  # noqa: B023
            if exact:
                assert got.losses[rank] == expected.losses[rank], where
            else:
                assert got.losses[rank] == pytest_approx(expected.losses[rank]), where
            assert len(got.notes) == len(expected.notes), where
            for mine, value in zip(got.notes, expected.notes):
                assert mine == (pytest_approx(value) if isinstance(value, float) else value), f"{where}: {got.notes}"
    for results in everyone:
        assert [r.notes for r in results] == [r.notes for r in everyone[0]], "ranks have other notes"


def pytest_approx(value: Any) -> Any:
    import pytest

    return pytest.approx(value, rel=1e-3, abs=1e-5)


def attempt(function: Callable[..., Any], *args: Any) -> str | None:
    """What `function` raised, as "Class: message", or None."""
    try:
        function(*args)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def together(value: Any) -> list[Any]:
    """`value` of every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
