"""PowerSGD: the gradient of every matrix as a product of two thin ones."""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.lossy import Lossy, turn_over
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.codecs.residual import keep
from gossamer.codecs.wire import Wire, check_wire
from gossamer.comm.ops import Flow, all_reduce
from gossamer.errors import ConfigurationError
from gossamer.memory import portion, wide
from gossamer.state import RESIDUAL, State

FACTOR = "right factor"


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Lossy):
    """One step of power iteration per training step: P = mean of M·Q, made orthonormal; Q = mean of Mᵀ·P; M ≈ P·Qᵀ.

    M is the gradient of an m×n matrix (kernels of convolutions as m×(n·k·k)) plus what was not sent before; Q starts
    where the last step left it, so that successive steps find the largest singular directions. Matrices that ``rank``
    would not make smaller, and vectors, are all-reduced exactly.

    Two all-reduces per bucket, one after the other, so twice the messages of an exact one; together ``rank``·(m+n)
    elements per matrix, in full precision. Memory: one residual per element, in 16 bits (``residual="fp32"``: in full
    precision). Compute: four products with thin matrices and a QR decomposition.

    Not the choice for models of vectors or tiny matrices, or where computation, not the network, is what is short; nor
    with Adam, which makes large what little there is outside of these directions: the GPT ends 0.5 nats behind. With SGD
    the convnet keeps its accuracy (0.3 points in a short run from the start; ``docs/algorithms.md`` has the figures).
    Workers on different kinds of processors may differ in the last bits, because their QR decompositions do.

    Source: Vogels et al. 2019 (arXiv 1905.13727), algorithms 1 and 2.
    """

    rank: int = 2
    residual: Wire = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("residual", self.residual)
        if not is_whole(self.rank, 1):
            raise ConfigurationError(f"rank must be a positive number of columns; got {self.rank!r}")

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> Algorithm:
        shapes = [parameter.shape for parameter in parameters]
        if not any(self.shrinks(shape) for shape in shapes):
            raise ConfigurationError(
                f"PowerSGD(rank={self.rank}) compresses matrices, and this model has none that it would make smaller "
                f"({len(shapes)} parameters, vectors or small): use AllReduce or ScatterReduce"
            )
        return self

    def shrinks(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of this shape is a matrix that two thin ones are smaller than."""
        if len(shape) < 2 or math.prod(shape) == 0:
            return False
        rows, columns = shape[0], math.prod(shape[1:])
        return self.rank * (rows + columns) < rows * columns

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return (yield from self.among_one(bucket, state, ctx))
        flat = wide(bucket.flat)
        unsent = state.get(RESIDUAL)
        rest, result = turn_over(bucket, flat, state, self.residual)
        wanted = flat if unsent is None else flat.add_(unsent)
        thin = [segment for segment in bucket.segments if self.shrinks(segment.shape)]
        exact = [segment for segment in bucket.segments if not self.shrinks(segment.shape)]
        matrices = [matrix(segment, wanted) for segment in thin]
        rights = [self._right(segment, m, state) for segment, m in zip(thin, matrices, strict=True)]
        lefts = [m @ right for m, right in zip(matrices, rights, strict=True)]
        lefts, means = yield from self._mean(lefts, [place(segment, wanted) for segment in exact], ctx)
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        rights, _ = yield from self._mean([m.T @ left for m, left in zip(matrices, lefts, strict=True)], [], ctx)
        for segment, right in zip(thin, rights, strict=True):
            # A copy, with memory of its own: products may differ in the last bits where it begins elsewhere after loading.
            state.set_extra(FACTOR, right.clone(), segment.name)
        for segment, value in zip(exact, means, strict=True):
            place(segment, rest).zero_()
            place(segment, result).copy_(value)
        for number, (segment, left, right) in enumerate(zip(thin, lefts, rights, strict=True)):
            seed = ctx.seed(bucket.index, number)
            mine, kept, mean = (place(segment, memory) for memory in (wanted, rest, result))
            for elements, values in products(segment, wanted, left, right):
                if kept.dtype == mine.dtype:  # it is the same memory
                    kept[elements].sub_(values)
                else:
                    keep(mine[elements].sub_(values), kept[elements], seed + elements.start)
                mean[elements].copy_(values)
        state[RESIDUAL] = rest
        return result.to(bucket.flat.dtype)

    def _right(self, segment: Segment, like: Tensor, state: State) -> Tensor:
        """Where the last step left Q. At first, and in columns of zeros, which no step would ever leave, random numbers."""
        before, columns, device = state.extra(FACTOR, segment.name), like.shape[1], like.device
        if device.type == "meta":
            return like.new_empty(columns, self.rank)
        random: Callable[..., Tensor] = beginning if device.type == "cpu" else beginning_on_device
        if before is None:
            return random(segment.name, columns, self.rank, like.dtype, device)
        before = before.to(device)  # a loaded one may lie elsewhere
        if device.type == "cpu" and (before[0].all() or before.any(0).all()):  # to ask a device, the host would have to wait
            return before
        return torch.where(before.any(0), before, random(segment.name, columns, self.rank, like.dtype, device))

    @staticmethod
    def _mean(factors: list[Tensor], others: list[Tensor], ctx: Context) -> Flow[tuple[list[Tensor], list[Tensor]]]:
        """The means of all of these tensors over the workers, in one all-reduce."""
        tensors = [*factors, *others]
        if not tensors:
            return [], []
        mean = yield from all_reduce(torch.cat([tensor.reshape(-1) for tensor in tensors]) / ctx.world)
        ends = list(accumulate(tensor.numel() for tensor in tensors))
        split = [mean[end - t.numel() : end].view(t.shape) for t, end in zip(tensors, ends, strict=True)]
        return split[: len(factors)], split[len(factors) :]


def beginning(name: str, columns: int, rank: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Random numbers for a parameter's Q, the same on all workers, and others for each parameter."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(columns, rank, generator=generator, dtype=dtype, device="cpu").to(device)


beginning_on_device = cache(beginning)
"""There they are at hand in every step, because the host does not know whether they are needed."""


def place(segment: Segment, flat: Tensor) -> Tensor:
    """The elements of a parameter, in the order of its memory."""
    return flat[segment.offset : segment.offset + segment.numel]


def matrix(segment: Segment, flat: Tensor) -> Tensor:
    """The parameter as a matrix: its first dimension by all others."""
    return segment.view(flat).reshape(segment.shape[0], -1)


def products(segment: Segment, flat: Tensor, left: Tensor, right: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """left·rightᵀ, of a parameter that lies in ``flat``: which elements of its memory, and their values, a
    :func:`~gossamer.memory.portion` of rows at a time."""
    if not segment.view(flat).is_contiguous():
        values = left.new_empty(segment.numel)
        values.as_strided(segment.shape, segment.stride).copy_((left @ right.T).view(segment.shape))
        yield slice(0, segment.numel), values
        return
    columns = len(right)
    begin = 0
    for rows in left.split(max(1, portion(place(segment, flat)) // columns)):
        values = (rows @ right.T).view(-1)
        yield slice(begin, begin + values.numel()), values
        begin += values.numel()
