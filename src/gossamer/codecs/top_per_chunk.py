"""TopPerChunk: of every chunk the elements of largest size, each in two bits, and where they are."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.checks import is_whole
from gossamer.codecs.kernels import kernels_for, single
from gossamer.codecs.kernels.reference import pack, unpack
from gossamer.codecs.sparse import Sparse, aligned, as_bytes, share_of
from gossamer.errors import ConfigurationError

LONGEST = 2**12
"""Elements of a chunk: 12 bits tell one from another."""

_HEADER = 16
"""Bytes of the four values that the codes stand for."""


@dataclass(frozen=True, kw_only=True)
class TopPerChunk(Sparse):
    """Of every chunk of ``chunk`` neighbours the ``density·chunk`` elements of largest size, and of those only two bits: the
    sign, and whether the size is above the mean size of all that is sent. Each of these four kinds is sent as its mean.

    Bytes: 14 bits per element sent, 12 of them for its place in the chunk. Or, where that is less (more than a twelfth sent),
    2 bits per element sent, and of each element one bit that says whether it is. And 16 bytes. Of the last, shorter chunk as
    large a share is sent, at least one element. In which chunks the large elements are makes no difference, so that nothing is
    compared over the whole tensor, and each chunk fits into a cache. A NaN or inf counts as the largest, and makes NaN of
    everything that is sent. Biased: use it with error feedback.

    Source: Sarfi et al. 2025 (arXiv 2508.15706), SparseLoCo; which four bins is ours.
    """

    density: float = 1 / 64
    chunk: int = LONGEST

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.chunk, 1, LONGEST):
            raise ConfigurationError(f"chunk must be a number of elements from 1 to {LONGEST}; got {self.chunk!r}")

    def counts(self, numel: int) -> tuple[int, int, int]:
        """Number of whole chunks, elements sent of each, and of the shorter one at the end."""
        last = numel % self.chunk
        return numel // self.chunk, share_of(self.chunk, self.density), share_of(last, self.density) if last else 0

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        flat, counts = tensor.detach(), self.counts(tensor.numel())
        if not flat.numel():
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        places = kernels_for(flat.device).largest(single(flat), self.chunk, counts[1], counts[2])
        values = flat[self._elements(places, counts)].double()
        sizes = values.abs()
        codes = 2 * (values < 0).long() + (sizes > sizes.mean()).long()
        nothing = torch.zeros(4, dtype=torch.float64, device=flat.device)
        sums, of = (nothing.index_add(0, codes, each) for each in (values, torch.ones_like(values)))
        poison = torch.where(values.isfinite().all(), 0.0, float("nan"))
        means = (sums / of.clamp_(min=1) + poison).float()
        return as_bytes(means, self._told(places, counts, flat.numel()), pack(codes[None], 2))

    def _elements(self, places: Tensor, counts: tuple[int, int, int]) -> Tensor:
        """``int64[m]``: where in the tensor the elements at these places of their chunks are."""
        chunks, each, last = counts
        whole = torch.arange(chunks, device=places.device).repeat_interleave(each, output_size=chunks * each)
        return places.long() + self.chunk * pad(whole, (0, last), value=chunks)

    def _told(self, places: Tensor, counts: tuple[int, int, int], numel: int) -> Tensor:
        """Which elements are sent: their places, or a bit of each element, whichever is shorter."""
        if not _bitwise(places.numel(), numel):
            return _packed(places)
        sent = torch.zeros(1, numel, dtype=torch.uint8, device=places.device)
        return pack(sent.index_fill_(1, self._elements(places, counts), 1), 1)

    def unpacked(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        told, values = self._parted(payload, numel)
        if not numel:
            return told.long(), values
        if _bitwise(len(values), numel):  # of a known size, so that no host waits to learn it
            return torch.nonzero_static(unpack(told[None], 1, numel)[0], size=len(values)).flatten(), values
        return self._elements(_unpacked(told)[: len(values)], self.counts(numel)), values

    def norm(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self._parted(payload, numel)[1].to(dtype))
        return norm

    def _parted(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """What tells the elements that are sent, and their values."""
        if not numel:
            return payload, payload.float()
        payload, counts = aligned(payload), self.counts(numel)
        sent = counts[0] * counts[1] + counts[2]
        end = _HEADER + (-(-numel // 8) if _bitwise(sent, numel) else 3 * -(-sent // 2))
        means, told, codes = payload[:_HEADER].view(torch.float32), payload[_HEADER:end], payload[end:]
        return told, means[unpack(codes[None], 2, sent)[0].long()]

    def error_bound(self, tensor: Tensor) -> Tensor:
        return pad(tensor.abs(), (0, 1)).amax().expand_as(tensor)


def _bitwise(sent: int, numel: int) -> bool:
    """Whether a bit of each element takes less than twelve of each that is sent."""
    return numel < 12 * sent


def _packed(places: Tensor) -> Tensor:
    """``uint8[⌈m/2⌉, 3]``: two numbers of twelve bits in three bytes."""
    first, second = pad(places.int(), (0, places.numel() % 2)).view(-1, 2).unbind(1)
    return torch.stack([first & 255, first >> 8 | (second & 15) << 4, second >> 4], 1).to(torch.uint8)


def _unpacked(packed: Tensor) -> Tensor:
    """The reverse: ``int32[2·⌈m/2⌉]``."""
    low, middle, high = packed.int().view(-1, 3).unbind(1)
    return torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], 1).flatten()
