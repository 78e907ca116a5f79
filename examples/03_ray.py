"""Ray Train: its workers train a small network, and gossamer is what they exchange with instead of DDP.

python examples/03_ray.py --workers 2                    # needs pip install 'ray[train]'
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
import torch.nn.functional as F
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device, prepare_data_loader, prepare_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gossamer


def samples(count: int = 1024) -> TensorDataset:
    """Points, and the sine of the sum of their places."""
    inputs = torch.rand(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def train(options: dict[str, Any]) -> None:
    """What every worker does. Ray has made the process group, and shares the samples out."""
    loader = prepare_data_loader(DataLoader(samples(), batch_size=32, shuffle=True))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))
    # With DDP: prepare_model(model). Here it moves the model to the worker's device, and wraps it in nothing.
    model = prepare_model(model, parallel_strategy=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, gossamer.Gossip())

    inputs, targets = (tensor.to(get_device()) for tensor in samples(256).tensors)
    for epoch in range(options["epochs"]):
        loader.sampler.set_epoch(epoch)
        for batch, target in loader:
            optimizer.zero_grad()
            F.mse_loss(model(batch), target).backward()
            optimizer.step()
        with replica.consensus(), torch.no_grad():  # the average of all replicas, on every worker
            loss = F.mse_loss(model(inputs), targets).item()
        found = {"loss": loss, "exchanges": replica.step, "distance": replica.consensus_distance()}
        # Ray keeps the metrics of reports with a checkpoint, which rank 0 saves: the average again.
        with replica.consensus(), tempfile.TemporaryDirectory() as folder:
            first = ray.train.get_context().get_world_rank() == 0
            if first:
                torch.save(model.state_dict(), Path(folder) / "model.pt")
            ray.train.report(found, checkpoint=Checkpoint.from_directory(folder) if first else None)
    replica.close(average=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--gpu", action="store_true", help="a GPU for each worker")
    parser.add_argument("--storage", help="where Ray keeps its results")
    options = parser.parse_args()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": options.epochs},
        scaling_config=ScalingConfig(num_workers=options.workers, use_gpu=options.gpu),
        run_config=RunConfig(storage_path=options.storage),
    )
    print(json.dumps(trainer.fit().metrics, default=str))


if __name__ == "__main__":
    main()
