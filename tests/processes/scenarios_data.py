"""Scenarios: samples that travel between real processes."""

import time
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.data import RingShuffle
from processes.worker import Here

EPOCHS = 4


def share(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Samples whose content says which they are."""
    names = torch.arange(size) + 100 * rank
    return names.view(-1, 1).repeat(1, 3).half(), names


def wander(rank: int) -> list[list[Any]]:
    """What a rank sees in some local epochs, and after a resumption in the middle of the third; shares of unequal size."""
    with RingShuffle(share(rank, 11 - rank), 4, mix=True, timeout=30.0) as shuffle:
        seen, state = [], {}
        for epoch in range(EPOCHS):
            for step, (features, names) in enumerate(shuffle):
                assert torch.equal(features[:, 0], names.half())
                seen.append(names.tolist())
                if (epoch, step) == (2, 0):
                    state = shuffle.state_dict()
        shuffle.load_state_dict(state)
        again = [names.tolist() for _, names in shuffle]
        held = sorted(shuffle.samples()[1].tolist())
    return [seen, again, held]


def wandering(here: Here) -> list[list[Any]]:
    """The same in real processes."""
    return wander(here.rank)


def training(here: Here) -> Tensor:
    """Beside a replica, which has lanes of its own."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    here.replicate(model, optimizer)
    with RingShuffle(share(here.rank, 8), 4, timeout=30.0) as shuffle:
        for _ in range(EPOCHS):
            for features, _ in shuffle:
                optimizer.zero_grad()
                model(features.float()).square().mean().backward()
                optimizer.step()
    return model.weight.detach()


def differing(here: Here) -> None:
    """Rank 1's samples have another dtype."""
    RingShuffle(torch.zeros(8, dtype=torch.float64 if here.rank == 1 else torch.float32), 4, timeout=30.0)


def empty(here: Here) -> None:
    """Rank 2 has no data."""
    RingShuffle(torch.zeros(0 if here.rank == 2 else 8), 4, timeout=30.0)


def late(here: Here) -> None:
    """Rank 2 comes when the others have given up."""
    if here.rank == 2:
        time.sleep(4.0)
    RingShuffle(share(here.rank, 8), 4, timeout=2.0)


def failing(here: Here) -> None:
    """Rank 1's training fails while the others go on."""
    with RingShuffle(share(here.rank, 8), 4, timeout=30.0) as shuffle:
        for _ in range(EPOCHS):
            for step, _ in enumerate(shuffle):
                if here.rank == 1 and step == 1:
                    raise RuntimeError("the loss is NaN")


def leaving(here: Here) -> None:
    """Rank 1 stops after one local epoch, the others want more."""
    with RingShuffle(share(here.rank, 8), 4, timeout=30.0) as shuffle:
        for _ in range(1 if here.rank == 1 else EPOCHS):
            for _ in shuffle:
                pass
