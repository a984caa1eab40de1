"""torch.compile of a block, of its forward and of the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import all_say, attempt
from torch import Tensor

import zerolab
from zerolab.trial.numbers import alone, build
from zerolab.trial.zoo import CASES, Plain


def compiled(how: str, inner: str, stages: tuple[int, ...]) -> dict[int, Any]:
    """Train with compiled blocks: parameters, and what was compiled: in which step, and how many operators."""
    from torch._dynamo.backends.registry import lookup_backend

    results = {}
    for stage in stages:
        torch._dynamo.reset()
        case, graphs, now = CASES["plain"], [], [0]

        def backend(graph, examples, graphs=graphs, now=now):
            graphs.append((now[0], sum(node.op == "call_function" for node in graph.graph.nodes)))
            return lookup_backend(inner)(graph, examples)

        zero = zerolab.shard(build(case), stage, units=case.units)
        for block in zero.model.blocks:
            if how == "module":
                block.compile(backend=backend)
            elif how == "forward":
                block.forward = torch.compile(block.forward, backend=backend)
        if how == "model":
            zero.model.compile(backend=backend)
        optimizer = case.optimizer(zero.model)
        for now[0] in range(5):
            case.loss(zero.model, zero.rank, now[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
        results[stage] = zero.full_state_dict(), graphs
    return results


def five_steps_alone(ranks: int) -> dict[str, Tensor]:
    case = Plain()
    case.steps = 5
    return alone(case, ranks)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "inner", "stages"),
    [
        ("module", "aot_eager", (3,)),
        pytest.param("module", "aot_eager", (0, 1, 2), marks=pytest.mark.exhaustive),
        ("forward", "aot_eager", (3,)),
        pytest.param("model", "aot_eager", (2, 3), marks=pytest.mark.exhaustive),
        pytest.param("module", "inductor", (3,), marks=pytest.mark.exhaustive),  # calls the C++ compiler
    ],
)
def test_torch_compile(ranks, how, inner, stages):
    """`block.compile()`, a compiled forward, and `model.compile()`: a block's operators are compiled together,
    once, and the numbers are those of one process that compiles nothing: with aot_eager bit for bit."""
    expected = ranks.run(five_steps_alone, 2, ranks=1)[0]
    for results in ranks.run(compiled, how, inner, stages, ranks=2):
        for stage, (state, graphs) in results.items():
            assert max(size for _, size in graphs) == 5, "norm, up, gelu, down, +: all in one graph"
            assert how == "model" or len(graphs) == 1, f"stage {stage}: one graph serves all blocks, as in FSDP2"
            assert all(step <= 1 for step, _ in graphs), f"stage {stage}: compiled again and again"
            for name, value in expected.items():
                tolerance = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-3, "atol": 1e-4}
                torch.testing.assert_close(state[name], value, **tolerance, msg=f"stage {stage}: {name}")


def with_compiled_autograd(stage: int) -> str:
    zero = zerolab.shard(build(CASES["plain"]), stage, units=CASES["plain"].units)

    def step() -> None:
        CASES["plain"].loss(zero.model, zero.rank, 0).backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        return attempt(torch.compile(step, backend="eager"))


def test_compiled_autograd_is_refused_by_name(ranks):
    for stage in (0, 3):
        all_say(ranks.run(with_compiled_autograd, stage, ranks=2), "RuntimeError", "compiled_autograd = False")
