"""Scenarios on real GPUs: the model of :mod:`scenarios_runners`, whose sums are exact, over either backend."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce
from gossamer.codecs import Cast
from processes.scenarios_runners import STEPS, Exact, exact_slopes
from processes.worker import Here

ALGORITHMS = {
    "AllReduce": AllReduce(bucket_bytes=64),
    "AllReduce in bf16": AllReduce(bucket_bytes=64, wire="bf16"),
    "Gossip": Gossip(bucket_bytes=64),
    "ScatterReduce": ScatterReduce(bucket_bytes=64, codec=Cast(wire="bf16"), gather_below=0),
}


def train_over_gloo(here: Here) -> dict[str, list[Tensor]]:
    """All ranks on one GPU."""
    return train_all(here, torch.device("cuda", 0), None)


def train_over_nccl(here: Here) -> dict[str, list[Tensor]]:
    """A GPU for each rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return train_all(here, device, dist.new_group(backend="cpu:gloo,cuda:nccl"))


def train_all(here: Here, device: torch.device, group: object) -> dict[str, list[Tensor]]:
    """Gradients and weights after every step, by algorithm."""
    seen = {}
    for name, algorithm in ALGORITHMS.items():
        model = Exact().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
        replica = gossamer.replicate(model, optimizer, algorithm, group=group, timeout=60.0)
        told = []
        for step in range(STEPS):
            optimizer.zero_grad()
            model([slope.to(device) for slope in exact_slopes(model, here.rank, here.world, step)]).backward()
            told += [weight.grad.cpu() for weight in model.weights]
            optimizer.step()
            told += [weight.detach().cpu() for weight in model.weights]
        replica.close()
        seen[name] = [*told, *(weight.detach().cpu() for weight in model.weights)]
    return seen
