"""Peer: one alternative to gossamer that a user of PyTorch could take, as a method of a comparison."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from threading import Thread
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.bench.bound import When
from gossamer.errors import GossamerError
from gossamer.replica import Replica

BASELINE = "compute"
"""The method that trains without any communication, as others are measured beside it."""

LOCAL_STEPS = 8
"""Steps between two averages, for peers that do not average in every step."""


class Steps(Protocol):
    """What a training loop needs of an optimizer."""

    def zero_grad(self) -> None:
        """Forget the gradients."""

    def step(self) -> Any:
        """Update the weights."""


def nothing() -> None:
    """Nothing."""


@dataclass(frozen=True, slots=True)
class Joined:
    """What to train with: ``model``, ``optimizer``, and ``backward`` in place of ``loss.backward()``.

    ``turn()``: a context within which it is trained; outside it does nothing in the background that others would feel.
    ``close()`` ends what it started; raises GossamerError that says what it waited for. Both are called on all ranks.
    """

    model: nn.Module
    optimizer: Steps
    backward: Callable[[Tensor], Any] = Tensor.backward
    turn: Callable[[], AbstractContextManager[Any]] = nullcontext
    close: Callable[[], None] = nothing
    replica: Replica | None = None

    def step(self, inputs: Tensor, targets: Tensor, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        """One step of training on a batch."""
        self.optimizer.zero_grad()
        self.backward(loss(self.model(inputs), targets))
        self.optimizer.step()


def from_extra(package: str) -> str:
    """How to get a package that gossamer's extra for peers brings."""
    return f"pip install {package}, or gossamer with its extra: pip install '.[peers]'"


@dataclass(frozen=True, slots=True)
class Peer:
    """One of them. ``payload``: bytes per step relative to an exact ring all-reduce of the gradients; None if unknown.

    ``period``: after how many steps what travels repeats itself; ``when``: when it may travel.
    ``module``: what must be there to be imported, and ``get``: how to get it. ``gone``: why nobody can have it.
    ``only_gloo``: it is set up here to send over Gloo, and is not compared with what goes over another backend.
    """

    what: str
    join: Callable[[nn.Module, Optimizer], Joined]
    payload: float | None
    period: int = 1
    when: When = "joined"
    module: str = "torch"
    get: str = ""
    gone: str | None = None
    only_gloo: bool = False

    def missing(self, load: bool = False) -> str | None:
        """Why it cannot run here, and how to get it; None if it can. ``load``: import it to find out, which takes seconds."""
        if self.gone is not None:
            return self.gone
        if self.only_gloo and dist.is_initialized() and dist.get_backend() != "gloo":
            return f"it is measured over Gloo only, and the others here send over {dist.get_backend()}"
        if find_spec(self.module) is None:
            return f"{self.module} is not installed: {self.get}"
        try:
            import_module(self.module) if load else None
        except Exception as error:  # built for another version, say
            return f"{self.module} is installed but cannot be imported ({type(error).__name__}: {error}): {self.get}"
        return None


def wait_for(what: str, end: Callable[[], Any], seconds: float = 30.0) -> None:
    """Call ``end``; GossamerError that names ``what`` if it fails, or is not done after that many seconds."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            end()
        except BaseException as error:
            failed.append(error)

    thread = Thread(target=run, name=f"the end of {what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise GossamerError(f"waited {seconds:g} s for the end of {what}; it did not come")
    if failed:
        raise GossamerError(f"{what} did not end well: {failed[0]}") from failed[0]
