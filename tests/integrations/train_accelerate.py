"""Plain loop with Accelerate: python train_accelerate.py KIND FOLDER [resume|newest|whole]"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer
from gossamer.integrations.accelerate import Accelerator

kind, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
torch.set_default_dtype(torch.float64)
project = ProjectConfiguration(project_dir=str(folder), automatic_checkpoint_naming=True)
options: dict[str, Any] = {"cpu": True, "gradient_accumulation_steps": 2, "project_config": project}


def accelerator_of(kind: str) -> Any:
    if kind == "ddp":
        return accelerate.Accelerator(**options)
    return Accelerator(algorithm=gossamer.AllReduce() if kind == "exact" else gossamer.Gossip(), **options)


def vector(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def main() -> None:
    accelerator = accelerator_of(kind)
    torch.manual_seed(3)
    inputs = torch.randn(64, 6)
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=4)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    if how in ("resume", "newest"):
        accelerator.load_state(str(folder / "checkpoints" / "checkpoint_0") if how == "resume" else None)
    for epoch in (1,) if how in ("resume", "newest") else (0, 1):
        for batch, target in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - target).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        if epoch == 0 and how == "":
            accelerator.save_state()
    found: dict[str, Any] = {"own": vector(model), "bare": accelerator.unwrap_model(model) is model.module}
    if kind != "ddp":
        found["exchanges"] = accelerator.replicas[0].step
        accelerator.end_training()
    found["weights"] = vector(model)
    Path(os.environ["FOUND"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
