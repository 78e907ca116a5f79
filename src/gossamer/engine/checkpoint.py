"""Checkpoint: a replica's state as a plain dictionary, keyed by rank and by parameter name.

Note [what differs from rank to rank]
What all ranks share stands under names; what differs stands under a key with the rank, as one tuple.
``torch.distributed.checkpoint`` takes tensors under one key to be the same on all ranks, and loads only what the dictionary of
a new replica already has, which remembers nothing yet. A tuple it writes and reads as one value, whatever is in it.
"""

import ast
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.comm.ops import Group
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import agree, checksum
from gossamer.engine.bucket_states import Kept
from gossamer.engine.gradients import GradientSync
from gossamer.engine.optimizers import OptimizerSync
from gossamer.engine.other_ranks import OF_MEANS, grouped, means, on_its_way, shared_out
from gossamer.engine.settings import other_settings
from gossamer.engine.weights import WeightSync
from gossamer.errors import ConfigurationError
from gossamer.state import BEGUN, RESIDUAL

FORMAT = 3

WEIGHTS = "weights: "
"""Before the names of what is kept about weights, where gradients and weights both travel."""


class Own(NamedTuple):
    """What one rank's replica has to itself: plain values, saved as an ordinary tuple."""

    kept: Kept
    """What the algorithm keeps per element, by its name and the parameter's."""
    extras: list[dict[str, dict[str, Tensor]]]
    """What it keeps in other shapes, for each exchange."""
    weights: str
    """The fingerprint of the weights with which the state was saved; empty where all ranks have the same."""


def rank_key(rank: int) -> str:
    """The key of one rank's own entries. A key that all ranks share would reload rank 0's tensors on all of them."""
    return f"rank{rank}"


def of_part(state: Mapping[str, Any], part: int | None) -> dict[str, Any]:
    """A state under keys that no other part of the model has: each has a plan and ranks of its own."""
    return {f"{key}{_suffix(part)}": value for key, value in state.items()}


def from_part(state: Any, part: int | None) -> Any:
    """The reverse, of what may hold other parts too. Raises ConfigurationError where it holds others only."""
    end = _suffix(part)
    if not isinstance(state, Mapping):
        return state
    if f"format{end}" not in state and any(str(key).startswith("format") for key in state):
        raise ConfigurationError(
            f"this state holds nothing of {'a whole model' if part is None else f'part {part} of the model'}: it was saved "
            "where the mesh had another shape. Save the average of the replicas with torch.distributed.checkpoint, "
            f"which cuts it anew, inside replica.consensus() (keys: {sorted(map(str, state))})"
        )
    return {key.removesuffix(end): value for key, value in state.items() if str(key).endswith(end)}


def _suffix(part: int | None) -> str:
    return "" if part is None else f" of part {part}"


def own_of(state: Mapping[str, Any], rank: int) -> Own:
    """One rank's entries of a state."""
    return Own(*state[rank_key(rank)])


def fingerprint(weights: Iterable[Tensor]) -> str:
    """What tells these weights from others."""
    return checksum([weight.detach() for weight in weights])


def _has_saved_weights(state: Mapping[str, Any], runner: Runner, model: Iterable[Tensor]) -> bool:
    """Whether ``model`` is that with which this rank's state was saved, or that of the rank whose place it takes. As many ranks
    as saved it are warned if not."""
    saved = own_of(state, runner.rank % state["world"]).weights
    same = not saved or saved == fingerprint(model)
    if not same and state["world"] == runner.world:
        warnings.warn(
            f"rank {runner.rank}: the model has not the weights with which this state was saved. Load this rank's own "
            "checkpoint: first the optimizer, then call replicate(), then load the model (replicate() copies rank 0's weights "
            "to all ranks), then the replica's state",
            stacklevel=5,
        )
    return same


