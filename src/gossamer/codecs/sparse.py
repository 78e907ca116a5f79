"""Sparse: codecs that send some elements as they are, and nothing of the others."""

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.checks import is_number, is_whole
from gossamer.codecs.base import Codec
from gossamer.codecs.kernels import chunk_norms
from gossamer.codecs.kernels.layout import MASK, Keys, keys, signed
from gossamer.codecs.kernels.reference import hashed
from gossamer.codecs.rounding import finite_or, rounding_of
from gossamer.errors import ConfigurationError


def wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """Values travel in fp32, those of a fp64 tensor in fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_bytes(*parts: Tensor) -> Tensor:
    """One uint8 tensor of them all, in this order."""
    return torch.cat([part.reshape(-1).view(torch.uint8) for part in parts])


def aligned(payload: Tensor) -> Tensor:
    """The payload, or a copy of it where its memory does not begin at a whole word."""
    return payload.clone() if payload.storage_offset() % 8 or payload.data_ptr() % 8 else payload


def check_density(density: object, name: str = "density") -> None:
    """Raise ConfigurationError unless it is a share that can be sent."""
    if not (is_number(density) and 0 < density <= 1):
        raise ConfigurationError(f"{name} must be above 0 and at most 1 (the share that is sent); got {density!r}")


def check_chunk(chunk: object) -> None:
    """Raise ConfigurationError unless it is a number of elements."""
    if not is_whole(chunk, 1):
        raise ConfigurationError(f"chunk must be a positive number of elements; got {chunk!r}")


def share_of(numel: int, density: float) -> int:
    """``ceil(density · numel)``, at least one of them, whatever the density's last bit: 0.07 of 100 are 7."""
    return min(numel, max(1, math.ceil(round(density * numel, 6))))


