"""The engines that `zerolab trial` knows, each behind the few methods of `Adapter`."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict as set_in
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

import zerolab
from zerolab.trial.case import FEATURES, Adapter, MakeOptimizer, Unsupported
from zerolab.trial.cases import CASES
from zerolab.trial.disagreements import Disagreement
from zerolab.trial.numbers import by_default

EVERYTHING = frozenset(FEATURES)


def arguments_of(optimizer: Optimizer) -> dict[str, Any]:
    """What another one of its class is made with. (Some keep defaults that are no arguments: AdamW does.)"""
    takes = inspect.signature(type(optimizer)).parameters
    return {name: value for name, value in optimizer.defaults.items() if name in takes}


class Ours(Adapter):
    """zerolab, in one of its stages. kind: another class for it, for example a learner's."""

    def __init__(self, stage: int, kind: type[zerolab.Engine] | None = None) -> None:
        self.stage, self.kind = stage, kind or zerolab.STAGES[stage]
        self.supports = EVERYTHING - ({"mesh"} if stage == 0 else set())

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        precision = zerolab.Precision(torch.bfloat16, reduce=torch.float32) if asked.get("precision") else None
        if asked.get("scaler"):
            precision = zerolab.Precision(torch.float16)
        where = {key: asked[key] for key in ("group", "mesh") if key in asked}
        self.zero = self.kind(model, units=units, precision=precision, **where)
        self.model = model
        if asked.get("whole"):
            plain = optimizer(model)
            self.optimizer = zerolab.OwnerOptimizer(plain.param_groups, type(plain), **arguments_of(plain))
        else:
            self.optimizer = optimizer(model)
            if type(self.optimizer).__module__ == "zerolab.trial.training":  # written for the trial, element by element
                zerolab.declare_elementwise(type(self.optimizer))
        if asked.get("scaler"):
            self.scaler = zerolab.LossScaler(self.zero, init_scale=2.0**8)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self.zero.no_sync()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        return self.zero.clip_grad_norm_(max_norm, norm_type).item()

    def full_state(self) -> dict[str, Tensor]:
        return self.zero.full_state_dict()

    def save(self, folder: Path) -> None:
        zerolab.save(folder / "checkpoint", self.zero, self.optimizer)

    def load(self, folder: Path) -> None:
        zerolab.load(folder / "checkpoint", self.zero, self.optimizer)


DEBUGGING = "torch.distributed, Debugging: only TORCH_DISTRIBUTED_DEBUG=DETAIL looks for ranks that are out of step"
TORCH = {name: DEBUGGING for name, case in CASES.items() if case.family == Disagreement.family}