def collect(
    runner: Runner,
    algorithm: Algorithm,
    step: int,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync | OptimizerSync],
    of_weights: str,
) -> dict[str, Any]:
    """Everything needed to go on bit-identically, at a step boundary. Tensors are copies. The gradients of passes that no
    step was taken for are not saved; nor is what was kept back of them. ``of_weights``: their fingerprint.
    """
    syncs, prefix = _syncs(gradients, weights), _prefix(gradients)
    own: dict[str, dict[str, Tensor]] = {}
    plan: dict[str, Any] = {}
    for sync in weights:
        for key, tensors in sync.state_by_name().items():
            own.setdefault(prefix + key, {}).update(tensors)
    if gradients is not None:
        own |= gradients.exchange.states.by_name()
        order = gradients.exchange.order if gradients.arranged else None
        plan = gradients.next_plan.to_dict() | {"learned": gradients.learned, "order": order}
    extras = [gradients.extras_to_save() if sync is gradients else sync.exchange.states.extras_by_name() for sync in syncs]
    return {
        "format": FORMAT,
        "algorithm": repr(algorithm),
        "world": runner.world,
        "machines": repr(runner.nodes),
        "step": step,
        "steps": [sync.steps for sync in weights if isinstance(sync, WeightSync)],
        "history": [sync.history_names for sync in weights if isinstance(sync, WeightSync)],
        "plan": plan,
        rank_key(runner.rank): (_copied(own), [_copied(each) for each in extras], of_weights),
    }


def restore(
    state: Mapping[str, Any],
    runner: Runner,
    algorithm: Algorithm,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync | OptimizerSync],
    model: Iterable[Tensor],
) -> int:
    """Put a collected state back; returns the step. ``model``: the weights, loaded already.

    One that was saved by another number of ranks must hold the entries of all of them. Then residuals of the old ranks are
    summed onto rank modulo the new number, and scaled so that their mean stays. Of momenta and outer weights every rank takes
    the mean (as many ranks on other machines: none). State in other shapes comes from rank modulo the old number, but not that
    of machines, which may be others now; and what is on its way to that rank's weights, with the samples behind them, if the
    model is that rank's: outer weights are where these lead. Other state of an exchange of weights is dropped. Where the
    algorithm has other settings now, so is all of that, and everything but residuals and momenta of gradients.
    """
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ConfigurationError(f"this is not a state of gossamer in format {FORMAT}: {found}")
    others = other_settings(algorithm, state["algorithm"])
    own, extras = _entries(state, runner, algorithm, gradients, weights, others, model)
    step, plan = "any" if algorithm.cadence.lag else str(state["step"]), state["plan"]
    agree(
        runner,
        {
            "the step of the saved state": step,
            "the saved plan of buckets": repr(plan),
            "the settings of the saved run": state["algorithm"],
        },
    )
    if gradients is not None:
        gradients.load_plan(plan["buckets"], plan["learned"], plan.get("order"), anew=bool(others))
        gradients.step = state["step"]
    prefix = _prefix(gradients)
    of_weights = {key.removeprefix(prefix): tensors for key, tensors in own.items() if key.startswith(prefix)}
    of_gradients = {key: tensors for key, tensors in own.items() if not key.startswith(WEIGHTS)}
    of_optimizers = [sync for sync in weights if isinstance(sync, WeightSync)]
    for each, steps in zip(of_optimizers, state.get("steps", [state["step"]] * len(of_optimizers)), strict=True):
        each.steps = int(steps)
    for each, names in zip(of_optimizers, state.get("history", [None] * len(of_optimizers)), strict=True):
        each.history_saved = names
    for sync, kept in zip(_syncs(gradients, weights), extras, strict=True):
        if isinstance(sync, GradientSync):
            sync.exchange.states.load_by_name(of_gradients, kept)
        else:
            sync.load_state_by_name(of_weights, kept)
    return int(state["step"])


def has_other_nodes(state: Mapping[str, Any], runner: Runner, algorithm: Algorithm) -> bool:
    """Whether workers of one node, whose weights are to be equal, may have been in several when the state was saved."""
    return algorithm.part("weights") is not None and bool(algorithm.traits.nodes) and _regrouped(state, runner, algorithm)


def _regrouped(state: Mapping[str, Any], runner: Runner, algorithm: Algorithm) -> bool:
    """Whether ranks of another number, or, where it matters to the algorithm, on other machines have saved the state."""
    if state["world"] != runner.world:
        return True
    return bool(algorithm.traits.nodes) and _machines_then(state) != _machines(runner, repr(algorithm))


