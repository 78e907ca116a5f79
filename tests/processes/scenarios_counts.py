"""Scenarios: ranks that took another number of steps, or made a call that the others did not make. Two ranks."""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gossamer
from gossamer import AllReduce, GossamerError, Gossip, LocalSGD
from processes.twins import values
from processes.worker import Here
from processes.workloads import generator

STEPS = 10

Told = dict[str, str]
"""What a rank was told: the ``error`` that it got, and everything that was ``logged``."""


class Heard(logging.Handler):
    """Collects what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def told(body: Callable[[], None]) -> Told:
    """Run ``body``; what this rank was told."""
    heard, logger = Heard(), logging.getLogger("gossamer")
    logger.addHandler(heard)
    logger.propagate, before = False, logger.propagate
    try:
        body()
        return {"error": "", "logged": "\n".join(heard.texts)}
    except GossamerError as error:
        return {"error": f"{type(error).__name__}: {error}", "logged": "\n".join(heard.texts)}
    finally:
        logger.removeHandler(heard)
        logger.propagate = before


def begin(here: Here, algorithm: gossamer.Algorithm) -> tuple[nn.Module, Optimizer, gossamer.Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = SGD(model.parameters(), lr=0.05)
    return model, optimizer, here.replicate(model, optimizer, algorithm, timeout=20.0)


def numbers(here: Here, step: int) -> Tensor:
    return torch.randn(6, 4, generator=generator(here.rank, step), dtype=torch.float64)


def train(here: Here, model: nn.Module, optimizer: Optimizer, skipped: tuple[int, ...] = (), steps: int = STEPS) -> None:
    for step in range(steps):
        if step not in skipped:
            optimizer.zero_grad()
            model(numbers(here, step)).square().mean().backward()
            optimizer.step()


def uneven(here: Here, algorithm: gossamer.Algorithm) -> tuple[Told, Tensor]:
    """Rank 1 leaves one batch out; both close with the average."""
    model, optimizer, replica = begin(here, algorithm)

    def body() -> None:
        train(here, model, optimizer, (4,) if here.rank == 1 else ())
        replica.close(average=True)

    return told(body), values(model)


def a_step_fewer_with_gossip(here: Here) -> tuple[Told, Tensor]:
    return uneven(here, Gossip())


def a_step_fewer_with_local_sgd(here: Here) -> tuple[Told, Tensor]:
    return uneven(here, LocalSGD(every=1))


def a_step_fewer_where_gradients_travel(here: Here) -> tuple[Told, Tensor]:
    return uneven(here, AllReduce())


def alone(here: Here, call: Callable[[gossamer.Replica], object]) -> Told:
    """Rank 0 makes a call that the other does not make, amid training."""
    model, optimizer, replica = begin(here, AllReduce())

    def body() -> None:
        train(here, model, optimizer, steps=3)
        if here.rank == 0:
            call(replica)
        train(here, model, optimizer, steps=3)
        replica.close(average=True)

    return told(body)


def consensus_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.consensus().__enter__())


def state_dict_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.state_dict())


def distance_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.consensus_distance())


def load_state_dict_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.load_state_dict({}))


def close_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.close(average=True))


def join_alone(here: Here) -> Told:
    return alone(here, lambda replica: replica.join().__enter__())


def state_dict_in_join_alone(here: Here) -> Told:
    """Rank 1 has fewer batches, and answers; rank 0 saves meanwhile."""
    model, optimizer, replica = begin(here, AllReduce())

    def body() -> None:
        with replica.join():
            train(here, model, optimizer, steps=2 if here.rank else 4)
            if here.rank == 0:
                replica.state_dict()

    return told(body)


def closed_a_step_behind(here: Here) -> Told:
    """Rank 1 leaves one batch out, and neither asks for an average at the end."""
    model, optimizer, replica = begin(here, Gossip())

    def body() -> None:
        train(here, model, optimizer, (4,) if here.rank == 1 else ())
        replica.close()
        assert values(model).isfinite().all()

    return told(body)


def forward_pass_alone(here: Here) -> Told:
    """In training mode, of a model with running statistics."""
    model, optimizer, replica = begin(here, AllReduce())

    def body() -> None:
        train(here, model, optimizer, steps=3)
        if here.rank == 0:
            model(numbers(here, 50))
        train(here, model, optimizer, steps=3)
        replica.close()

    return told(body)
