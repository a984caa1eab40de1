"""The ZeRO paper's own numbers, and its models as GPTs that `simulate` can run.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", arXiv 1910.02054,
Figure 1 and Table 1. Values are decimal gigabytes of model states per device, in mixed precision with Adam. The paper
rounds most values of the table and cuts off the digits of some.
"""

from __future__ import annotations

import torch

from zerolab.engine.engine import Engine
from zerolab.engine.precision import Precision
from zerolab.measure.simulation import Simulation, simulate
from zerolab.tasks.models import GPT, Block

PARAMETERS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}

# Layers and width of a GPT with as many parameters as the paper's models; heads of 128, a context of 1,024 tokens.
SIZES = {"7.5B": (36, 4096), "128B": (101, 10240), "1T": (127, 25600)}
CONTEXT, VOCABULARY = 1024, 30_000
BF16 = Precision(torch.bfloat16)

FIGURE_1 = (120, 31.4, 16.6, 1.9)  # 7.5B on 64 devices: the baseline and stages 1, 2, 3

# devices -> for each model the values of stages 1, 2, 3
TABLE_1 = {
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


def simulate_gpt(
    layers: int, width: int, stage: int | type[Engine], ranks: int, precision: Precision | None = None
) -> Simulation:
    """Simulate one rank of `ranks` that trains a GPT on one sequence of 1,024 tokens. Default precision: bf16."""

    def build() -> GPT:
        return GPT(layers, width, heads=max(1, width // 128), context=CONTEXT, vocabulary=VOCABULARY)

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.zeros(1, CONTEXT, dtype=torch.long)
        return tokens, tokens

    return simulate(build, stage, ranks, precision or BF16, inputs=inputs, units=[Block])