def _entries(
    state: Mapping[str, Any],
    runner: Runner,
    algorithm: Algorithm,
    gradients: GradientSync | None,
    weights: Sequence[WeightSync | OptimizerSync],
    others: Sequence[str] = (),
    model: Iterable[Tensor] = (),
) -> tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]:
    """What of a state this rank takes over: its own entries; of another number of ranks, its share of theirs. ``others``: the
    settings that are not those of the saved run."""
    saved, now, rank = int(state["world"]), runner.world, runner.rank
    missing = [each for each in ([rank] if saved == now else range(saved)) if rank_key(each) not in state]
    if missing:
        hint = "each rank loads what it saved" if saved == now else "merge what all of them saved into one dictionary"
        raise ConfigurationError(
            f"rank {rank}: this state was saved by {saved} ranks, this run has {now}; it holds no entry for rank "
            f"{', '.join(map(str, missing))}: {hint} (keys: {sorted(state)})"
        )
    exchanges = len(_syncs(gradients, weights))
    there = len(own_of(state, rank if saved == now else 0).extras)
    if there != exchanges:
        raise ConfigurationError(
            f"rank {rank}: this state is of {there} exchanges and this replica has {exchanges} (one for the gradients, one for "
            "each optimizer whose weights travel): give replicate() as many optimizers as when it was saved, in the same order"
        )
    regrouped = _regrouped(state, runner, algorithm)
    own, extras, _ = own_of(state, rank % saved)
    same = _has_saved_weights(state, runner, model)
    if not regrouped and not others:
        return own, extras
    travels = [isinstance(sync, WeightSync) for sync in _syncs(gradients, weights)]
    if rank == 0 and others:
        kept = "what was not sent yet is kept, all else begins anew"
        if any(travels):
            kept = "what was not sent yet of gradients is kept, all else begins anew, outer weights and momenta too"
        warnings.warn(f"the saved run had other settings ({'; '.join(others)}): {kept}", stacklevel=4)
    if rank == 0 and regrouped:
        warnings.warn(
            f"a state of {saved} ranks is loaded by {'ranks on other machines' if saved == now else now}: what was not sent "
            "yet is shared out among them, outer weights and momenta become their means, and all else of an exchange of "
            "weights begins anew, but for what has come for the weights of now",
            stacklevel=4,
        )
    going_on = on_its_way(own, _prefix(gradients), same, now)
    if regrouped:
        own = _share_of_all(state, runner, algorithm)
    # A leader of now may have led no node before, and has not what the others would go on with.
    anew = others or (regrouped and algorithm.traits.nodes)
    of_any = () if others or saved == now else (RESIDUAL, *OF_MEANS)
    begun: Kept = {}
    if any(travels):
        own = {key: each for key, each in own.items() if not key.startswith(_prefix(gradients)) or key.endswith(of_any)}
        own |= {} if others else going_on
    for entry in [each for rank in range(saved) for each in own_of(state, rank).extras] if of_any else ():
        for key in (key for key in entry if key.endswith(BEGUN)):  # of nodes, only leaders have it
            begun.setdefault(key, {}).update(entry[key])  # of several optimizers each has its own parameters
    return own, [begun if of_weights else {} if anew else kept for of_weights, kept in zip(travels, extras, strict=True)]


def _share_of_all(state: Mapping[str, Any], runner: Runner, algorithm: Algorithm) -> Kept:
    """This rank's share of what other ranks, or as many on other machines, kept per element."""
    saved, now = int(state["world"]), runner.world
    machines, before = _machines(runner, repr(algorithm)), _machines_then(state)
    # The residual of a node's leader counts as often as there are workers on the largest machine.
    leaders = max(map(len, before)) / max(map(len, machines))
    entries = [own_of(state, each).kept for each in range(runner.rank, saved, now)]
    summed = [{key: each for key, each in entry.items() if not key.endswith(OF_MEANS)} for entry in entries]
    own = shared_out(summed, now / saved, leaders)
    if saved != now:  # all ranks, because what follows from means is the same on all
        own |= means([own_of(state, each).kept for each in range(saved)])
    return own


def _machines(runner: Runner, algorithm: str) -> Sequence[Group]:
    """The ranks of each machine, as the algorithm of this ``repr`` sees them."""
    return grouped(runner.nodes, algorithm, runner.world)


def _machines_then(state: Mapping[str, Any]) -> Sequence[Group]:
    """The same of a saved state."""
    return grouped(ast.literal_eval(state.get("machines", "None")), state["algorithm"], int(state["world"]))


def _prefix(gradients: GradientSync | None) -> str:
    return "" if gradients is None else WEIGHTS


def _copied(kept: Kept) -> Kept:
    return {key: {name: tensor.clone() for name, tensor in tensors.items()} for key, tensors in kept.items()}


def _syncs(
    gradients: GradientSync | None, weights: Sequence[WeightSync | OptimizerSync]
) -> list[GradientSync | WeightSync | OptimizerSync]:
    return [*([gradients] if gradients is not None else []), *weights]
