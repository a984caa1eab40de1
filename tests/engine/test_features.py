"""What training for real needs beside a plain step, at every stage: accumulation and its bytes, evaluation and
generation between steps, torch.compile, clipping of scaled gradients. Always against one process."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import pytest
import torch
from test_measure import BF16, PADDED, PARAMETERS, TwoLayers
from torch import Tensor, nn
from zoo import CASES, Block, Checkpointed, Plain, Stack, alone, build, words

import zerolab
from zerolab.measure import model_states, timeline

PLAIN = CASES["plain"]


# -- accumulation: what it holds, to the byte -----------------------------------------------------------------------


def held_between(precision: zerolab.Precision | None) -> list[tuple[list[int], list[int], int]]:
    """Bytes of gradients after each of three backwards, the same under no_sync and after one that ends it, and how many
    elements of parameters this rank updates."""
    seen = []
    for stage in range(4):
        zero = zerolab.shard(TwoLayers(), stage, units=[nn.Linear], precision=precision)
        optimizer = torch.optim.AdamW(zero.model.parameters())

        def backward(zero=zero, optimizer=optimizer) -> int:
            zero.model(torch.ones(3, 6)).backward()
            return model_states(zero, optimizer)["gradients"]

        synchronised = [backward() for _ in range(3)]
        optimizer.zero_grad()
        with zero.no_sync():
            kept_back = [backward() for _ in range(3)]
        kept_back.append(backward())
        seen.append((synchronised, kept_back, sum(p.numel() for p in zero.model.parameters())))
    return seen


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
def test_bytes_of_accumulation(ranks, n, name):
    """Under no_sync gradients are whole in every stage, and in float32 from the second micro-batch on; the backward
    that reduces them brings them back to what one backward holds. Reduced each time, they are held as after one
    backward; in bf16 they are then added up in float32, of what this rank updates (which has no padding)."""
    whole, share = PADDED[name][n], PADDED[name][n] // n
    size = 4 if name == "fp32" else 2
    everyone = ranks.run(held_between, BF16 if name == "bf16" else None, ranks=n)
    for stage in range(4):
        mine = share if stage >= 2 else whole
        for synchronised, kept_back, elements in (seen[stage] for seen in everyone):
            added = 4 * mine if name == "fp32" else 4 * elements
            assert synchronised == [size * mine, added, added], f"stage {stage}"
            assert kept_back == [size * whole, 4 * whole, 4 * whole, size * mine], f"stage {stage}"
        assert sum(seen[stage][2] for seen in everyone) == PARAMETERS * (1 if stage else n)


def let_go() -> list[tuple[list[int], list[int]]]:
    """Bytes of the whole gradients to which somebody else still refers: after a backward, and after one that ends a
    no_sync() in which parts of them were shown."""
    seen = []
    for stage in zerolab.STAGES:
        kept: list[Tensor] = []

        class Kept(stage):
            def post_backward(self, unit: zerolab.Unit, kept: list[Tensor] = kept) -> None:
                kept.append(unit.bucket.full)
                super().post_backward(unit)

        zero = Kept(TwoLayers(), units=[nn.Linear])

        def backward(zero=zero, kept=kept) -> list[int]:
            kept.clear()
            zero.model(torch.ones(3, 6)).backward()
            return [grad.untyped_storage().size() for grad in kept]

        after_one = backward()
        zero.model.zero_grad()
        with zero.no_sync():
            backward()
        shown = [param.grad for param in zero.model.parameters()]
        seen.append((after_one, backward()))
        assert all(grad.isfinite().all() for grad in shown)
    return seen


def test_whole_gradients_go_when_they_are_reduced(ranks):
    """And not when the last reference goes, which a thread of gloo's may hold. What no_sync has shown stays."""
    for seen in ranks.run(let_go, ranks=2):
        for stage, (after_one, after_no_sync) in enumerate(seen):
            assert sum(after_one) == (0 if stage >= 2 else PADDED["fp32"][2] * 4)
            assert sum(after_no_sync) == PADDED["fp32"][2] * 4


