"""`ZeroTrainer`: Hugging Face's Trainer for a model that zerolab has sharded.

    zerolab.init()
    zero = zerolab.Zero3(model, units=[GPT2Block])
    trainer = ZeroTrainer(zero=zero, args=TrainingArguments(...), train_dataset=...)
    trainer.train()

For another subclass of Trainer it is a mixin: `class MyTrainer(ZeroTrainer, Seq2SeqTrainer): pass`.

Only what touches slices is replaced: the Trainer must not wrap or move the model, clips by the norm over all ranks, and
saves and loads by zerolab's means. A checkpoint folder holds

    model.safetensors        full weights, as without sharding; `from_pretrained` reads them
    zerolab/                 `zerolab.save`: weights, the optimizer's state and the learning rate schedule
    rng_state_RANK.json      the random number generators of each rank
    trainer_state.json       the Trainer's own

and can be resumed at another stage or number of ranks. Nothing in it is unpickled.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer

from zerolab.checkpoint import MANIFEST, CheckpointError, load, load_model_weights, save
from zerolab.checkpoint.state import on_all_ranks
from zerolab.engine.engine import Engine

FOLDER = "zerolab"  # inside of a checkpoint folder of the Trainer

# Of TrainingArguments, what would go wrong.
REFUSED = {
    "auto_find_batch_size": "the ranks would run out of memory at different moments; set per_device_train_batch_size",
    "bf16_full_eval": "it casts the model, which shows slices; use bf16=True, or shard with precision=Precision()",
    "deepspeed": "zerolab has sharded the model already; use one of the two",
    "enable_jit_checkpoint": "it saves when a signal comes, but a save needs all ranks at once; use save_steps",
    "fp16": "Accelerate wants a GPU for it, where it has not been tried with slices; use bf16=True",
    "fp16_full_eval": "it casts the model, which shows slices; use bf16=True, or shard with precision=Precision()",
    "fsdp": "zerolab has sharded the model already; use one of the two",
    "parallelism_config": "zerolab splits the data among all ranks, and nothing else",
    "torch_compile": "it would trace zerolab's hooks; call block.compile() on each block instead, after sharding",
    "save_on_each_node": "a checkpoint is written by all ranks into one folder, in a file system that all of them see",
}


class ZeroTrainer(Trainer):
    """A Trainer whose model was sharded by `zero`.

    model: may be left out; otherwise the model that `zero` has sharded.
    Everything else is the Trainer's. All ranks must call `train`, `evaluate`, `predict` and `save_model`.

    Under gradient accumulation only the last micro-batch is reduced, and full gradients are held until then, in every
    stage. To hold slices from the first micro-batch on, at the price of as many reductions, pass
    `accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}` to TrainingArguments.

    Raises ValueError for arguments that do not go with a sharded model, and says what does.
    """

    def __init__(self, model: nn.Module | None = None, *args: Any, zero: Engine, **kwargs: Any) -> None:
        if not isinstance(zero, Engine):
            raise TypeError(f"zero={type(zero).__name__}: pass what sharded the model, zero = zerolab.Zero3(model)")
        if kwargs.get("model_init") is not None:
            raise ValueError("model_init makes models that are not sharded: shard one, and pass zero=zero instead")
        if model is not None and model is not zero.model:
            raise ValueError(
                f"rank {zero.rank}: this {type(model).__name__} is not the model that zero has sharded; pass "
                "model=zero.model, or leave it out"
            )
        self.zero = zero
        super().__init__(zero.model, *args, **kwargs)

    # -- the model stays as it is -------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """The Trainer reaches its model through Accelerate, so three methods of that are replaced."""
        _refuse(self.args, self.zero)
        super().create_accelerator_and_postprocess()
        zero, accelerator = self.zero, self.accelerator
        if self.is_deepspeed_enabled or self.is_fsdp_enabled:  # chosen by `accelerate launch`
            raise ValueError("Accelerate was told to use DeepSpeed or FSDP, but zerolab has sharded the model already")
        prepare = accelerator.prepare_model

        def prepare_model(
            model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
        ) -> nn.Module:
            if model is zero.model:  # autocast and nothing else: no move to a device, no DistributedDataParallel
                device_placement, evaluation_mode = False, True
            return prepare(model, device_placement=device_placement, evaluation_mode=evaluation_mode)

        def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
            given = [parameters] if isinstance(parameters, Tensor) else parameters
            if {id(param) for param in given} != {id(param) for param in zero.model.parameters()}:
                raise ValueError("a sharded model is clipped as a whole: pass all of model.parameters()")
            return zero.clip_grad_norm_(max_norm, norm_type)

        accelerator.prepare_model = prepare_model
        accelerator.clip_grad_norm_ = clip_grad_norm_
        accelerator.no_sync = lambda model: zero.no_sync()

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """It is there already: `_refuse` looks."""

    # -- numbers that must not be this rank's alone ---------------------------------------------------------------

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.zero.broadcast_buffers()  # BatchNorm: each rank's batches left it statistics of its own
        return super().evaluation_loop(*args, **kwargs)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As the Trainer's, which would count the elements of this rank's slices."""
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        if tokens is None or not hasattr(self.model, "num_parameters"):
            return 0
        embeddings = {f"{name}.weight" for name, m in self.model.named_modules() if isinstance(m, nn.Embedding)}
        slots = [slot for unit in self.zero.units for slot in unit.layout.slots]
        return 6 * tokens.numel() * sum(slot.numel for slot in slots if slot.name not in embeddings)

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        if state_dict is None:
            state_dict = self.zero.full_state_dict(rank0_only=True)
        if not isinstance(self.model, PreTrainedModel):  # tied weights once; save_pretrained does that itself
            first = {id(value): name for name, value in reversed(state_dict.items())}
            state_dict = {name: state_dict[name].contiguous() for name in first.values()}
        # The first rank writes. The others wait, so that they may read it next, and raise if it could not.
        on_all_ranks(self.zero.comm, "saving of the model", functools.partial(super()._save, output_dir, state_dict))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        scheduler = self.lr_scheduler.state_dict()
        if json.loads(json.dumps(scheduler, default=repr)) != scheduler:
            raise CheckpointError(
                f"the state of {type(self.lr_scheduler).__name__} is not JSON, so it cannot be saved; use another "
                "learning rate schedule, or save_only_model=True"
            )
        save(Path(output_dir, FOLDER), self.zero, _plain(self.optimizer), scheduler=scheduler)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            extra = load(Path(checkpoint, FOLDER), self.zero, _plain(self.optimizer))
            self.lr_scheduler.load_state_dict(extra["scheduler"])

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """The weights come with the optimizer's state, once there is an optimizer."""
        if not Path(resume_from_checkpoint, FOLDER, MANIFEST).is_file():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no {FOLDER}/{MANIFEST}, so training cannot be resumed from it: it was "
                "saved with save_only_model=True, or by another Trainer, or is incomplete. Its weights alone can be "
                "loaded by from_pretrained, before sharding"
            )

    def _load_best_model(self) -> None:
        folder = Path(self.state.best_model_checkpoint)
        if hasattr(self.model, "peft_config"):  # only the adapter was saved
            from peft import load_peft_weights, set_peft_model_state_dict

            with self.zero.full_parameters():
                set_peft_model_state_dict(self.model, load_peft_weights(str(folder), device="cpu"))
            return
        if not isinstance(self.model, PreTrainedModel):
            with self.zero.full_parameters():
                load_model_weights(folder / "model.safetensors", self.model)
            return
        state: dict[str, Tensor] | None = None

        def read() -> None:  # by transformers, which may have split or renamed what it wrote
            nonlocal state
            if self.zero.rank == 0:
                dtype = functools.reduce(torch.promote_types, {param.dtype for param in self.model.parameters()})
                model = type(self.model).from_pretrained(folder, config=self.model.config, dtype=dtype)
                state = model.state_dict()

        on_all_ranks(self.zero.comm, "reading of the best model", read)
        self.zero.load_full_state_dict(state)

    def _save_rng_state(self, output_dir: str) -> None:
        version, words, gauss = random.getstate()
        legacy: Any = np.random.get_state()
        name, keys, *rest = legacy
        states: dict[str, Any] = {
            "python": [version, list(words), gauss],
            "numpy": [name, keys.tolist(), *rest],
            "cpu": torch.get_rng_state().tolist(),
        }
        if self.zero.comm.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.zero.comm.device).tolist()
        Path(output_dir).mkdir(parents=True, exist_ok=True)  # the first rank may not have made it yet
        _rng_file(output_dir, self.zero).write_text(json.dumps(states))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Of a rank that took part in the save; others keep what the seed gave them."""
        if checkpoint is None or not _rng_file(checkpoint, self.zero).is_file():
            return
        states = json.loads(_rng_file(checkpoint, self.zero).read_text())
        version, words, gauss = states["python"]
        random.setstate((version, tuple(words), gauss))
        np.random.set_state(tuple(states["numpy"]))
        torch.set_rng_state(torch.tensor(states["cpu"], dtype=torch.uint8))
        if "cuda" in states and self.zero.comm.device.type == "cuda":
            torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8), self.zero.comm.device)


def _refuse(args: Any, zero: Engine) -> None:
    """Raise ValueError for what would go wrong later, or without a word."""
    for name, why in REFUSED.items():
        if value := getattr(args, name, None):
            raise ValueError(f"TrainingArguments({name}={value!r}) does not go with a sharded model: {why}")
    if (args.process_index, args.world_size) != (zero.rank, zero.world_size):
        raise ValueError(
            f"zero has rank {zero.rank} of {zero.world_size}, but the Trainer has rank {args.process_index} of "
            f"{args.world_size}: start with torchrun, or set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, "
            "MASTER_ADDR and MASTER_PORT, and shard without group=..."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"this one process sees {args.n_gpu} GPUs: start with torchrun --nproc-per-node {args.n_gpu}, "
            "or let it see one (CUDA_VISIBLE_DEVICES=0)"
        )
    here, there = zero.comm.device, args.device
    if here.type != there.type or (here.type == "cuda" and (here.index or 0) != (there.index or 0)):
        raise ValueError(
            f"rank {zero.rank}: the model was sharded on {here}, but the Trainer uses {there}: move the model to "
            "args.device before sharding it"
        )
    if zero.world_size > 1 and args.accelerator_config.even_batches is False:
        raise ValueError("even_batches=False: every rank must make as many forwards; leave it True")


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """Without Accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


def _rng_file(checkpoint: str, zero: Engine) -> Path:
    return Path(checkpoint, f"rng_state_{zero.rank}.json")


for _name in vars(ZeroTrainer):  # an override that the Trainer no longer calls would be a wrong number
    if not _name.startswith("__") and not hasattr(Trainer, _name):
        raise ImportError(f"transformers {transformers.__version__} has no Trainer.{_name}, which zerolab relies on")
