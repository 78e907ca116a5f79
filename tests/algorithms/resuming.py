"""Resuming: a training in loopback whose weights are known after each step, and which may go on from saved states amid it."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer import loopback
from gossamer.algorithms import Algorithm

from ..contracts.cases import weights


def trained(
    algorithm: Algorithm,
    world: int,
    steps: int,
    make_model: Callable[[], nn.Module],
    make_optimizer: Callable[[nn.Module], Optimizer],
    loss: Callable[[nn.Module, gossamer.Replica, int, int], Tensor],
    resume_at: int | None = None,
    then: Algorithm | None = None,
) -> Tensor:
    """The weights after each step and at the end, rank by rank: ``(world, steps + 1, size)``; saved and loaded again before
    step ``resume_at``, by ``algorithm``, or ``then``. ``loss``: of model, replica, rank and step."""

    def body(rank: int) -> Tensor:
        model = make_model()
        optimizer = make_optimizer(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        seen = []
        for step in range(steps):
            if step == resume_at:
                states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, replica)]
                replica.close()
                model = make_model()
                optimizer = make_optimizer(model)
                optimizer.load_state_dict(states[1])
                replica = gossamer.replicate(model, optimizer, then or algorithm)
                model.load_state_dict(states[0])
                replica.load_state_dict(states[2])
            optimizer.zero_grad()
            loss(model, replica, rank, step).backward()
            optimizer.step()
            seen.append(weights(model))
        replica.close()
        return torch.stack([*seen, weights(model)])

    return torch.stack(loopback(body, world))
