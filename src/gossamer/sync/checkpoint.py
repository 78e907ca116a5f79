"""Checkpoint: a replica's state as a plain dictionary, keyed by rank and by parameter name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner
from gossamer.errors import ConfigurationError
from gossamer.sync.agreement import agree
from gossamer.sync.exchange import Kept
from gossamer.sync.gradients import GradientSync
from gossamer.sync.optimizers import OptimizerSync
from gossamer.sync.weights import WeightSync

FORMAT = 2

WEIGHTS = "weights: "
"""Before the names of what is kept about weights, where gradients and weights both travel."""


def rank_key(rank: int) -> str:
    """The key of one rank's own entries. A key that all ranks share would reload rank 0's tensors on all of them."""
    return f"rank{rank}"


def extras_key(rank: int) -> str:
    """The key of what one rank's algorithm keeps in other shapes than its parameters'."""
    return f"rank{rank}, extras"


def collect(
    runner: Runner,
    algorithm: Algorithm,
    step: int,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync | OptimizerSync],
) -> dict[str, Any]:
    """Everything needed to go on bit-identically, at a step boundary. Tensors are copies."""
    syncs, prefix = _syncs(gradients, weights), _prefix(gradients)
    own: dict[str, dict[str, Tensor]] = {}
    plan: dict[str, Any] = {}
    for sync in weights:
        for key, tensors in sync.state_by_name().items():
            own.setdefault(prefix + key, {}).update(tensors)
    if gradients is not None:
        own |= gradients.exchange.state_by_name()
        plan = gradients.exchange.plan.to_dict() | {"learned": gradients.learned}
    return {
        "format": FORMAT,
        "algorithm": repr(algorithm),
        "world": runner.world,
        "step": step,
        "plan": plan,
        rank_key(runner.rank): _copied(own),
        extras_key(runner.rank): [_copied(sync.exchange.extras_by_name()) for sync in syncs],
    }


def restore(
    state: Mapping[str, Any],
    runner: Runner,
    algorithm: Algorithm,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync | OptimizerSync],
) -> int:
    """Put a collected state back; returns the step."""
    if state.get("format") != FORMAT:
        raise ConfigurationError(f"this is not a state of gossamer in format {FORMAT}: {sorted(state)}")
    if state["algorithm"] != repr(algorithm):
        raise ConfigurationError(f"the state was saved by {state['algorithm']}, this replica runs {algorithm!r}")
    if state["world"] != runner.world:
        raise ConfigurationError(f"the state was saved by {state['world']} ranks, this run has {runner.world}")
    own = state.get(rank_key(runner.rank))
    if own is None:
        raise ConfigurationError(
            f"the state holds no entry for rank {runner.rank}; each rank loads what it saved (keys: {sorted(state)})"
        )
    agree(runner, {"the step of the saved state": str(state["step"]), "the saved plan of buckets": repr(state["plan"])})
    if gradients is not None:
        gradients.load_plan(state["plan"]["buckets"], state["plan"]["learned"])
        gradients.step = state["step"]
    extras = state[extras_key(runner.rank)]
    prefix = _prefix(gradients)
    of_weights = {key.removeprefix(prefix): tensors for key, tensors in own.items() if key.startswith(prefix)}
    of_gradients = {key: tensors for key, tensors in own.items() if not key.startswith(WEIGHTS)}
    for sync, kept in zip(_syncs(gradients, weights), extras, strict=True):
        if isinstance(sync, GradientSync):
            sync.exchange.load_state_by_name(of_gradients, kept)
        else:
            sync.load_state_by_name(of_weights, kept)
    return int(state["step"])


def _prefix(gradients: GradientSync | None) -> str:
    return "" if gradients is None else WEIGHTS


def _copied(kept: Kept) -> Kept:
    return {key: {name: tensor.clone() for name, tensor in tensors.items()} for key, tensors in kept.items()}


def _syncs(
    gradients: GradientSync | None, weights: Sequence[WeightSync | OptimizerSync]
) -> list[GradientSync | WeightSync | OptimizerSync]:
    return [*([gradients] if gradients is not None else []), *weights]