def in_kept_memory(keep: bool) -> list[tuple[list[Tensor], list[bool], list[int]]]:
    """Four steps, gradients set to None after each, but the user still has those of the second. For each stage: the
    gradients of every step, whether some of the next lie where they lay, and bytes of gradients after each zero_grad(),
    in the end once more by the timeline."""
    seen = []
    for stage in zerolab.STAGES:
        torch.manual_seed(0)
        zero = stage(TwoLayers(), units=[nn.Linear])
        zero.keep_grad_memory = keep
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.1)
        grads, places, held, mine = [], [], [], None
        for step in range(4):
            zero.model(torch.full((3, 6), 1.0 + step + zero.rank)).square().sum().backward()
            shown = [param.grad for param in zero.model.parameters()]
            grads += [grad.clone() for grad in shown]
            places.append({grad.untyped_storage().data_ptr() for grad in shown if grad.numel()})
            if step == 1:
                mine = [(grad, grad.clone()) for grad in shown]
            if step == 3:
                assert all(torch.equal(grad, copy) for grad, copy in mine), "a gradient that the user has was changed"
            optimizer.step()
            del shown
            zero.model.zero_grad()
            held.append(model_states(zero, optimizer)["gradients"])
        with timeline(zero, optimizer) as line:
            torch.ones(1)
        held.append(line.by_kind(len(line.events))["gradients"])
        seen.append((grads, [not old.isdisjoint(new) for old, new in pairwise(places)], held))
    return seen


def test_keep_grad_memory(ranks):
    """The same gradients, in stages 0 and 1 in the memory of the last ones, unless the user has one of those."""
    without, with_it = (ranks.run(in_kept_memory, keep, ranks=2) for keep in (False, True))
    for plain, kept in zip(without, with_it, strict=True):
        for stage in range(4):
            assert all(map(torch.equal, plain[stage][0], kept[stage][0]))
            assert plain[stage][2] == [0] * 5
            if stage < 2:
                assert kept[stage][1] == [True, False, True]
                assert kept[stage][2] == [PADDED["fp32"][2] * 4] * 5
            else:
                assert kept[stage][2] == [0] * 5


