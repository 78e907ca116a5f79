"""Joining: which replicas cannot train with different numbers of batches, and how ranks become equal when all have ended."""

from gossamer.engine.agreement import same_from_rank
from gossamer.engine.assembly import Parts
from gossamer.engine.checks import held_by, named_buffers
from gossamer.engine.exact import changing
from gossamer.engine.join import state_from_rank
from gossamer.engine.sharding import is_sharded
from gossamer.errors import UsageError


def refuse(parts: Parts, of_all: bool) -> None:
    """Raise UsageError where ``join()`` would not do what it says. ``of_all``: ``divide_by_initial_world_size``."""
    refuse_inside(parts, "join()")
    if parts.algorithm.cadence.lag:
        raise UsageError("join() is not needed where exchanges may lag: a rank may have as many batches as it likes")
    if parts.statistics.samples is not None and not of_all:
        raise UsageError(
            "join(divide_by_initial_world_size=False): with weigh() gradients are means over samples anyway; leave it"
        )
    if parts.scale.on:
        raise UsageError("join() cannot be used with scaler=: a rank without batches would not know by what others scale")
    if parts.gradients is not None and parts.weights:
        raise UsageError(
            f"join() cannot be used with {parts.algorithm!r}, which moves both gradients and weights "
            "(outer loops do with a dense start: set dense=0)"
        )
    if parts.overlap is not None:
        raise UsageError("join() cannot be used with overlap_forward: a rank without batches has no forward pass")
    if parts.gradients is None and not of_all:
        raise UsageError("join(divide_by_initial_world_size=False) is for algorithms that average gradients")
    if parts.gradients is not None and any(map(is_sharded, parts.parameters.values())):
        raise UsageError(
            "join() cannot be used with sharded parameters (DTensors) where gradients are exchanged: what an optimizer "
            "remembers of them cannot be sent to the ranks that ended early; give all ranks as many batches"
        )
    own = set(map(id, parts.parameters.values()))
    if parts.gradients is not None and any(id(p) not in own for each in parts.optimizers for p in held_by(each)):
        raise UsageError(
            "join() cannot be used where an optimizer holds parameters that are ignored: what it remembers of them is this "
            "rank's own, and would be replaced by another one's; give them an optimizer of their own"
        )


def refuse_inside(parts: Parts, what: str) -> None:
    """Raise UsageError inside ``join()``, where not all ranks would take part in ``what``."""
    if parts.join.on:
        raise UsageError(f"{what} inside join(): a rank whose batches have ended would not take part; call it after the block")


def conclude(parts: Parts, last: int, uneven: bool) -> None:
    """All ranks have ended: where gradients are exchanged, take over model and optimizers of rank ``last``. Collective.

    ``uneven``: whether any rank ended before it.
    """
    if parts.gradients is not None:
        parts.gradients.exchange.states.commit()
    if parts.weights:
        return
    buffers = [] if parts.buffers == "local" else named_buffers(parts.model).values()
    same_from_rank(parts.runner, [*parts.parameters.values(), *buffers], last)
    if uneven and not parts.links:  # communicating optimizers took their steps on all ranks
        for optimizer in parts.optimizers:
            with changing(optimizer):
                what = f"the state of {type(optimizer).__name__}"
                optimizer.load_state_dict(dict(state_from_rank(parts.runner, optimizer.state_dict(), last, what)))
