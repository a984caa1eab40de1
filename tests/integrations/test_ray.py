"""A real Ray, where it is installed (`pip install 'ray[train]'`): zerolab inside Ray Train's workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import zerolab


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def train(model: nn.Module, parts: list[int]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(2):
        for part in parts:
            x = torch.linspace(0, step + part + 1, 8, dtype=torch.float64).view(2, 4)
            (model(x).square().mean() / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def worker(config: dict[str, Any]) -> None:
    zerolab.init()  # Ray has set torchrun's variables, and made the process group
    zero = zerolab.shard(model(), config["stage"])
    train(zero.model, [zero.rank])
    state = {name: value.tolist() for name, value in zero.full_state_dict().items()}
    Path(config["folder"], f"{zero.rank}.json").write_text(json.dumps([zero.world_size, state]))


@pytest.mark.slow
def test_two_workers_of_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="needs ray[train]")
    env = os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = "300"  # Ray's minute is short on a busy machine
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path)], env=env, capture_output=True, text=True, timeout=540
    )
    alone = model()
    train(alone, [0, 1])
    for rank in (0, 1):
        assert (tmp_path / f"{rank}.json").exists(), done.stdout + done.stderr
        size, state = json.loads((tmp_path / f"{rank}.json").read_text())
        assert size == 2
        assert state == {name: value.tolist() for name, value in alone.state_dict().items()}


if __name__ == "__main__":
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with TemporaryDirectory(prefix="ray") as session:  # the paths of Ray's sockets have to be short
        ray.init(num_cpus=3, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=session)
        trainer = TorchTrainer(
            worker,
            train_loop_config={"stage": 3, "folder": sys.argv[1]},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=f"{sys.argv[1]}/store"),
        )
        trainer.fit()
        ray.shutdown()
