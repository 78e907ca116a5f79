"""Module buffers (BatchNorm's running statistics and others): how they are kept together.

Note [buffers at the end of backward]: they are synchronised when a synchronised backward pass ends, and not before the next
forward pass as in DDP. What a training forward reads is the same: DDP broadcasts in the first forward after such a pass. It
differs in three ways. Between steps the replicas are one model, so a plain ``model.eval()`` gives one result on all ranks. A
forward pass communicates nothing, so one rank may run it alone, and a compiled model needs no hook. Where several forward
passes come before one backward, each rank reads in the second what its own first one has left, where DDP reads rank 0's: that
is only seen by modules whose training forward reads a buffer that it writes. What a rank changes between its backward and its
next forward stays its own until the next backward ends.
"""

import logging
from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from gossamer.algorithms.base import Algorithm
from gossamer.bucket_plan import buffer_name, name_of_buffer
from gossamer.comm.ops import all_reduce
from gossamer.comm.runner import Runner, lane_for
from gossamer.engine.agreement import PORTION, in_portions, same_from_rank
from gossamer.engine.checks import named_buffers as named_buffers
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.sharding import local_of
from gossamer.engine.statistics import Statistics
from gossamer.errors import ConfigurationError, UsageError
from gossamer.memory import as_real, stored, wide, widened

_logger = logging.getLogger("gossamer")

Buffers = Literal["broadcast", "average", "local"]


def resolve_buffers(buffers: Buffers | None, subject: str) -> Buffers:
    """The mode to use: what was given, or ``"broadcast"`` for gradient and ``"average"`` for weight algorithms."""
    if buffers is None:
        return "broadcast" if subject == "gradients" else "average"
    if buffers not in get_args(Buffers):
        raise ConfigurationError(f"buffers must be one of {', '.join(get_args(Buffers))}; got {buffers!r}")
    return buffers


def check_buffers(algorithm: Algorithm, model: nn.Module, buffers: Buffers) -> None:
    """Raise ConfigurationError if this algorithm must not average the buffers that the model has."""
    if buffers == "average" and not algorithm.traits.averages_buffers and floating(named_buffers(model)):
        raise ConfigurationError(
            f"{type(algorithm).__name__} magnifies updates where little weight is, which would make running variances "
            "negative: take buffers='local' (or 'broadcast', unless exchanges may lag)"
        )


def floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What can be averaged: complex ones as views of their real numbers, of sharded ones what this rank holds. Torch does
    not compute with 8-bit numbers, and what else wraps other tensors may not be written to."""
    held = local_of(tensors)
    real = {name: as_real(tensor.detach()) if tensor.is_complex() else tensor for name, tensor in held.items()}
    own = {name: t for name, t in real.items() if t.numel() > 0 and next(iter(stored(t)), None) is t}
    return {name: t for name, t in own.items() if t.is_floating_point() and t.element_size() > 1}


def beside_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The buffers under names that no parameter has, to travel with the weights."""
    return {buffer_name(name): tensor for name, tensor in floating(named_buffers(model)).items()}


def averaged(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that travel with the weights.

    Not buffers that hold infinities when training starts (masks of attention, equal on all ranks): ∞ − ∞ is no number. Of a
    model on the ``meta`` device, which is only priced, nobody knows that.
    """
    return {name: tensor for name, tensor in beside_parameters(model).items() if tensor.is_meta or tensor.isfinite().all()}


_BUFFERS = "the synchronisation of buffers"


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """The shape of each."""
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


def check_shapes(runner: Runner, before: Mapping[str, list[int]], tensors: Mapping[str, Tensor]) -> None:
    """Raise UsageError if buffers that ranks bring together are not those of ``before``, in shape and number: only this rank
    knows, and what it sends would be taken for something else."""
    now = shapes_of(tensors)
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            was, is_now = before.get(name, "nothing"), now.get(name, "nothing")
            raise UsageError(
                f"rank {runner.rank}: buffer {name_of_buffer(name)!r} changed its shape after replicate(), from {was} to "
                f"{is_now}, so that ranks cannot bring it together: let each rank keep its own (ignore=[its name], or "
                "buffers='local'), or close the replica and call replicate() again"
            )


def synchronise_buffers(runner: Runner, model: nn.Module, mode: Buffers, source: int = 0) -> None:
    """Broadcast the buffers of rank ``source``, or average the floating-point ones over all ranks."""
    tensors = named_buffers(model)
    if mode == "broadcast":
        same_from_rank(runner, list(tensors.values()), source, _BUFFERS)
    elif mode == "average":
        average(runner, list(floating(tensors).values()), _BUFFERS)


def average(runner: Runner, tensors: list[Tensor], what: str = "the average of buffers") -> None:
    """Overwrite floating-point ``tensors`` with their means over all ranks; those of 16 bits are summed in full precision.

    In messages of up to ``PORTION`` bytes: so much memory is needed beside them.
    """
    for kind in dict.fromkeys((tensor.device, tensor.dtype) for tensor in tensors):
        group = [tensor for tensor in tensors if (tensor.device, tensor.dtype) == kind]
        most = PORTION // widened(kind[1]).itemsize
        for portion in in_portions(group, lambda tensor: tensor.reshape(-1), most):
            flat = wide(torch.cat(portion)).div_(runner.world)
            mean = runner.run(lambda flat=flat: all_reduce(flat), what, lane_for(flat))  # type: ignore[misc]
            torch._foreach_copy_(portion, list(mean.split([len(piece) for piece in portion])))


class BufferSync(Subscriber):
    """Broadcasts or averages the buffers when a synchronised backward pass has ended."""

    def __init__(self, runner: Runner, loop: Loop, model: nn.Module, mode: Buffers, statistics: Statistics) -> None:
        self._runner, self._loop, self._model, self._mode, self._statistics = runner, loop, model, mode, statistics
        self._shapes = shapes_of(named_buffers(model))
        self._told = False

    def end_backward(self) -> None:
        check_shapes(self._runner, self._shapes, named_buffers(self._model))
        with self._statistics.exposed():
            synchronise_buffers(self._runner, self._model, self._mode, self._loop.source)

    def before_step(self, index: int, closure: bool) -> None:
        if closure or self._told or self._loop.synchronised_passes:
            return
        self._told = True
        _logger.warning(
            "rank %d: optimizer.step(), but no backward pass outside of no_sync() has reached a parameter: buffers are "
            "synchronised at the end of such a pass, and so not at all; give replicate() buffers='local' where gradients are "
            "computed in another way", self._runner.rank
        )  # fmt: skip