# -- evaluation and generation, between the steps -------------------------------------------------------------------


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


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_evaluation_and_generation(ranks, n):
    """Bit for bit; training goes on as if nothing had been; and only stage 3 gathers more than once after a step."""
    seen, state = ranks.run(evaluated_alone, n, ranks=1)[0]
    by_step = [seen[3 * i : 3 * i + 3] for i in range(n * Evaluated.steps)]  # step 0: rank 0, rank 1, ...; step 1: ...
    for rank, results in enumerate(ranks.run(evaluated, ranks=n, timeout=60, group_timeout=20)):
        expected = [outputs for step in range(Evaluated.steps) for outputs in by_step[step * n + rank]]
        for i, (got, got_state, gathers) in enumerate(results):
            assert len(got) == len(expected) == 9
            assert all(torch.equal(one, other) for one, other in zip(got, expected, strict=True)), f"stage {i // 2}"
            assert all(torch.equal(got_state[name], value) for name, value in state.items()), f"stage {i // 2}"
            # In stage 3 two passes over four units; then, for each of four words, the three blocks, and the root once
            # for a registered method, else for each of its parts: emb, norm and head.
            stage_3 = 2 * 4 + 4 * 3 + (1 if i % 2 else 4 * 3)
            assert gathers == [[0] * 3, [0, 4, 4], [0, 4, 4], [stage_3] * 3][i // 2], f"stage {i // 2}"


def of_unequal_length(stage: int) -> tuple[str, float, dict[str, Tensor]]:
    """Between the steps, the first rank evaluates no batch, the second one, and so on."""
    zero = zerolab.shard(build(PLAIN), stage, units=[Block])
    optimizer = PLAIN.optimizer(zero.model)
    for step in range(PLAIN.steps):
        started = time.monotonic()
        try:
            if step:
                with torch.no_grad():
                    for i in range(zero.rank):
                        zero.model(words(0, i, 1, 4))
            PLAIN.loss(zero.model, zero.rank, step).backward()
        except zerolab.CommError as error:
            return str(error), time.monotonic() - started, {}
        optimizer.step()
        optimizer.zero_grad()
    return "", 0.0, zero.full_state_dict()


def test_evaluation_of_unequal_length(ranks):
    """Stages 0 to 2 do not mind; stage 3, where each pass gathers, says so on every rank, in seconds."""
    expected, _ = ranks.run(alone, PLAIN, 3, ranks=1)[0]
    for stage in range(3):
        for _, _, state in ranks.run(of_unequal_length, stage, ranks=3):
            assert all(torch.equal(state[name], value) for name, value in expected.items()), f"stage {stage}"
    for message, seconds, _ in ranks.run(of_unequal_length, 3, ranks=3, timeout=60, group_timeout=40):
        assert "rank 0" in message and "gather" in message and "stage 0, 1 or 2" in message
        assert seconds < 15


# -- torch.compile --------------------------------------------------------------------------------------------------


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


@pytest.mark.timeout(240)  # compiling takes long on a busy machine
@pytest.mark.parametrize(
    ("how", "inner", "stages"),
    [
        ("module", "aot_eager", (0, 1, 2, 3)),
        ("forward", "aot_eager", (3,)),
        ("model", "aot_eager", (2, 3)),
        pytest.param("module", "inductor", (3,), marks=pytest.mark.slow),  # calls the C++ compiler
    ],
)
def test_torch_compile(ranks, how, inner, stages):
    """`block.compile()`, a compiled forward, and `model.compile()`: a block's operators are compiled together,
    once, and the numbers are those of one process that compiles nothing: with aot_eager bit for bit."""
    expected = ranks.run(five_steps_alone, 2, ranks=1)[0]
    for results in ranks.run(compiled, how, inner, stages, ranks=2, timeout=200, group_timeout=150):
        for stage, (state, graphs) in results.items():
            assert max(size for _, size in graphs) == 5, "norm, up, gelu, down, +: all in one graph"
            assert all(step <= 1 for step, _ in graphs), f"stage {stage}: compiled again and again"
            for name, value in expected.items():
                tolerance = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-3, "atol": 1e-4}
                torch.testing.assert_close(state[name], value, **tolerance, msg=f"stage {stage}: {name}")


# -- what is used together ------------------------------------------------------------------------------------------

P_NORMS = (1.0, 2.0, float("inf"))


def scaled_and_clipped() -> list[Any]:
    """float16, two micro-batches of which the first is kept back, unscaled, clipped by each p in turn."""
    results = []
    for stage in range(4):
        zero = zerolab.shard(build(PLAIN), stage, units=[Block], precision=zerolab.Precision(torch.float16))
        optimizer = torch.optim.SGD(zero.model.parameters(), lr=0.5)
        scaler = zerolab.LossScaler(zero, init_scale=1024.0)
        norms, calls = [], []
        for step, p in enumerate(P_NORMS):
            with zero.no_sync():
                scaler.scale(PLAIN.loss(zero.model, zero.rank, 2 * step).float()).backward()
            scaler.scale(PLAIN.loss(zero.model, zero.rank, 2 * step + 1).float()).backward()
            scaler.unscale_(optimizer)
            with zero.comm.record() as made:
                norms.append(zero.clip_grad_norm_(0.1, p).item())
            calls.append(len(made))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append((norms, calls, scaler.get_scale(), zero.full_state_dict()))
    return results


