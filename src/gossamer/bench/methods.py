"""Method: one way to train in a comparison, spelled as in a script: ``ddp`` or ``ScatterReduce(codec=Quantize(bits=4))``."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

import torch.nn as nn
from torch.optim import Optimizer

from gossamer import optim
from gossamer.algorithms import Algorithm
from gossamer.bench.peers import PEERS, Joined
from gossamer.errors import ConfigurationError
from gossamer.optim.communicating import Communicating
from gossamer.replicate import replicate
from gossamer.spelled import algorithm_names, value_of

PLAIN = tuple(PEERS)
"""Methods without gossamer."""

KINDS: dict[str, type[Optimizer]] = {
    name: getattr(optim, name) for name in optim.__all__ if isinstance(getattr(optim, name), type)
}


@dataclass(frozen=True)
class OverlapForward:
    """An algorithm whose exchange goes on during the next forward pass: ``overlap_forward(AllReduce())``."""

    algorithm: Algorithm

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(f"overlap_forward() takes an algorithm, not {self.algorithm!r}")


@dataclass(frozen=True)
class WithOptimizer:
    """An algorithm with an optimizer in place of the workload's: ``with_optimizer(Gossip(), GossipAdamW())``."""

    way: Algorithm | OverlapForward
    optimizer: partial[Optimizer]

    def __post_init__(self) -> None:
        if not isinstance(self.way, Algorithm | OverlapForward):
            raise TypeError(f"with_optimizer() takes an algorithm first, not {self.way!r}")
        if not isinstance(self.optimizer, partial) or self.optimizer.func.__name__ in OPTIMIZERS:
            raise TypeError("with_optimizer() takes an optimizer second that does not communicate, such as GossipAdamW()")


_EXAMPLE = "Gossip(wire='bf16')"

Method = Algorithm | OverlapForward | WithOptimizer | partial[Optimizer] | str

OPTIMIZERS = tuple(name for name, kind in KINDS.items() if issubclass(kind, Communicating))
"""Optimizers that communicate themselves."""


def algorithm_of(method: Method) -> Algorithm | None:
    """The algorithm of a method; None of what is PyTorch's own, and of an optimizer that communicates."""
    if isinstance(method, WithOptimizer):
        method = method.way
    if isinstance(method, OverlapForward):
        return method.algorithm
    return method if isinstance(method, Algorithm) else None


def optimizer_of(method: Method) -> partial[Optimizer] | None:
    """A maker of the optimizer that a method has in place of the workload's."""
    if isinstance(method, WithOptimizer):
        return method.optimizer
    return method if isinstance(method, partial) else None


def overlaps_forward(method: Method) -> bool:
    """Whether the exchange of a method goes on during the next forward pass because it was asked to."""
    return isinstance(method.way if isinstance(method, WithOptimizer) else method, OverlapForward)


def known_names() -> dict[str, Any]:
    """What a method may be made of."""
    made_of = algorithm_names() | {"overlap_forward": OverlapForward, "with_optimizer": WithOptimizer}
    return made_of | {name: partial(partial, kind) for name, kind in KINDS.items()}


def parse_method(text: str) -> Method:
    """One of ``PLAIN``, an algorithm (alone, overlapping the forward pass, with an optimizer), or a maker of an optimizer that
    communicates.

    Raises ConfigurationError.
    """
    if text in PEERS:
        return text
    names = known_names()
    made = made_of_names(text, names, "method", [*PLAIN, *sorted(names)])
    if isinstance(made, partial) and made.func.__name__ not in OPTIMIZERS:
        raise ConfigurationError(f"{text!r} does not communicate; write for example with_optimizer(Gossip(), {text})")
    if not isinstance(made, Algorithm | OverlapForward | WithOptimizer | partial):
        raise ConfigurationError(f"{text!r} is not an algorithm; write for example AllReduce() or Gossip(wire='bf16')")
    return made


def made_of_names(text: str, names: dict[str, Any], what: str, known: Sequence[str]) -> Any:
    """What ``text`` spells. ConfigurationError that tells what is wrong with it; with a name that is not ``known``, what is."""
    if "(" not in text and text not in names:
        raise _unknown(what, text, text, known)
    try:
        return value_of(text, names)
    except KeyError as error:
        raise _unknown(what, str(error.args[0]), text, known) from error
    except SyntaxError as error:
        raise ConfigurationError(f"{what} {text!r}: {error.msg}; write it as in a script, such as {_EXAMPLE}") from error
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"{what} {text!r}: {error}") from error


def _unknown(what: str, name: str, text: str, known: Sequence[str]) -> ConfigurationError:
    lower = {each.lower(): each for each in known}
    near = [_written(lower[each]) for each in get_close_matches(name.lower(), lower, n=3)]
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    within = "" if name == text else f" in {text!r}"
    return ConfigurationError(f"unknown {what} {name!r}{within}{hint} Known: {', '.join(known)}")


def _written(name: str) -> str:
    return name if name in PEERS else f"{name}()"


def in_place_of(optimizer: Optimizer, maker: partial[Optimizer], model: nn.Module) -> Optimizer:
    """Another optimizer of the same model, with the learning rate of the one before unless it has one.

    Raises ConfigurationError if it does not take what it is given.
    """
    try:
        return maker(model.parameters(), **{"lr": optimizer.param_groups[0]["lr"]} | maker.keywords)
    except TypeError as error:
        raise ConfigurationError(f"{maker.func.__name__}: {error}") from error


def join(method: Method, model: nn.Module, optimizer: Optimizer) -> Joined:
    """Let ``model`` communicate as ``method`` says; returns what to train with.

    An optimizer that the method names takes the place of the workload's, with its learning rate unless it has one.
    """
    if isinstance(method, str):
        return PEERS[method].join(model, optimizer)
    maker = optimizer_of(method)
    if maker is not None:
        optimizer = in_place_of(optimizer, maker, model)
    replica = replicate(model, optimizer, algorithm_of(method), overlap_forward=overlaps_forward(method))
    return Joined(model, optimizer, close=replica.close, replica=replica)
