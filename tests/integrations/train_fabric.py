"""A loop with Fabric: python train_fabric.py KIND FOLDER [resume]"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from torch import nn

import gossamer
from gossamer.integrations.fabric import GossamerStrategy

kind, folder, how = sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else ""
torch.set_default_dtype(torch.float64)


def vector(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def main() -> None:
    algorithm = gossamer.AllReduce() if kind == "exact" else gossamer.Gossip()
    strategy: Any = DDPStrategy() if kind == "ddp" else GossamerStrategy(algorithm)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = fabric.setup(model, optimizer)
    state = {"model": model, "optimizer": optimizer, "step": 0}
    if how == "resume":
        fabric.load(folder / "state.ckpt", state)
    for step in range(int(state["step"]), 8):
        for last in (False, True):
            batch = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * last + fabric.global_rank))
            with fabric.no_backward_sync(model, enabled=not last):
                fabric.backward((model(batch) - batch.sum(1, keepdim=True)).square().mean())
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3 and not how:
            fabric.save(folder / "state.ckpt", state | {"step": 4})
    found: dict[str, Any] = {"own": vector(model)}
    if kind != "ddp":
        found["exchanges"] = strategy.replicas[0].step
        strategy.replicas[0].close(average=True)
    found["weights"] = vector(model)
    Path(os.environ["FOUND"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
