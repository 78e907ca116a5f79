"""Checkpoint: a training run on disk, each rank's own part in a file of its own, so that a kill at any moment loses nothing.

::

    from gossamer import checkpoint

    replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
    saved = checkpoint.load("checkpoints", model=model, optimizer=optimizer, replica=replica)  # None: there is none yet
    for epoch in range(saved["epoch"] if saved else 0, epochs):
        ...
        checkpoint.save("checkpoints", replica.step, model=model, optimizer=optimizer, replica=replica, epoch=epoch + 1)

Every function is collective: all ranks call it. The folder may be shared by all machines, or be local to each of them.

Note [when a checkpoint is complete]
A save has a folder of its own, which no other save ever writes to: ``step-000000300-<number>``, with one file per rank,
``rank0-of-4.pt``. Each rank writes its file under another name, waits until the disk has it, and renames it. When all ranks
have done so, one rank per folder writes ``complete.json`` in the same way. A folder without that file is not read. So a process
that ends at any moment leaves this save complete or ignored, and the one before untouched, since older saves are removed only
when all ranks know that this one is complete. The number grows with every save and orders them: after a return to an earlier
step, what was saved last is the newest, although its step is smaller.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from gossamer._version import __version__
from gossamer.checkpoint_files import Found, complete, file_name, read, remove_older, write_record, write_tensors
from gossamer.checks import is_whole
from gossamer.comm.connect import connect
from gossamer.comm.runner import Runner, alarming, give_up
from gossamer.engine.agreement import agree, values_of_all
from gossamer.engine.checkpoint import from_part
from gossamer.errors import CheckpointError, ConfigurationError
from gossamer.replica import Replica

__all__ = ["CheckpointError", "PerRank", "latest", "load", "save"]


def save(folder: str | os.PathLike[str], step: int, *, keep: int = 2, group: Any = None, **what: Any) -> Path:
    """Save ``what`` as of ``step``, and remove all but the ``keep`` newest checkpoints. Collective.

    Args:
        folder: where the checkpoints of this run lie; it is made if need be. Shared by all machines, or local to each.
        step: any whole number from 0 on; :func:`latest` returns it.
        keep: how many complete checkpoints stay. With 1, the one before is removed when this one is complete.
        group: the process group whose ranks save; the default group, unless there is a replica of all its ranks in ``what``.
        what: by name, objects with a ``state_dict()`` (model, optimizer, schedule, scaler, replica) and plain values: numbers,
            strings, tensors, and dictionaries and lists of these. Call it between two steps, outside of ``consensus()``.

    Returns:
        The folder of this checkpoint.

    Raises:
        ConfigurationError: an argument that cannot be saved, before anything is written.
        CheckpointError: on every rank, if any of them could not write its part; what was saved before is untouched.
    """
    _check(step, keep, what)
    with _meeting("gossamer.checkpoint.save()", group, what) as runner:
        contents = _states(what)
        agree(runner, {"the step of the checkpoint": str(step), "the names of what is saved": ", ".join(sorted(what))})
        place = Path(folder) / _new_name(runner, Path(folder), step)
        own = place / file_name(runner.rank, runner.world)
        _together(runner, lambda: write_tensors(own, contents), f"step {step} in {folder}")
        # All files are there now: the lowest of the ranks that see each other's speaks for this folder.
        speaks = min(rank for rank in range(runner.world) if (place / file_name(rank, runner.world)).exists()) == runner.rank
        record = {"step": step, "world": runner.world, "gossamer": __version__}
        _together(runner, lambda: write_record(place, record) if speaks else None, f"step {step} in {folder}")
        if speaks:
            remove_older(Path(folder), keep, place)
    return place


def latest(folder: str | os.PathLike[str], *, group: Any = None) -> int | None:
    """The step of the newest complete checkpoint that all ranks have; None if there is none. Collective.

    A warning says so if some ranks have a newer one that others lack.
    """
    with _meeting("gossamer.checkpoint.latest()", group, {}) as runner:
        newest = _newest(runner, Path(folder))
    return None if newest is None else newest.step


def load(folder: str | os.PathLike[str], step: int | None = None, *, group: Any = None, **what: Any) -> dict[str, Any] | None:
    """Load the newest checkpoint that all ranks have, or that of ``step``, into the objects given. Collective.

    Objects are given under the names under which they were saved; call it after :func:`gossamer.replicate`, with the replica
    among them. Files are read with ``torch.load(weights_only=True)``, to the host.

    Returns:
        A dictionary with ``"step"`` and all that was saved under other names; None if there is no checkpoint and ``step`` is
        None. With another number of ranks than saved it, rank r continues with the model, optimizer and values of rank r modulo
        that number, and the replica with what :meth:`gossamer.Replica.load_state_dict` makes of all parts; then every rank
        needs to see all files.

    Raises:
        CheckpointError: there is no complete checkpoint of ``step``, or a part of it cannot be read.
        ConfigurationError: an object that the checkpoint does not hold, before anything is changed.
    """
    for name, value in what.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigurationError(f"load(): {name}= has no load_state_dict(); plain values are returned, so leave it out")
    with _meeting("gossamer.checkpoint.load()", group, what) as runner:
        found = _newest(runner, Path(folder), step)
        if found is None:
            return None
        contents = read(found.path(runner.rank % found.world))
        absent = sorted(set(what) - set(contents))
        if absent:
            raise ConfigurationError(f"{found.place} holds no {', '.join(absent)}; it holds {', '.join(sorted(contents))}")
        for name, value in what.items():
            if isinstance(value, Replica):
                from_part(contents[name], value._runner.part)  # or an error, before anything is changed
        for name, value in _in_order_of_loading(what):
            state = contents.pop(name)
            value.load_state_dict(_merged(found, name, state, runner) if isinstance(value, Replica) else state)
    return {"step": found.step, **contents}


class PerRank:
    """What differs from rank to rank, for ``torch.distributed.checkpoint``: every rank's is saved under a key of its own.

    ::

        dcp.save({"run": checkpoint.PerRank(model=model, optimizer=optimizer, replica=replica)}, checkpoint_id=folder)
        dcp.load({"run": checkpoint.PerRank(model=model, optimizer=optimizer, replica=replica)}, checkpoint_id=folder)

    Given a model itself, ``dcp.save`` takes tensors of one name to be the same on all ranks and writes each of them once, some
    from this rank and some from that one. That is right for algorithms that exchange gradients. Where weights are exchanged it
    would be a model that no rank has; inside ``replica.consensus()`` all are equal, and it may be given as it is.

    Args:
        what: as for :func:`save`, but objects only.
    """

    def __init__(self, group: Any = None, **what: Any) -> None:
        self._what, self._group = what, group

    def state_dict(self) -> dict[str, Any]:
        """The states of all objects, under a key with this rank. Collective if one of them is a replica."""
        # In a tuple, which DCP writes and reads as one: a replica that is new has no tensors yet that could be filled.
        return {self._key(): (_states(self._what),)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load them, in the order in which they need each other. Collective if one of them is a replica."""
        (own,) = state[self._key()]
        for name, value in _in_order_of_loading(self._what):
            value.load_state_dict(own[name])

    def _key(self) -> str:
        replica = _replica_among(self._what)
        runner = replica._runner if replica is not None and self._group is None else connect(self._group)
        if replica is None:
            runner.close()
        return f"rank{runner.rank} of {runner.world}{'' if runner.part is None else f', part {runner.part}'}"


