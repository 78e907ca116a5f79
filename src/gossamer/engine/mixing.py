"""Mixing: refuse that torch.distributed.checkpoint writes one model of ranks whose weights differ.

``dcp.save`` takes tensors of one name to be the same on all ranks, writes each of them once, and shares the work out: of ranks
that exchange weights it would write a model that none of them has. It has no place for a check, so the function that turns its
argument into states is wrapped, from the first replica on whose weights may differ; nothing is changed where nothing differs.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from gossamer.engine.sharding import local
from gossamer.errors import UsageError

Differing = Callable[[], Mapping[str, Tensor]]
"""The weights, by name, of a replica whose ranks differ at present; nothing if they do not."""

_OURS = "_gossamer_checks"

_known: "list[weakref.WeakMethod[Differing]]" = []


def refuse_for(differing: Differing, rank: int) -> None:
    """Refuse to save what ``differing`` (a method of the replica, which is not kept alive by this) returns."""
    _known[:] = [each for each in _known if each() is not None]
    _known.append(weakref.WeakMethod(differing))
    saver: Any = sys.modules.get("torch.distributed.checkpoint.state_dict_saver")  # to import it takes two seconds
    to_states = getattr(saver, "_stateful_to_state_dict", None)
    if to_states is None or hasattr(to_states, _OURS):
        return

    @functools.wraps(to_states)
    def checked(state_dict: Any) -> Any:
        states = to_states(state_dict)
        _check(states, rank)
        return states

    setattr(checked, _OURS, True)
    saver._stateful_to_state_dict = checked


def _check(states: Any, rank: int) -> None:
    places = {
        local(tensor).untyped_storage().data_ptr(): name
        for known in _known
        if (differing := known()) is not None
        for name, tensor in differing().items()
        if local(tensor).numel()
    }
    for tensor in _tensors(states) if places else ():
        name = places.get(local(tensor).untyped_storage().data_ptr()) if tensor.device.type != "meta" else None
        if name is not None:
            raise UsageError(
                f"rank {rank}: torch.distributed.checkpoint would write one model of ranks whose weights differ (parameter "
                f"{name!r} and others): save the average inside replica.consensus(), or every rank's own by "
                "gossamer.checkpoint.PerRank(model=model, …) or gossamer.checkpoint.save()"
            )


def _tensors(states: Any) -> Iterator[Tensor]:
    """The tensors that are saved one by one: those in tuples are written as a whole."""
    if isinstance(states, Tensor):
        yield states
    elif isinstance(states, Mapping | list):
        for each in states.values() if isinstance(states, Mapping) else states:
            yield from _tensors(each)
