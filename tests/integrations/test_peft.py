"""Adapters of peft on a frozen, sharded base, on real ranks, against one process with the same batches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs_common import attempt
from torch import Tensor, nn

import zerolab

os.environ["HF_HUB_OFFLINE"] = "1"
peft = pytest.importorskip("peft")
pytest.importorskip("transformers")

from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer  # noqa: E402
from transformers.models.gpt2.modeling_gpt2 import GPT2Block  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

from zerolab.integrations.transformers import ZeroTrainer  # noqa: E402

STAGES = (0, 1, 2, 3)
PROMPT = torch.tensor([[3, 4, 5]])


def base() -> nn.Module:
    """Two blocks, in float64: sums in another order show, if they are not exact."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).double()


def adapted(dora: bool) -> nn.Module:
    model = base()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", use_dora=dora)).double()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zeros at first, so that nothing would reach lora_A
            nn.init.normal_(param, std=0.1)
    return model


def trained(model: nn.Module, parts: list[int]) -> nn.Module:
    """Three steps on the batches of these ranks."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for step in range(3):
        for part in parts:
            tokens = torch.randint(3, 64, (2, 12), generator=torch.Generator().manual_seed(10 * step + part))
            (model(input_ids=tokens, labels=tokens).loss / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def sample(model: nn.Module) -> Tensor:
    return model.eval().generate(input_ids=PROMPT, max_new_tokens=6, do_sample=False)


def same(state: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return state.keys() == wanted.keys() and all(torch.equal(state[name], wanted[name]) for name in wanted)


def adapters(folder: str, dora: bool) -> list[dict[str, Any]]:
    n, rank = dist.get_world_size(), dist.get_rank()
    alone = trained(adapted(dora), list(range(n)))
    results = []
    for stage in STAGES:
        model = adapted(dora)
        zero = zerolab.shard(model, stage, units=LlamaDecoderLayer)
        zero.register_forward_method("generate")
        trained(model, [rank])
        state = zero.full_state_dict()
        said: dict[str, Any] = {"weights": same(state, alone.state_dict())}
        said["generated"] = torch.equal(sample(model), sample(alone))

        here = f"{folder}/{stage}-{rank}"
        model.save_pretrained(here, state_dict=state)
        read = PeftModel.from_pretrained(base(), here, autocast_adapter_dtype=False)
        said["saved"] = same(get_peft_model_state_dict(read), get_peft_model_state_dict(alone))

        said["refused"] = attempt(model.merge_and_unload) if stage else None
        plain = adapted(dora)
        plain.load_state_dict(state)
        said["merged"] = same(plain.merge_and_unload().state_dict(), trained_and_merged(alone))
        results.append(said)
    return results


def trained_and_merged(model: nn.Module) -> dict[str, Tensor]:
    copy = adapted(any("magnitude" in name for name in model.state_dict()))
    copy.load_state_dict(model.state_dict())
    return copy.merge_and_unload().state_dict()


@pytest.mark.slow
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_adapters_on_a_frozen_base(ranks, tmp_path: Path, dora):
    """Checkpointed blocks; the same bits as one process, which is exact for the mean of two ranks."""
    for results in ranks.run(adapters, str(tmp_path), dora, ranks=2):
        for stage, said in zip(STAGES, results, strict=True):
            refused = said.pop("refused")
            assert all(said.values()), (stage, said)
            if stage:
                assert "matmul of" in refused.text and "with zero.full_parameters()" in refused.text


# -- the Trainer ------------------------------------------------------------------------------------------------------


def by_the_trainer(folder: str, stage: int | None) -> dict[str, Any]:
    from test_transformers import Collator, Falling, arguments, gpt2, text

    model = get_peft_model(gpt2(0.0), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
    best = {"load_best_model_at_end": True, "metric_for_best_model": "worth", "label_names": ["labels"]}
    args = arguments(folder, save_strategy="epoch", greater_is_better=True, **best)
    data = {"train_dataset": text(0, 18), "eval_dataset": text(18, 5), "data_collator": Collator()}
    data["compute_metrics"] = Falling()
    if stage is None:
        trainer = Trainer(model, args, **data)
    else:
        trainer = ZeroTrainer(zero=zerolab.shard(model, stage, units=GPT2Block), args=args, **data)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    state = model.state_dict() if stage is None else trainer.zero.full_state_dict()
    best_model = trainer.state.best_model_checkpoint
    return {"best": Path(best_model).name, "state": {name: value.clone() for name, value in state.items()}}


@pytest.mark.slow
def test_the_trainer_saves_adapters_and_finds_the_best(ranks, tmp_path: Path):
    """The adapters of the first epoch, not of the last, as from the plain Trainer in torch's DDP."""
    wanted = ranks.run(by_the_trainer, str(tmp_path / "ddp"), None, ranks=2)[0]
    for stage in (0, 3):
        for got in ranks.run(by_the_trainer, str(tmp_path / str(stage)), stage, ranks=2):
            assert got["best"] == wanted["best"] and got["state"].keys() == wanted["state"].keys()
            for name, value in wanted["state"].items():
                torch.testing.assert_close(got["state"][name], value, rtol=0, atol=1e-6, msg=name)
    assert sorted(file.name for file in (tmp_path / "3" / wanted["best"]).glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]
