"""What is looked at when a whole training script runs: with what it calls the model, its optimizer, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from zerolab.engine.engine import Engine
from zerolab.lab.exercises.observing import Play
from zerolab.tasks.data import Split

RATE = 0.5  # that the optimizer is made with


class Watch:
    """What a training script does on this rank: with which samples it calls the model, and its optimizer.

    key: a sample as the model gets it -> what tells it from all others.
    """

    def __init__(self, data: Split, key: Callable[[Tensor], Tensor]) -> None:
        rows = torch.cat([data.inputs, data.validation_inputs])
        self.key = lambda row: key(row.detach()).numpy().tobytes()
        self.numbers = {self.key(row): number for number, row in enumerate(rows)}
        self.size = len(data.inputs)
        self.made = 0
        self.rates: list[float] = []  # the learning rate of each step
        self.learnt: dict[int, list[int]] = {}  # by step
        self.modes: dict[str, set[str]] = {"learns": set(), "validates": set()}
        self.validated: list[int] = []
        self.keeps_activations = False  # of a validation

    def saw(self, inputs: Tensor, training: bool) -> None:
        numbers = [self.numbers.get(self.key(row), -1) for row in inputs]
        validates = any(number >= self.size for number in numbers)
        if numbers:
            self.modes["validates" if validates else "learns"].add("training" if training else "evaluation")
        if validates:
            self.validated += numbers
            self.keeps_activations |= torch.is_grad_enabled()
        elif torch.is_grad_enabled():
            self.learnt.setdefault(len(self.rates), []).extend(numbers)

    def make_optimizer(self, params: Any) -> SGD:
        self.made += 1
        optimizer = SGD(params, lr=RATE, momentum=0.5)
        optimizer.register_step_pre_hook(self.steps)
        return optimizer

    def steps(self, optimizer: SGD, *arguments: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])


@contextmanager
def engines_made() -> Iterator[list[Any]]:
    found: list[Any] = []
    before = Engine.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        found.append(self)
        before(self, *args, **kwargs)

    Engine.__init__ = init  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Engine.__init__ = before  # type: ignore[method-assign]


def play_training(
    play: Play,
    model: nn.Module,
    data: Split,
    key: Callable[[Tensor], Tensor],
    steps: int,
    train: Callable[[Callable[[Any], SGD]], Any],
    accuracy_of: Callable[[], float] | None = None,
) -> None:
    """One run of a script, and all that can be seen of it.

    train: calls the answer's train() with a make_optimizer. accuracy_of: that of the model as it is at the end, where
    it depends on which samples a rank has taken.
    """
    play.loose = 1e-12
    play.keep("`data`", tuple(data))
    watch = Watch(data, key)
    model.record = watch.saw  # type: ignore[assignment]
    with engines_made() as engines, play.event("train()", slack=math.inf, draws=True):
        result = train(watch.make_optimizer)
    del play.tape[-1].clues["asked of all processes"]  # on which a script runs
    play.see("the stage of the engine that was made", engines[-1].stage if engines else None)
    play.see("the engine has the given model", bool(engines) and engines[-1].model is model)
    play.see("steps of the optimizer", len(watch.rates))
    play.clue("optimizers that were made", watch.made)
    for step, rate in enumerate(watch.rates):
        play.see(f"the learning rate of step {step + 1}", rate)
    parts = [play.everyone(watch.learnt.get(step, [])) for step in range(steps)]
    together = [str(sorted(number for part in each for number in part)) for each in parts]
    for step, samples in enumerate(together):
        play.clue(f"samples of step {step + 1}", samples)
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        play.see("the result", result)
        return
    play.see("the result", ["losses", "accuracy"])
    losses, accuracy = result
    play.see("the losses", losses, _other_samples(play, together))
    if accuracy_of is None or not isinstance(accuracy, float):
        play.see("the accuracy", accuracy)
    if engines and engines[-1].model is model:
        whole = engines[-1].full_state_dict()
        play.see("the parameters after the last step", {name: whole[name] for name, _ in model.named_parameters()})
        if accuracy_of is not None:
            with engines[-1].full_parameters():
                right = accuracy_of()
            said = f"it is {accuracy}, and that is {right:.4g}"
            play.see("the accuracy is that of the trained model", abs(accuracy - right) < 1e-6, said)
    for what, modes in watch.modes.items():  # of all ranks, since one may have got no sample
        found = sorted(set().union(*play.everyone(sorted(modes))))
        play.see(f"the mode in which the model {what}", " and ".join(found))
    for step, each in enumerate(parts):
        play.at_most(f"samples that a rank learns from in step {step + 1}", max(1, *map(len, each)))
    validated = play.everyone(watch.validated)
    if play.size > 1 and all(len(set(each)) == len(data.validation_targets) for each in validated):
        play.world.note("right, but every rank validates with all samples: each could take its part")
    if watch.keeps_activations:
        play.world.note("right, but validation keeps activations for a backward that never comes: torch.no_grad()")


def _other_samples(play: Play, together: list[str]) -> str:
    """In words, the first step that learnt from other samples than the reference's. "" if none did."""
    clues = play.reference.tape[len(play.tape) - 1].clues if play.reference else {}
    for step, samples in enumerate(together, 1):
        if samples != (wanted := clues.get(f"samples of step {step}", samples)):
            return f"step {step} learnt from the samples {samples[1:-1]}, not {wanted[1:-1]}"
    return ""
