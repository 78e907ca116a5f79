"""Models that are known by name, built on the ``meta`` device: their parameters have shapes, and no memory."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from gossamer.simulate.models import convnets, transformers


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model, and the batch that one device trains on in a step, unless another one is asked for.

    ``build()`` makes the module where the default device is; ``inputs(batch)`` its input. ``samples``: what a batch counts.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    batch: int
    samples: str
    optimizer: Callable[..., Optimizer]

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The module on ``meta``, with parameters of this type."""
        with torch.device("meta"):
            return self.build().to(dtype)


def _images(batch: int) -> Tensor:
    return torch.empty(batch, 3, 224, 224, device="meta")


def _tokens(length: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.empty(batch, length, dtype=torch.long, device="meta")


_convnet = partial(Architecture, inputs=_images, samples="images", optimizer=partial(SGD, lr=0.1, momentum=0.9))
_transformer = partial(Architecture, samples="sequences", optimizer=AdamW)


def _gpt2(layers: int, width: int, heads: int, batch: int) -> Architecture:
    return _transformer(build=partial(transformers.GPT2, layers, width, heads), inputs=_tokens(1024), batch=batch)


MODELS: dict[str, Architecture] = {
    "alexnet": _convnet(build=convnets.alexnet, batch=128),
    "resnet50": _convnet(build=convnets.resnet50, batch=64),
    "vgg16": _convnet(build=convnets.vgg16, batch=32),
    "googlenet": _convnet(build=convnets.googlenet, batch=64),
    "bert-large": _transformer(build=partial(transformers.Bert, 24, 1024, 16), inputs=_tokens(512), batch=6),
    "gpt2": _gpt2(12, 768, 12, batch=8),
    "gpt2-medium": _gpt2(24, 1024, 16, batch=4),
    "gpt2-large": _gpt2(36, 1280, 20, batch=2),
    "gpt2-xl": _gpt2(48, 1600, 25, batch=1),
    "decoder-1b": _transformer(build=partial(transformers.Decoder, transformers.ONE_BILLION), inputs=_tokens(2048), batch=2),
    "decoder-7b": _transformer(build=partial(transformers.Decoder, transformers.SEVEN_BILLION), inputs=_tokens(2048), batch=1),
}
"""By the name that a command line takes."""
