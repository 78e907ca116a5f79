"""Rehearsal: what an algorithm computes with is compiled, or loaded, before ranks meet.

Compilers take every rank another time, up to many seconds where nothing is in their cache. In the first exchange the other
ranks would wait for it. So each rank carries out the exchanges of a small bucket by itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm, parts_of
from gossamer.algorithms.scatter_reduce import ScatterReduce
from gossamer.bucket_plan import Layout, is_buffer, make_layout
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.comm.echo import EchoPort
from gossamer.comm.ops import Context, drive
from gossamer.comm.runner import Runner, without_autocast
from gossamer.engine.history import weight_of
from gossamer.engine.sharding import local
from gossamer.memory import as_real, wide
from gossamer.optim.communicating import Communicating
from gossamer.pieces import cut
from gossamer.state import State

_MOST = 2**19
"""Elements of a bucket. More are encoded by the same code, and fewer might be gathered without any."""

_rehearsed: set[tuple[Algorithm, torch.dtype, torch.device, int, int]] = set()
"""What this process has carried out: what is compiled or loaded stays. Of the ranks of a loopback world the first one does."""


@torch.no_grad()
def rehearse_all(algorithm: Algorithm, tensors: Mapping[str, Tensor], optimizers: Sequence[Optimizer], runner: Runner) -> None:
    """Carry out what ``algorithm``, and ``optimizers`` that communicate by themselves, will do with ``tensors``: without the
    other ranks, and without any effect."""
    tensors = {name: as_real(local(tensor.detach())) for name, tensor in tensors.items()}
    parameters = {name: tensor for name, tensor in tensors.items() if not is_buffer(name)}
    for part, moved in ((algorithm.part("gradients"), parameters), (algorithm.part("weights"), tensors)):
        if part is not None:
            _rehearse(part, moved, runner)
    for optimizer in optimizers:
        if isinstance(optimizer, Communicating):
            _rehearse(optimizer.algorithm, {name: wide(tensor) for name, tensor in parameters.items()}, runner)


def _rehearse(algorithm: Algorithm, tensors: Mapping[str, Tensor], runner: Runner) -> None:
    """Exchange buckets like those of ``tensors``."""
    for layout in _layouts(algorithm, tensors):
        for each in dict.fromkeys(_with_parts(layout.handler)):
            kind = each, layout.dtype, layout.device, layout.numel, runner.world
            if kind in _rehearsed:
                continue
            _rehearsed.add(kind)
            # An error is not this one's business: the exchange itself meets it, and says where.
            with suppress(Exception), without_autocast():
                _exchange_alone(each, layout, runner)


def _layouts(algorithm: Algorithm, tensors: Mapping[str, Tensor]) -> Iterator[Layout]:
    """A bucket of one flat tensor for each kind of bucket that there may be."""
    first: dict[tuple[torch.dtype, torch.device, Algorithm], str] = {}
    sizes: dict[str, int] = {}
    for name, tensor in cut(tensors, algorithm.cadence.parts, weight_of).items():
        if tensor.device.type != "meta":
            kind = tensor.dtype, tensor.device, algorithm.route(name, tensor)
            kept = first.setdefault(kind, name)
            sizes[kept] = sizes.get(kept, 0) + tensor.numel()
    for (dtype, device, handler), name in first.items():
        like = torch.empty(min(_MOST, sizes[name]), dtype=dtype, device=device)
        yield make_layout({name: like}, handler, message=handler.message_dtype(dtype))


def _with_parts(algorithm: Algorithm) -> Iterator[Algorithm]:
    """An algorithm, and those that it is made of: which of them run depends on the step, or on the rank. Of a user's, which may
    count its calls, its codecs only."""
    if _is_ours(algorithm):
        yield algorithm
    else:
        held = [getattr(algorithm, field.name) for field in fields(algorithm)]
        yield from (ScatterReduce(codec=each) for each in held if isinstance(each, Codec))
    for part in parts_of(algorithm):
        yield from _with_parts(part)


def _is_ours(algorithm: Algorithm) -> bool:
    return type(algorithm).__module__.startswith("gossamer.") and all(map(_is_ours, parts_of(algorithm)))


def _exchange_alone(algorithm: Algorithm, layout: Layout, runner: Runner) -> None:
    """Two exchanges: in the first one nothing is remembered yet."""
    bucket, port = Bucket(0, layout), EchoPort(runner.rank, runner.world)
    own, of_steps = State(bucket.flat), State(torch.zeros(1))
    cadence = algorithm.cadence
    for step in map(cadence.step_of, range(2) if cadence.beats else ()):
        ctx = Context(step, runner.rank, runner.members, runner.nodes)
        bucket.renew()
        bucket.flat.copy_(torch.linspace(-1, 1, bucket.flat.numel()))
        if algorithm.traits.moves_mean and not any(True for _ in own):
            algorithm.begin(bucket, own, ctx)
        result = drive(algorithm.exchange(bucket, own, ctx), port)
        if algorithm.subject == "gradients":
            algorithm.put_back(result, layout.segments[0], own, ctx)
        flow = algorithm.finish([bucket], [own], of_steps, ctx)
        if flow is not None:
            drive(flow, port)
        own.commit()
