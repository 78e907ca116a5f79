"""Checkpoint: a replica's state as a plain dictionary, keyed by rank and by parameter name."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner
from gossamer.errors import ConfigurationError
from gossamer.sync.agreement import agree
from gossamer.sync.gradients import GradientSync
from gossamer.sync.weights import WeightSync

FORMAT = 1


def rank_key(rank: int) -> str:
    """The key of one rank's own entries. A key that all ranks share would reload rank 0's tensors on all of them."""
    return f"rank{rank}"


def step_key(rank: int) -> str:
    """The key of what one rank's algorithm keeps per step rather than per parameter."""
    return f"rank{rank}, per step"


def collect(
    runner: Runner, algorithm: Algorithm, step: int, gradients: GradientSync | None, weights: Sequence[WeightSync]
) -> dict[str, Any]:
    """Everything needed to go on bit-identically, at a step boundary. Tensors are copies."""
    syncs = _syncs(gradients, weights)
    own: dict[str, dict[str, Tensor]] = {}
    plan: dict[str, Any] = {}
    for sync in weights:
        for key, tensors in sync.state_by_name().items():
            own.setdefault(key, {}).update(tensors)
    if gradients is not None:
        own = gradients.state_by_name()
        plan = gradients.plan.to_dict() | {"learned": gradients.learned}
    return {
        "format": FORMAT,
        "algorithm": repr(algorithm),
        "world": runner.world,
        "step": step,
        "plan": plan,
        rank_key(runner.rank): {key: {n: t.clone() for n, t in tensors.items()} for key, tensors in own.items()},
        step_key(runner.rank): [{key: value.clone() for key, value in sync.step_state.items()} for sync in syncs],
    }


def restore(
    state: Mapping[str, Any],
    runner: Runner,
    algorithm: Algorithm,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync],
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
        gradients.load_state_by_name(own)
    for sync in weights:
        sync.load_state_by_name(own)
    for each, values in zip(_syncs(gradients, weights), state[step_key(runner.rank)], strict=True):
        each.step_state.load({key: value.clone() for key, value in values.items()})
    return int(state["step"])


def _syncs(gradients: GradientSync | None, weights: Sequence[WeightSync]) -> list[GradientSync | WeightSync]:
    return [*([gradients] if gradients is not None else []), *weights]