@dataclass(frozen=True, kw_only=True)
class Sparse(Codec):
    """Base of the codecs that send ``density`` of the elements. Payload: the values, then where they stand."""

    density: float = 0.01

    def __post_init__(self) -> None:
        check_density(self.density)

    def share(self, numel: int) -> int:
        """How many of ``numel`` are sent."""
        return share_of(numel, self.density)

    def check_places(self, count: int) -> None:
        """Raise ConfigurationError unless 32 bits tell which of ``count`` places are sent."""
        if count > 2**31:
            raise ConfigurationError(
                f"{self!r} tells by 32-bit numbers which of {count} places it sends, of which there may be {2**31}: "
                "cut the tensor, or send larger chunks (TopChunks)"
            )

    @abstractmethod
    def unpacked(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Indices (``int64[k]``) and the values to add there; an index that comes twice comes with zeros."""

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        indices, values = self.unpacked(payload, numel)
        return torch.zeros(numel, dtype=dtype, device=payload.device).index_add_(0, indices, values.to(dtype))

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        indices, values = self.unpacked(payload, total.numel())
        total.index_add_(0, indices, values.to(total.dtype))

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        wanted = tensor.clone() if residual is None else tensor + residual
        payload = self.encode(wanted, seed)
        indices, values = self.unpacked(payload, wanted.numel())
        return payload, finite_or(wanted.index_add_(0, indices, -values.to(wanted.dtype)), residual)

    def error_bound(self, tensor: Tensor) -> Tensor:
        return tensor.abs()


@dataclass(frozen=True, kw_only=True)
class TopK(Sparse):
    """The k = ceil(density·n) elements of largest size; a NaN or inf counts as the largest.

    Bytes: 8 per element sent (index and fp32 value; 12 for fp64). Which elements they are differs between workers, so
    sums need a gather. Biased: use it with error feedback. Not the choice where time to encode matters: selecting takes
    several times longer than ``TopChunks``; nor for tensors of more than 2³¹ elements, which 32-bit indices cannot tell apart.

    Source: Aji and Heafield 2017 (arXiv 1704.05021); Lin et al. 2018, DGC (arXiv 1712.01887).
    """

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        flat = tensor.detach()
        self.check_places(flat.numel())
        indices = torch.topk(flat.abs(), self.share(flat.numel()), sorted=False).indices
        return as_bytes(flat[indices].to(wire_dtype(flat.dtype)), indices.int())

    def unpacked(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        payload, k = aligned(payload), self.share(numel)
        values = payload[: payload.numel() - 4 * k].view(torch.float32 if payload.numel() == 8 * k else torch.float64)
        return payload[payload.numel() - 4 * k :].view(torch.int32).long(), values


@dataclass(frozen=True, kw_only=True)
class RandomK(Sparse):
    """k = ceil(density·n) elements drawn at random from the seed, the same on every worker that has the same seed.

    One is drawn from each of k stretches of n/k neighbours. With ``unbiased`` it is scaled by the stretch's length, so
    that the mean over the seeds is the tensor; that multiplies the error, and takes the place of error feedback.

    Bytes: 4 per element sent (8 for fp64) and 16: the keys of the seed, and a word that is added to every value sent, 0, or NaN
    if there is a NaN or inf anywhere in the tensor, sent or not.

    Source: Wangni et al. 2018 (arXiv 1710.09854); Stich et al. 2018 (arXiv 1809.07599).
    """

    unbiased: bool = False

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        flat, (key1, key2) = tensor.detach(), keys(seed)
        if not flat.numel():
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        # Filled in where it lies: for a copy from ordinary memory the host would wait.
        head = torch.full((1,), signed(key1 << 32 | key2, 64), dtype=torch.int64, device=flat.device)
        poison = torch.where(flat.isfinite().all(), 0.0, float("nan")).double()
        indices, factors = self.drawn((key1, key2), flat.numel(), flat.device)
        return as_bytes(head, poison, flat[indices].to(wire_dtype(flat.dtype)) * factors)

    def drawn(self, words: Keys, numel: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """The indices that a seed's ``keys`` stand for, and what the values there are multiplied with.

        The tensor is cut into k strata of floor or ceil(n/k) elements; one element of each is drawn.
        """
        k = self.share(numel)
        cuts = torch.arange(k + 1, device=device) * numel // k
        lengths = cuts.diff()
        indices = cuts[:-1] + (hashed(k, 0, words, device) * lengths >> 24)
        return indices, lengths if self.unbiased else torch.ones_like(lengths)

    def unpacked(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        if not numel:
            return payload.long(), payload.float()
        payload = aligned(payload)
        values = payload[16:].view(torch.float32 if payload.numel() == 16 + 4 * self.share(numel) else torch.float64)
        head, poison = payload[:8].view(torch.int64), payload[8:16].view(torch.float64).to(values.dtype)
        return self.drawn((head >> 32 & MASK, head & MASK), numel, payload.device)[0], values + poison

    def error_bound(self, tensor: Tensor) -> Tensor:
        size = tensor.double().abs()
        longest = -(-tensor.numel() // max(1, self.share(tensor.numel()))) if self.unbiased else 1
        return size * max(1, longest - 1) + rounding_of(size * longest, tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class TopChunks(Sparse):
    """The chunks of ``chunk`` neighbours with the largest L1 norms, density·n/chunk of them, whole.

    Bytes: 4 per element sent (8 for fp64), and 4 per chunk. Fast: one pass for the norms, and copies. Chunks have
    ``chunk`` elements or less, so that all are nearly equal; a tensor shorter than that is one chunk. A chunk with a NaN
    or inf counts as the largest. Biased: use it with error feedback.

    Source: Sun et al. 2019 (arXiv 1902.06855), coarse-grained sparse communication, here each worker for itself.
    """

    density: float = 0.1
    chunk: int = 512

    def __post_init__(self) -> None:
        super().__post_init__()
        check_chunk(self.chunk)

    def shape(self, numel: int) -> tuple[int, int]:
        """Number of chunks sent, and their length: ``chunk`` or less, so that all are nearly equal."""
        count = -(-numel // self.chunk)
        return self.share(count), -(-numel // max(1, count))

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        flat, (count, length) = tensor.detach(), self.shape(tensor.numel())
        if not count:
            return torch.empty(0, dtype=torch.uint8, device=flat.device)
        self.check_places(-(-flat.numel() // self.chunk))
        chunks = torch.topk(chunk_norms(flat, None, length), count, sorted=False).indices
        elements, inside = self.elements(chunks, length, flat.numel())
        return as_bytes(torch.where(inside, flat[elements], 0).to(wire_dtype(flat.dtype)), chunks.int())

    def elements(self, chunks: Tensor, length: int, numel: int) -> tuple[Tensor, Tensor]:
        """The indices of the elements of these chunks, and whether they exist (the last one stands in for others)."""
        indices = (chunks[:, None] * length + torch.arange(length, device=chunks.device)).flatten()
        return indices.clamp_max(numel - 1), indices < numel

    def unpacked(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        payload, (count, length) = aligned(payload), self.shape(numel)
        end = payload.numel() - 4 * count
        values = payload[:end].view(torch.float32 if end == 4 * count * length else torch.float64)
        chunks = payload[end:].view(torch.int32).long()
        return self.elements(chunks, length, numel)[0] if count else chunks, values
