"""Start: what ``replicate()`` does where an algorithm is to be chosen."""

import logging
from os import PathLike
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from gossamer.comm.runner import alarming
from gossamer.engine.agreement import agree
from gossamer.engine.assembly import Parts
from gossamer.errors import ConfigurationError
from gossamer.hooks import OwnHook, in_nested_step
from gossamer.planning.candidates import check_fidelity
from gossamer.planning.chooser import Chooser, Watch, Wish
from gossamer.planning.plan import Plan, agreed, loads
from gossamer.replica import Replica

_logger = logging.getLogger("gossamer")


def wished(algorithm: Any, fidelity: Any, plan: str | PathLike[str] | None, switch: bool) -> Wish:
    """What the user wants to be chosen. Raises ConfigurationError for arguments that do not go together."""
    if fidelity is None and plan is None:
        raise ConfigurationError("switch=True watches a choice: give fidelity= or plan= as well, or call replica.switch()")
    if algorithm is not None:
        raise ConfigurationError("give an algorithm, or fidelity= or plan= to have one chosen, not both")
    check_fidelity("exact" if fidelity is None else fidelity)
    return Wish(fidelity=fidelity or "exact", path=None if plan is None else Path(plan), switch=switch)


def begin(replica: Replica, parts: Parts, wish: Wish) -> None:
    """Use the plan that is there, or watch the first steps and make one. Collective."""
    if parts.links:
        name = type(parts.optimizers[0]).__name__
        raise ConfigurationError(f"{name} communicates by itself: leave fidelity= and plan= out")
    agree(parts.runner, {"what is asked of the choice": f"fidelity={wish.fidelity!r}, switch={wish.switch}"})
    if parts.runner.world == 1:
        _logger.info("plan: one rank exchanges nothing, so there is nothing to choose")
        return
    there = wish.path is not None and parts.runner.rank == 0 and wish.path.exists()
    text = agreed(parts.runner, wish.path.read_text() if there and wish.path is not None else "")
    if not text:
        _after_steps(parts, Chooser(replica, parts, wish))
        return
    plan = loads(text, str(wish.path))
    _check(plan, parts)
    if wish.switch:
        _after_steps(parts, Watch(replica, parts, wish, plan))
    if parts.runner.rank == 0:
        _logger.info("plan of %s: %s. %s", wish.path, plan.method, plan.why)
    replica.switch(plan.algorithm)


def _after_steps(parts: Parts, watcher: Chooser | Watch) -> None:
    """Call it after each step of the first optimizer, when the replica's own part of it is over."""

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not parts.loop.partial_step and not in_nested_step(optimizer):
            with alarming(parts.runner):
                watcher.after_step()

    parts.step_handles.append(parts.optimizers[0].register_step_post_hook(OwnHook(after_step)))


def _check(plan: Plan, parts: Parts) -> None:
    plan.check(parts.model, parts.runner.world)
    if plan.overlap_forward != (parts.overlap is not None):
        raise ConfigurationError(
            f"the plan was made with overlap_forward={plan.overlap_forward}: give replicate() the same, or make another one"
        )
