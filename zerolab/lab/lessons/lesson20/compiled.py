"""What torch's compiler sees of collectives: in a graph that has them, and between the pieces that hooks leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.fx_passes import bucketing
from torch._inductor.pattern_matcher import stable_topological_sort


def collectives(graph: torch.fx.GraphModule) -> int:
    named = (str(node.target) for node in graph.graph.nodes)
    return sum("c10d" in name and "wait_tensor" not in name for name in named)


def merged(model: nn.Module, x: Tensor, y: Tensor) -> tuple[dict[str, list[int]], bool, float]:
    """Collectives of forward and backward before and after torch's pass puts them into buckets of 0.25 MB, whether the
    gradients are bit for bit those of the model uncompiled, and the size of a bucket that torch would take, in MB.
    """
    counts: dict[str, list[int]] = {"forward": [], "backward": []}

    def compiler(direction: str, bucket: Callable[..., Any]) -> Callable[..., Any]:
        def compile_it(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
            counts[direction].append(collectives(graph))
            bucket(graph, lambda number: 0.25)
            stable_topological_sort(graph.graph)
            counts[direction].append(collectives(graph))
            graph.recompile()
            return make_boxed_func(graph.forward)

        return compile_it

    def gradients(model: Any) -> list[Tensor]:
        model.zero_grad()
        model(x, y).backward()
        return [param.grad.to_local().clone() for param in model.parameters()]

    eager = gradients(model)
    backend = aot_autograd(
        fw_compiler=compiler("forward", bucketing.bucket_all_gather),
        bw_compiler=compiler("backward", bucketing.bucket_reduce_scatter),
    )
    same = all(map(torch.equal, eager, gradients(torch.compile(model, backend=backend, fullgraph=True))))
    return counts, same, bucketing.bucket_cap_mb_by_bucket_idx_default(0)


def pieces(model: nn.Module, x: Tensor, y: Tensor) -> list[int]:
    """The collectives in each graph into which torch divides the model's forward."""
    graphs = []

    def kept_as_it_is(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(collectives(graph))
        return graph.forward

    torch.compile(model, backend=kept_as_it_is)(x, y).backward()
    return graphs
