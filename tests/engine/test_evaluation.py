"""Evaluation and generation between training steps, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jobs_common import worlds
from torch import Tensor, nn

import zerolab
from zerolab.trial.numbers import Block, Stack, alone, build, words
from zerolab.trial.zoo import CASES, Plain

PLAIN = CASES["plain"]


class Speaker(nn.Module):
    """Generates word after word, through its parts: its own forward is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.drop = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.stack.body(self.stack.emb(tokens))
        return self.stack.head(self.stack.norm(hidden if self.training else self.drop(hidden)))

    @torch.no_grad()
    def generate(self, tokens: Tensor, more: int) -> Tensor:
        for _ in range(more):
            hidden = self.stack.norm(self.stack.body(self.stack.emb(tokens)))
            tokens = torch.cat([tokens, self.stack.head(hidden)[:, -1:].argmax(-1)], dim=1)
        return tokens


class Evaluated(Plain):
    """Before each step, what the model makes of a batch and how it goes on from a prompt, another on every rank."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.speak: Any = Speaker.generate

    def model(self) -> nn.Module:
        return Speaker()

    def before(self, model, rank, step):
        model.eval()
        with torch.no_grad():
            self.seen.append(model(words(rank, 50 + step, 3, 4)))
        with torch.inference_mode():
            self.seen.append(model(words(rank, 60 + step, 1, 6)).clone())
        self.seen.append(self.speak(model, words(rank, 70 + step, 2, 3), 4))
        model.train()


def evaluated() -> list[Any]:
    results = []
    for stage in range(4):
        for registered in (False, True):
            case = Evaluated()
            zero = zerolab.shard(build(case), stage, units=case.units)
            if registered:
                zero.register_forward_method("generate")
                case.speak = lambda model, *args: model.generate(*args)
            optimizer = case.optimizer(zero.model)
            gathers = []
            for step in range(case.steps):
                with zero.comm.record() as calls:
                    case.before(zero.model, zero.rank, step)
                gathers.append(len([call for call in calls if call.op == "all_gather" and not call.control]))
                assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
                case.loss(zero.model, zero.rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append((case.seen, zero.full_state_dict(), gathers))
    return results


def evaluated_alone(ranks: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    case = Evaluated()
    state, _ = alone(case, ranks)
    return case.seen, state


@pytest.mark.parametrize("n", worlds(2, others=(1, 3, 4)))
def test_evaluation_and_generation(ranks, n):
    """Bit for bit; training goes on as if nothing had been; and only stage 3 gathers more than once after a step."""
    seen, state = ranks.run(evaluated_alone, n, ranks=1)[0]
    by_step = [seen[3 * i : 3 * i + 3] for i in range(n * Evaluated.steps)]  # step 0: rank 0, rank 1, ...; step 1: ...
    for rank, results in enumerate(ranks.run(evaluated, ranks=n)):
        expected = [outputs for step in range(Evaluated.steps) for outputs in by_step[step * n + rank]]
        for i, (got, got_state, gathers) in enumerate(results):
            assert len(got) == len(expected) == 9
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), f"stage {i // 2}"
            assert all(torch.equal(got_state[name], value) for name, value in state.items()), f"stage {i // 2}"
            # In stage 3 two passes over four units; then, for each of four words, the three blocks, and the root once
            # for a registered method, else for each of its parts: emb, norm and head.
            stage_3 = 2 * 4 + 4 * 3 + (1 if i % 2 else 4 * 3)
            assert gathers == [[0] * 3, [0, 4, 4], [0, 4, 4], [stage_3] * 3][i // 2], f"stage {i // 2}"


def of_unequal_length(stage: int) -> tuple[str, dict[str, Tensor]]:
    """Between the steps, the first rank evaluates no batch, the second one, and so on."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = PLAIN.optimizer(zero.model)
    for step in range(PLAIN.steps):
        try:
            if step:
                with torch.no_grad():
                    for i in range(zero.rank):
                        zero.model(words(0, i, 1, 4))
            PLAIN.loss(zero.model, zero.rank, step).backward()
        except zerolab.CommError as error:
            return str(error), {}
        optimizer.step()
        optimizer.zero_grad()
    return "", zero.full_state_dict()


@pytest.mark.slow
def test_evaluation_of_unequal_length(ranks):
    """Stages 0 to 2 do not mind; stage 3, where each pass gathers, says so on every rank, before any timeout."""
    expected, _ = ranks.run(alone, PLAIN, 3, ranks=1)[0]
    for stage in range(3):
        for _, state in ranks.run(of_unequal_length, stage, ranks=3):
            assert all(torch.equal(state[name], value) for name, value in expected.items()), f"stage {stage}"
    for message, _ in ranks.run(of_unequal_length, 3, ranks=3):
        assert "rank 0" in message and "gather" in message and "stage 0, 1 or 2" in message
        assert "failed: " not in message


def generate() -> list[Any]:
    import transformers  # noqa: F401

    case = CASES["hugging face llama"]
    prompt = torch.tensor([[1, 2, 3]])
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    expected = build(case).generate(prompt, **options).tolist()
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage)
        zero.register_forward_method("generate")
        results.append(zero.model.generate(prompt, **options).tolist())
        case.loss(zero.model, zero.rank, 0).backward()
        assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
    return results, expected


@pytest.mark.exhaustive
def test_generation(ranks):
    for results, expected in ranks.run(generate, ranks=2):
        assert all(result == expected for result in results)