def scaled_and_clipped_alone(ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank's micro-batches are added in float32 and rounded to float16; so is the mean over the ranks."""
    model, half = build(PLAIN), build(PLAIN).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step, p in enumerate(P_NORMS):
        for copy, param in zip(half.parameters(), model.parameters(), strict=True):
            copy.data.copy_(param.data)
        own = []
        for rank in range(ranks):
            parts = []
            for micro in range(2):
                half.zero_grad()
                (1024.0 * PLAIN.loss(half, rank, 2 * step + micro).float()).backward()
                parts.append([param.grad.float() for param in half.parameters()])
            own.append([(a + b).half().float() for a, b in zip(*parts, strict=True)])
        for param, grads in zip(model.parameters(), zip(*own, strict=True), strict=True):
            param.grad = (sum(grads[1:], grads[0]) / ranks).half().float() / 1024.0
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, p).item())
        optimizer.step()
    return norms, model.state_dict()


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_float16_kept_back_unscaled_and_clipped(ranks, n):
    norms, state = ranks.run(scaled_and_clipped_alone, n, ranks=1)[0]
    assert all(norm > 0.2 for norm in norms), "every step is clipped"
    everyone = ranks.run(scaled_and_clipped, ranks=n, timeout=60)
    for results in everyone:
        for stage, (mine, calls, scale, got) in enumerate(results):
            assert mine == everyone[0][stage][0], "the same on every rank"
            assert mine == pytest.approx(norms, rel=1e-4)
            assert calls == [1 if stage else 0] * 3 and scale == 1024.0, "at most one all-reduce"
            for name, value in state.items():
                torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-5, msg=f"stage {stage}: {name}")


def recomputed(precision: zerolab.Precision) -> list[list[dict[str, Tensor]]]:
    """Blocks in no checkpoint, in a re-entrant one and in the other, with micro-batches kept back."""
    cases = [PLAIN, Checkpointed(True, "blocks"), Checkpointed(False, "blocks")]
    results = []
    for stage in range(4):
        states = []
        for case in cases:
            zero = zerolab.shard(build(case), stage, units=[Block], precision=precision)
            optimizer = case.optimizer(zero.model)
            for step in range(3):
                with zero.no_sync():
                    case.loss(zero.model, zero.rank, 2 * step).backward()
                case.loss(zero.model, zero.rank, 2 * step + 1).backward()
                optimizer.step()
                optimizer.zero_grad()
                assert stage < 3 or not any(unit.full.untyped_storage().size() for unit in zero.units)
            states.append(zero.full_state_dict())
        results.append(states)
    return results


@pytest.mark.parametrize("n", [1, 3])
def test_recomputed_in_bf16_with_micro_batches_kept_back(ranks, n):
    """Both kinds of activation checkpointing change no bit, and no stage differs from another."""
    for results in ranks.run(recomputed, BF16, ranks=n, timeout=60):
        expected = results[0][0]
        assert any(not torch.equal(expected[name], value) for name, value in build(PLAIN).state_dict().items())
        for stage, states in enumerate(results):
            for state in states:
                assert all(torch.equal(state[name], value) for name, value in expected.items()), f"stage {stage}"


# -- buffers --------------------------------------------------------------------------------------------------------


def same_buffers() -> list[Any]:
    """BatchNorm's statistics after training, and after the first rank's were given to all, before the model goes on."""
    case, results = CASES["batch norm, channels_last"], []
    for stage in range(4):
        zero = zerolab.shard(build(case), stage, units=case.units)
        optimizer = case.optimizer(zero.model)
        seen = []
        for step in range(2):
            case.loss(zero.model, zero.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append({name: buffer.clone() for name, buffer in zero.model.named_buffers()})
            zero.broadcast_buffers()
            seen.append({name: buffer.clone() for name, buffer in zero.model.named_buffers()})
        zero.model.eval()
        with torch.no_grad():
            seen.append(case.loss(zero.model, 0, 7))
        results.append(seen)
    return results


@pytest.mark.parametrize("n", [1, 2, 4])
def test_broadcast_buffers(ranks, n):
    everyone = ranks.run(same_buffers, ranks=n)
    for stage in range(4):
        for own, equal in ((0, 1), (2, 3)):
            first = everyone[0][stage][own]
            for rank in range(n):
                mine, after = everyone[rank][stage][own], everyone[rank][stage][equal]
                assert all(torch.equal(after[name], first[name]) for name in first)
                assert rank == 0 or not torch.equal(mine["1.running_mean"], first["1.running_mean"])
        assert all(torch.equal(results[stage][4], everyone[0][stage][4]) for results in everyone)
        assert int(everyone[0][stage][3]["1.num_batches_tracked"]) == 2
