"""Chunks: the largest of them, and the dense tensor into which those are packed."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codecs.cast import Cast
from gossamer.codecs.wire import limited
from gossamer.memory import portions


@dataclass(frozen=True, slots=True)
class Chosen:
    """Some of the chunks of a flat tensor, in their order; the last chunk of a tensor may be shorter than the others."""

    chunk: int
    indices: Tensor
    """``int64``, where the tensor lives."""
    whole: int
    """How many of them are not short: the host knows, and asks no device."""

    @classmethod
    def of(cls, flat: Tensor, chunk: int, indices: Tensor) -> "Chosen":
        """Of indices on the host. They are copied to a device once: for each copy from ordinary memory the host would wait."""
        whole = int((indices < flat.numel() // chunk).sum())
        if flat.device.type == "cuda":
            return cls(chunk, indices.pin_memory().to(flat.device, non_blocking=True), whole)
        return cls(chunk, indices.to(flat.device), whole)

    def pack(self, flat: Tensor) -> Tensor:
        """These chunks of ``flat``, one after the other; the last one of a tensor is filled up with zeros."""
        packed = self._rows(flat)[self.indices[: self.whole]].view(-1)
        if self.whole == self.indices.numel():
            return packed
        return torch.cat([packed, self._end(flat), flat.new_zeros(-flat.numel() % self.chunk)])

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Write packed chunks to their places in ``flat``."""
        rows = packed.view(-1, self.chunk)
        self._rows(flat)[self.indices[: self.whole]] = rows[: self.whole]
        if self.whole < self.indices.numel():
            end = self._end(flat)
            end.copy_(rows[-1, : end.numel()])

    def _rows(self, flat: Tensor) -> Tensor:
        """The full chunks: ``[chunks, chunk]``."""
        return flat[: flat.numel() - flat.numel() % self.chunk].view(-1, self.chunk)

    def _end(self, flat: Tensor) -> Tensor:
        """The short one."""
        return flat[flat.numel() - flat.numel() % self.chunk :]


def evenly(numel: int, count: int) -> Tensor:
    """A mask with ``count`` of ``numel`` set, evenly spread: the choice without values."""
    places = torch.arange(numel, device="cpu")
    return (places * count) // max(numel, 1) != ((places + 1) * count) // max(numel, 1)


def mask_of_largest(norms: Tensor, count: int) -> Tensor:
    """A mask with the ``count`` largest set; of equal ones the first. NaN counts as largest."""
    mask = torch.zeros(norms.numel(), dtype=torch.bool, device="cpu")
    order = norms.nan_to_num(nan=math.inf, posinf=math.inf).argsort(descending=True, stable=True)
    mask[order[:count]] = True
    return mask


def take_share(packed: Tensor, codec: Cast, world: int) -> Tensor:
    """What this worker adds to the mean of the packed chunks, in the dtype of the wire. ``packed`` becomes what that lacks."""
    sent = torch.empty_like(packed, dtype=codec.wire_dtype(packed.dtype))
    for part, out in portions(packed, sent):
        out.copy_(codec.encode(fitting(part / world, out.dtype, world)))
        part.sub_(codec.decode(out, out.numel(), part.dtype) * world)
    return sent


def fitting(share: Tensor, dtype: torch.dtype, world: int) -> Tensor:
    """``share`` limited to what ``world`` of can be summed in ``dtype``, with every rounding on the way up; what is not finite
    stays so."""
    info = torch.finfo(dtype)
    limit = info.max / world * (1 + info.eps) ** -world
    return limited(share, limit)