class TorchDDP(Adapter):
    """torch.nn.parallel.DistributedDataParallel."""

    otherwise = TORCH | {
        "accumulate, backward alone": "DistributedDataParallel.no_sync: the forward should be inside the context, too",
        "batch norm, channels_last": "DistributedDataParallel: broadcast_buffers=True: forwards see rank 0's buffers",
        "freezing and thawing": "DistributedDataParallel: never change a model's parameters after wrapping it",
    }

    stage: int | None = 0
    supports = frozenset({"accumulate", "clip", "full_state", "save", "some", "scaler", "group", "whole"})
    supports |= {"broadcast", "bytes"}

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        group = asked.get("group")
        self.ddp = DistributedDataParallel(
            model, process_group=group, find_unused_parameters=asked.get("some", False), gradient_as_bucket_view=True
        )
        self.inner, self.model = model, Called(self.ddp, model)
        self.optimizer = optimizer(model)
        if asked.get("scaler"):
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self.ddp.no_sync()

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        return nn.utils.clip_grad_norm_(self.inner.parameters(), max_norm, norm_type).item()

    def full_state(self) -> dict[str, Tensor]:
        return self.inner.state_dict()

    def save(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder / "checkpoint")

    def load(self, folder: Path) -> None:
        model, optimizer = get_state_dict(self.inner, self.optimizer)
        state: dict[str, Any] = {"model": model, "optimizer": optimizer}
        dcp.load(state, checkpoint_id=folder / "checkpoint")
        set_in(self.inner, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Called(nn.Module):
    """A model whose calls go through its wrapper. All else is asked of the model itself."""

    def __init__(self, wrapper: Any, inner: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(wrapper=wrapper, inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapper(*args, **kwargs)

    def train(self, mode: bool = True) -> Called:
        self.wrapper.train(mode)
        return self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.inner.parameters(recurse)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.inner.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self.inner.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.state_dict(*args, **kwargs)


class TorchZero1(TorchDDP):
    """torch.distributed.optim.ZeroRedundancyOptimizer, over DDP."""

    stage = 1
    supports = TorchDDP.supports - {"save"}

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        super().wrap(model, units, optimizer, **asked)
        plain = self.optimizer
        if plain._optimizer_step_post_hooks:
            raise Unsupported("a schedule that is a hook of the optimizer: it makes one of its own")
        groups = [dict(group) for group in plain.param_groups]
        self.optimizer = ZeroRedundancyOptimizer(
            groups, type(plain), asked.get("group"), parameters_as_bucket_view=False, **arguments_of(plain)
        )


class FSDP2(Adapter):
    """torch.distributed.fsdp.fully_shard."""

    otherwise = TORCH | {
        "mixture of experts": "set_reduce_scatter_unused_params: what no rank used gets a gradient of zeros, not None"
    }
    stage: int | None = 3
    supports = frozenset(FEATURES) - {"parts", "broadcast"}
    reshard = True

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        options: dict[str, Any] = {"reshard_after_forward": self.reshard}
        if shape := asked.get("mesh"):
            options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        elif group := asked.get("group"):
            options["mesh"] = DeviceMesh.from_group(group, "cpu")
        else:
            options["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
        if asked.get("precision"):
            options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        if asked.get("scaler"):
            options["mp_policy"] = MixedPrecisionPolicy(torch.float16, reduce_dtype=torch.float16)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        blocks = [module for module in model.modules() if units and isinstance(module, units) and module is not model]
        for module in (*reversed(blocks), model):
            fully_shard(module, **options)
        assert isinstance(model, FSDPModule)
        if asked.get("some"):
            model.set_reduce_scatter_unused_params(True)
        self.model, self.optimizer = model, optimizer(model)

    def recover(self) -> None:
        assert isinstance(self.model, FSDPModule)
        self.model.reset_iter_state()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        norm: Any = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, norm_type)
        return norm.full_tensor().item()

    def full_state(self) -> dict[str, Tensor]:
        state: Any = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True))
        return state

    save, load = TorchDDP.save, TorchDDP.load

    @property
    def inner(self) -> nn.Module:
        return self.model


class FSDP2Keep(FSDP2):
    """torch.distributed.fsdp.fully_shard, reshard_after_forward=False."""

    stage, reshard = 2, False


class Accelerate(TorchDDP):
    """accelerate.Accelerator on CPUs, which is torch's DDP with a loop of its own."""

    supports = TorchDDP.supports - {"group", "scaler", "some", "whole", "bytes"}
    packages = ("accelerate",)

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)  # of the case before
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=True)
        self.ddp, wrapped = self.accelerator.prepare(model, optimizer(model))
        self.inner, self.model, self.optimizer = model, Called(self.ddp, model), wrapped

    def backward(self, loss: Tensor) -> None:
        self.accelerator.backward(loss)

    def accumulate(self) -> AbstractContextManager[Any]:
        return self.accelerator.no_sync(self.ddp)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        return self.accelerator.clip_grad_norm_(self.inner.parameters(), max_norm, norm_type).item()