@contextmanager
def _meeting(what: str, group: Any, objects: Mapping[str, Any]) -> Iterator[Runner]:
    """A way to the other ranks: that of the replica, if there is one, else one for this call. Of a model in parts, all save."""
    replica = _replica_among(objects)
    if replica is not None and group is None and replica._runner.part is None:
        with alarming(replica._runner):
            yield replica._runner
        return
    runner = connect(group)
    try:
        runner.agree_on_opening(what)
        yield runner
    except BaseException as error:
        give_up(runner, error)
        raise
    runner.close()


def _new_name(runner: Runner, folder: Path, step: int) -> str:
    """A name that no save has had, greater than those of all before it, the same on all ranks."""
    known = complete(folder)
    number = max(time.time_ns(), known[-1].number + 1 if known else 0)
    return f"step-{step:09d}-{max(values_of_all(runner, number)):016x}"


def _together(runner: Runner, work: Callable[[], None], what: str) -> None:
    """Do it on every rank; if any of them could not, none has saved."""
    error: Exception | None = None
    try:
        work()
    except Exception as caught:
        error = caught
    said = values_of_all(runner, "" if error is None else f"{type(error).__name__}: {error}")
    failed = {rank: text for rank, text in enumerate(said) if text}
    if failed:
        reasons = "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        kind = ConfigurationError if all("ConfigurationError" in text for text in failed.values()) else CheckpointError
        raise kind(f"rank {runner.rank}: the checkpoint of {what} was not saved: {reasons}") from error


