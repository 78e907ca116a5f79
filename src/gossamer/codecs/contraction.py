"""Contraction: by how much a codec brings what it stands for closer to the tensor; with error feedback it must."""

from functools import lru_cache

import torch

from gossamer.codecs.base import Codec


def contraction(codec: Codec) -> float:
    """δ of ‖Q(x) − x‖² = (1 − δ)·‖x‖², as measured on normal numbers: 1 loses nothing, 0 is as good as sending nothing.

    What is remembered of a codec with none (``RandomK`` made unbiased has 2 − 1/density) grows from step to step.
    """
    try:
        hash(codec)
    except TypeError:  # one of its fields is a list, say
        return _measured.__wrapped__(codec)
    return _measured(codec)


@lru_cache(maxsize=256)
def _measured(codec: Codec) -> float:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(2**15, generator=generator, device="cpu")
    found = codec.decode(codec.encode(numbers), numbers.numel(), numbers.dtype)
    return 1 - float((found - numbers).square().sum() / numbers.square().sum())