class InFloat32(Called):
    """Computes in float32, whatever goes in, and its outputs are as wide as the world around it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with by_default(torch.float32):
            out = super().forward(*to(torch.float32, args), **to(torch.float32, kwargs))
        return to(torch.get_default_dtype(), out)


def to(dtype: torch.dtype, values: Any) -> Any:
    return tree_map(lambda v: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v, values)


DIRECT = "DeepSpeedEngine: direct calls to tensor.backward() are not supported in stage 0"
SKIPS = {"NaN on one rank": "DeepSpeedEngine.was_step_applied: steps are no-ops when overflows occur"}
BOUNDARY = "DeepSpeedEngine.backward: only with managed_gradient_accumulation=false do backwards add up until step()"
ALL_REDUCE = "use_multi_rank_bucket_allreduce, true by default: an all-reduce instead of multiple reduce ops"
NO_SYNC = "DeepSpeedEngine.no_sync: stages 2 and 3 rely on reduction; coalesce_grad_reduction() is there to reduce once"
OF_DEEPSPEED: list[dict[str, str]] = [
    {"accumulate, each reduced": DIRECT, "an error in backward": DIRECT},
    SKIPS | {"accumulate, each reduced": BOUNDARY, "moved in a step": ALL_REDUCE},
    SKIPS | {"accumulate, each reduced": BOUNDARY, "moved in a step": ALL_REDUCE, "moved by accumulation": NO_SYNC},
    SKIPS | {"moved by accumulation": NO_SYNC},
]


class DeepSpeed(Adapter):
    """DeepSpeed, in one of its stages, with torch's optimizers. It computes in float32, as on a CPU stage 0 must."""

    packages = ("deepspeed",)
    tolerance = 1e-4

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.supports = frozenset({"accumulate", "clip", "full_state", "broadcast", "bytes"})
        self.otherwise = TORCH | OF_DEEPSPEED[stage]

    def wrap(self, model: nn.Module, units: Any, optimizer: MakeOptimizer, **asked: Any) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        logging.getLogger("deepspeed").setLevel(logging.ERROR)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 10**6,
                "allgather_bucket_size": 10**6,
                "stage3_max_live_parameters": 10**5,  # by default all of a small model stays gathered
                "stage3_max_reuse_distance": 10**5,
                "stage3_prefetch_bucket_size": 10**5,
            },
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,
        }
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it compiles
            import deepspeed
            from deepspeed.comm import comm
            from deepspeed.utils import groups

            comm.cdb = None  # it keeps the process groups of the case before
            for name in [name for name in vars(groups) if name.endswith("_GROUP")]:
                setattr(groups, name, {} if isinstance(getattr(groups, name), dict) else None)
            model._apply(lambda t: t.float() if t.dtype == torch.float64 else t)
            self.inner, inner = model, optimizer(model)
            self.hooks = [*inner._optimizer_step_post_hooks.values()]  # a schedule's: it steps each group by itself
            inner._optimizer_step_post_hooks.clear()
            made = deepspeed.initialize(model=model, optimizer=inner, config=config, dist_init_required=False)
        self.engine, self.optimizer = made[0], made[1]
        self.model = InFloat32(self.engine, model)

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()
        for hook in self.hooks:
            hook(self.optimizer, (), {})

    def recover(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        self.engine.set_gradient_accumulation_boundary(False)
        try:
            yield
            self.engine.step()  # which counts micro-batches, too
        finally:
            self.engine.set_gradient_accumulation_boundary(True)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Its step() clips, by what its configuration had said. The norm is known after it."""
        if norm_type != 2.0:
            raise Unsupported("clipping by another norm than the 2-norm")
        self.engine._config.gradient_clipping = self.engine.optimizer.clip_grad = max_norm
        return torch.nan

    def full_state(self) -> dict[str, Tensor]:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.inner.parameters()), enabled=self.stage == 3):
            return {name: value.clone() for name, value in self.inner.state_dict().items()}


ENGINES: dict[str, Callable[[], Adapter]] = {
    **{name: partial(Ours, stage) for stage, name in enumerate(("ddp", "zero1", "zero2", "zero3"))},
    "torch-ddp": TorchDDP,
    "torch-zero1": TorchZero1,
    "fsdp2": FSDP2,
    "fsdp2-keep": FSDP2Keep,
    "accelerate": Accelerate,
    **{f"deepspeed{stage}": partial(DeepSpeed, stage) for stage in range(4)},
}
