"""`zerolab plan`: what each stage holds and moves by the formulas, which ones fit, and the largest model that does."""

from __future__ import annotations

from zerolab.measure import planning
from zerolab.measure.units import in_bytes


def run(
    parameters: float,
    ranks: int,
    memory: int | None,
    precision: str,
    optimizer: str,
    activations: int,
    offload: bool,
    replicas: int,
) -> int:
    """Print the plan. Exit status: 1 if `memory` (bytes of a GPU) is given and no stage fits in it.

    Raises ValueError if the plan makes no sense.
    """
    import rich

    rows = planning.plan(parameters, ranks, memory, precision, optimizer, activations, offload, replicas)
    model = f"{planning.in_parameters(parameters)} parameters, {ranks} ranks"
    if replicas > 1:
        model += f" in {replicas} replicas"
    rich.print(planning.table(rows, f"{model}\n{precision}, {optimizer}"))
    if planning.PRECISIONS[precision].master is not None and not offload:
        print("Parameters include the float32 masters, 4 bytes each.")
    if optimizer in planning.OWNED:
        print(
            f"All parameters count as {optimizer}'s, in OwnerOptimizer: its state is shared out in every stage, and a "
            "rank sends\n12Ψ(N-1)/N² bytes more (stage 0: 4Ψ(N-1)/N). In a step, an owner also holds the gradient and "
            "the master\nof one matrix."
        )
    if offload:
        print("The host keeps masters, gradients and the optimizer's state; stage 0 has no offload.")
    if replicas > 1:
        print("What is sent stays inside a replica, but for the gradients' shards. Stage 0 is one group.")
    print("Not counted: the units in flight (see zerolab simulate), and what torch itself needs.")
    if memory is None:
        return 0
    fitting = [planning.STAGES[row.stage] for row in rows if row.fits]
    print(f"In {in_bytes(memory)} per GPU " + (f"it fits with {', '.join(fitting)}." if fitting else "no stage fits."))
    return 0 if fitting else 1
