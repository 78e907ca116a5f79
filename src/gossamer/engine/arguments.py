"""Arguments of ``replicate()``: which cannot work, by themselves or with each other."""

from collections.abc import Sequence
from math import inf
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.checks import hint_at_class
from gossamer.engine.checks import check_held, check_model, check_optimizers, held_by, named_parameters
from gossamer.engine.module_buffers import Buffers
from gossamer.engine.sharding import is_sharded, offloads
from gossamer.engine.ties import overlapping
from gossamer.errors import ConfigurationError
from gossamer.optim.communicating import Communicating


def check_arguments(model: Any, optimizer_or_optimizers: Any, algorithm: Any, scaler: Any) -> tuple[Optimizer, ...]:
    """The optimizers, as a tuple. Raises ConfigurationError for arguments that cannot work, by themselves or together."""
    if algorithm is not None:
        check_is_algorithm(algorithm)
    check_model(model)
    optimizers = check_optimizers(optimizer_or_optimizers)
    check_held(model, optimizers)
    if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
        raise ConfigurationError(f"scaler must be a torch.amp.GradScaler; got {type(scaler).__name__}")
    communicating = [o for o in optimizers if isinstance(o, Communicating)]
    if communicating and algorithm is not None:
        raise ConfigurationError(
            f"{type(communicating[0]).__name__} communicates by itself: replicate() takes no algorithm with it"
        )
    own = set(map(id, named_parameters(model).values()))
    if any(id(parameter) not in own for optimizer in communicating for parameter in held_by(optimizer)):
        raise ConfigurationError(
            f"{type(communicating[0]).__name__} communicates for all parameters that it holds: give the ignored ones to "
            "another replica's optimizer, or to one that gossamer does not see"
        )
    if communicating and any(map(is_sharded, named_parameters(model).values())):
        raise ConfigurationError(
            f"{type(communicating[0]).__name__} communicates for whole parameters, and some of this model are sharded "
            "(DTensors): take another optimizer, and an algorithm"
        )
    if communicating and any(parameter.is_complex() for parameter in named_parameters(model).values()):
        raise ConfigurationError(f"{type(communicating[0]).__name__} takes real parameters, and some of this model are complex")
    if communicating and len(communicating) < len(optimizers):
        raise ConfigurationError(f"{type(communicating[0]).__name__} communicates by itself: all optimizers must, or none")
    _check_beside(model, optimizers, algorithm, scaler)
    return optimizers


def _check_beside(model: nn.Module, optimizers: Sequence[Optimizer], algorithm: Algorithm | None, scaler: Any) -> None:
    """Refuse what is done to whole optimizers, where they hold parameters that this replica does not move."""
    held = {id(parameter) for optimizer in optimizers for parameter in held_by(optimizer)}
    if held - set(map(id, named_parameters(model).values())) and algorithm is not None and algorithm.traits.takes_momentum:
        raise ConfigurationError(
            f"{algorithm!r} takes the momentum out of the optimizer, which holds parameters that this replica does not move "
            "(ignored, or another replica's) and would lose theirs: give those an optimizer of their own"
        )
    if held - set(map(id, model.parameters())) and scaler is not None:
        raise ConfigurationError(
            "scaler= cannot be used where an optimizer holds another replica's parameters too: whether the step is skipped "
            "would be agreed by some of its ranks only; give each replica an optimizer of its own"
        )


def check_delay(algorithm: Algorithm) -> None:
    """Refuse an exchange that ends after the next one of the same weights begins."""
    for beat in algorithm.cadence.beats:
        if beat.delay > beat.every:
            raise ConfigurationError(
                f"{algorithm!r}: the result of an exchange would be added after {beat.delay} steps (delay=), and the same "
                f"weights are exchanged every {beat.every} steps: set delay to at most that"
            )


def check_is_algorithm(algorithm: Any) -> None:
    """Raise ConfigurationError for anything that is no algorithm."""
    if not isinstance(algorithm, Algorithm):
        raise ConfigurationError(
            f"algorithm must be an instance of a gossamer algorithm; got {algorithm!r}{hint_at_class(algorithm)}"
        )


def check_lag(algorithm: Algorithm, optimizers: Sequence[Optimizer], buffers: Buffers, scaler: Any) -> None:
    """Refuse what binds all ranks to the same step, or to one order of several exchanges, where they may lag."""
    if not algorithm.cadence.lag:
        return
    reasons = {
        "scaler= makes them agree in every step": scaler is not None,
        "buffers='broadcast' moves those in every step": buffers == "broadcast",
        "the weights of several optimizers would be exchanged in another order on each": len(optimizers) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{algorithm!r} lets ranks be at different steps, but {reason}; set lag=0, or change that")


Synchronize = Literal["backward", "step"] | int


def check_synchronize(
    synchronize: Synchronize | None, algorithm: Algorithm, scaler: Any, overlap_forward: bool, model: nn.Module
) -> float:
    """How many passes accumulate before one is synchronised; inf: gradients are exchanged when a step begins.

    Raises ConfigurationError where that cannot work."""
    passes = synchronize if isinstance(synchronize, int) and not isinstance(synchronize, bool) else None
    if synchronize not in (None, "backward", "step") and (passes is None or passes < 1):
        raise ConfigurationError(f"synchronize must be 'backward', 'step' or a number of passes; got {synchronize!r}")
    if algorithm.part("gradients") is None:
        return 0  # weights are exchanged once per step anyway
    if synchronize != "step":
        if offloads(model):
            raise ConfigurationError(
                "FSDP2 keeps gradients on the host (CPUOffloadPolicy), where they may arrive after the end of the backward "
                "pass: give replicate() synchronize='step', or take an algorithm that exchanges weights"
            )
        if passes in (None, 1):
            return 0
    reasons = {
        "a GradScaler looks at gradients before the step begins": scaler is not None,
        "overlap_forward lets the step begin before gradients have come": overlap_forward,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"synchronize={synchronize!r} cannot be used: {reason}")
    return inf if passes is None else passes - 1


def check_overlap(algorithm: Algorithm, optimizers: Sequence[Optimizer], scaler: Any, model: nn.Module) -> None:
    """Refuse what needs all gradients together, or has none to wait for."""
    shared = overlapping(
        {name: p.detach() for name, p in named_parameters(model).items() if p.requires_grad and not is_sharded(p)}
    )
    reasons = {
        f"parameters {shared and shared[0]!r} and {shared and shared[1]!r} share their memory, and are not updated together": (
            shared is not None
        ),
        f"{type(optimizers[0]).__name__} communicates by itself": isinstance(optimizers[0], Communicating),
        f"{algorithm!r} moves weights, which travel beside the next forward and backward pass anyway": (
            algorithm.part("gradients") is None or algorithm.part("weights") is not None
        ),
        "there is more than one optimizer, so parts of a step would not be known to belong together": len(optimizers) > 1,
        "a GradScaler looks at all gradients before the step": scaler is not None,
        "parameters are sharded (DTensors), and gathered before the modules that hold them are called": any(
            map(is_sharded, model.parameters())
        ),
        "a compiled model calls its modules inside of compiled code: give the model as it is, uncompiled": (
            hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"overlap_forward=True cannot be used: {reason}")