def _newest(runner: Runner, folder: Path, step: int | None = None) -> Found | None:
    """The newest complete checkpoint that all ranks can load, or the newest of ``step``."""
    mine = {each.number: each for each in complete(folder) if _all_there(each, runner)}
    offered = {number for number, each in mine.items() if step in (None, each.step)}
    everyone = values_of_all(runner, sorted(offered))
    common = set.intersection(*map(set, everyone))
    if step is not None and not common:
        have = ", ".join(f"rank {rank}: {each}" for rank, each in enumerate(values_of_all(runner, _steps(mine))))
        raise CheckpointError(f"{folder} holds no step {step} that all ranks have; complete here: {have}")
    lacking = {rank for rank, each in enumerate(everyone) if max(map(max, filter(None, everyone)), default=-1) not in each}
    if lacking and any(everyone) and runner.rank == 0:
        going = f"going on with step {mine[max(common)].step}" if common else "there is none that all have"
        warnings.warn(f"{folder}: ranks {sorted(lacking)} lack the newest checkpoint that others have; {going}", stacklevel=4)
    return mine[max(common)] if common else None


def _steps(found: Mapping[int, Found]) -> list[int]:
    return sorted({each.step for each in found.values()})


def _all_there(found: Found, runner: Runner) -> bool:
    """Whether this rank sees all the files that it needs."""
    needed = [runner.rank] if found.world == runner.world else range(found.world)
    return all(found.path(rank).exists() for rank in needed)


def _merged(found: Found, name: str, own: Mapping[str, Any], runner: Runner) -> Mapping[str, Any]:
    """A replica's state: of another number of ranks, the parts of all of them."""
    if found.world == runner.world:
        return own
    merged: dict[str, Any] = {}
    for rank in range(found.world):
        merged |= read(found.path(rank))[name]
    return merged


def _replica_among(what: Mapping[str, Any]) -> Replica | None:
    return next((value for value in what.values() if isinstance(value, Replica)), None)


def _states(what: Mapping[str, Any]) -> dict[str, Any]:
    """States of objects, other values as they are. First that of the replica: it may have to complete an exchange or a step,
    which changes the others."""
    first = sorted(what.items(), key=lambda item: not isinstance(item[1], Replica))
    return {name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value for name, value in first}


def _in_order_of_loading(what: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Optimizers, then the model that copies of theirs follow, then the replica, which compares its state with the weights."""
    return sorted(what.items(), key=lambda item: (isinstance(item[1], Replica), isinstance(item[1], nn.Module)))


def _check(step: Any, keep: Any, what: Mapping[str, Any]) -> None:
    if not is_whole(step, least=0):
        raise ConfigurationError(f"save(): step must be a whole number from 0 on; got {step!r}")
    if not is_whole(keep, least=1):
        raise ConfigurationError(f"save(): keep must be a whole number from 1 on; got {keep!r}")
    if not what:
        raise ConfigurationError("save(): nothing to save: give model=, optimizer=, replica=, …")
