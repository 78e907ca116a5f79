"""Contraction: by how much a codec brings what it stands for closer to the tensor; with error feedback it must."""

from functools import lru_cache

import torch

from gossamer.codecs.base import Codec
from gossamer.errors import ConfigurationError


@lru_cache(maxsize=256)
def contraction(codec: Codec) -> float:
    """δ of ‖Q(x) − x‖² = (1 − δ)·‖x‖², as measured on normal numbers: 1 loses nothing, 0 is as good as sending nothing.

    What is remembered of a codec with none (``RandomK`` made unbiased has 2 − 1/density) grows from step to step.
    """
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2**15, generator=generator, device="cpu")
    found = codec.decode(codec.encode(numbers), numbers.numel(), numbers.dtype)
    return 1 - float((found - numbers).square().sum() / numbers.square().sum())


def check_hashable(codec: Codec) -> None:
    """Raise ConfigurationError unless the codec can be a key: how long its payloads are, and what they lose, is looked up."""
    try:
        hash(codec)
    except TypeError as error:
        raise ConfigurationError(
            f"{codec!r} cannot be hashed ({error}): make it a frozen dataclass, with tuples in place of lists"
        ) from error


def check_contracts(codec: Codec) -> None:
    """Raise ConfigurationError if what is remembered of what a (hashable) codec loses would grow from step to step."""
    if codec.unbiased and contraction(codec) <= 0:  # biased ones round to what is near
        raise ConfigurationError(
            f"{codec!r} makes what it encodes longer, so that what is remembered of it would grow from step to step: take one "
            "that does not (RandomK with unbiased=False, Quantize with more bits), or an algorithm without error feedback"
        )
