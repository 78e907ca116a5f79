"""Emulated compute: models whose layers wait instead of computing; an accelerator in slow motion.

Gradients have the real sizes and come in the real order, so that what is sent, and when, is as in training; but two
cores can carry sixteen workers, and the network decides. A layer's time is its share of the model's multiplications;
backward takes twice as long as forward. Compute and network are slowed by the same factor: AlexNet's 38.8 ms at
56 Gbit/s become 3.88 s at 560 Mbit/s. A slow host of the lab waits longer, by its factor.
"""

import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError

FORWARD = 1 / 3
"""The share of a step's compute that is forward."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that are used together, and the multiplications of one sample."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    multiplications: int


def linear(name: str, inputs: int, outputs: int) -> Layer:
    """A fully connected layer with a bias."""
    return Layer(name, ((outputs, inputs), (outputs,)), outputs * inputs)


def convolution(name: str, inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    """A square convolution with a bias onto ``size`` × ``size`` places."""
    return Layer(name, ((outputs, inputs, kernel, kernel), (outputs,)), outputs * inputs * kernel**2 * size**2)


def normalised(name: str, inputs: int, outputs: int, kernel: int, size: int) -> Layer:
    """A square convolution without a bias, and a batch norm (a scale and a shift)."""
    bare = convolution(name, inputs, outputs, kernel, size)
    return Layer(name, (bare.shapes[0], (outputs,), (outputs,)), bare.multiplications)


def alexnet() -> list[Layer]:
    """AlexNet on 224 × 224 images (Krizhevsky 2014, the single column): 61.1 million parameters."""
    return [
        convolution("conv1", 3, 64, 11, 55),
        convolution("conv2", 64, 192, 5, 27),
        convolution("conv3", 192, 384, 3, 13),
        convolution("conv4", 384, 256, 3, 13),
        convolution("conv5", 256, 256, 3, 13),
        linear("fc6", 256 * 6 * 6, 4096),
        linear("fc7", 4096, 4096),
        linear("fc8", 4096, 1000),
    ]


def resnet50() -> list[Layer]:
    """ResNet-50 on 224 × 224 images (He et al. 2016, arXiv 1512.03385): 25.6 million parameters."""
    layers, inputs = [normalised("conv1", 3, 64, 7, 112)], 64
    for stage, (blocks, width, size) in enumerate(((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)), start=2):
        for block in range(blocks):
            name = f"conv{stage}_{block + 1}"
            layers.append(normalised(f"{name}a", inputs, width, 1, size))
            layers.append(normalised(f"{name}b", width, width, 3, size))
            layers.append(normalised(f"{name}c", width, 4 * width, 1, size))
            if block == 0:
                layers.append(normalised(f"{name}d", inputs, 4 * width, 1, size))
            inputs = 4 * width
    return [*layers, linear("fc", 2048, 1000)]


def convnet() -> list[Layer]:
    """The convnet of the examples: 1.63 million parameters, most of them in one layer."""
    convolutions = [convolution("conv1", 1, 32, 3, 28), convolution("conv2", 32, 64, 3, 14)]
    return [*convolutions, linear("fc1", 3136, 512), linear("fc2", 512, 10)]


def gpt2() -> list[Layer]:
    """GPT-2 on 1024 tokens (Radford et al. 2019, the smallest): 124.4 million parameters. The head shares the embedding's."""
    return _gpt(width=768, tokens=1024, words=50257, blocks=12, tied=True)


def gpt() -> list[Layer]:
    """The GPT of the examples, on 64 bytes: 0.86 million parameters."""
    return _gpt(width=128, tokens=64, words=256, blocks=4, tied=False)


def _gpt(width: int, tokens: int, words: int, blocks: int, tied: bool) -> list[Layer]:
    """``tied``: the head shares the embedding's parameters."""
    vectors = ((width,), (width,))
    layers = [Layer("embedding", ((words, width), (tokens, width)), 0)]
    for number in range(1, blocks + 1):
        mixing = tokens * 4 * width * width + 2 * tokens * tokens * width
        shapes = (*vectors, (3 * width, width), (3 * width,), (width, width), (width,))
        layers.append(Layer(f"attention{number}", shapes, mixing))
        shapes = (*vectors, (4 * width, width), (4 * width,), (width, 4 * width), (width,))
        layers.append(Layer(f"perceptron{number}", shapes, tokens * 8 * width * width))
    head = vectors if tied else (*vectors, (words, width))
    return [*layers, Layer("head", head, tokens * words * width)]


MODELS = {"AlexNet": alexnet, "ResNet50": resnet50, "Convnet": convnet, "GPT": gpt, "GPT2": gpt2}


class _Compute(torch.autograd.Function):
    """Passes ``signal`` on, after as long as the layer takes; its gradients are small multiples of the parameters."""

    @staticmethod
    def forward(ctx: Any, signal: Tensor, seconds: float, *parameters: Tensor) -> Tensor:
        begin = time.perf_counter()
        ctx.seconds = seconds
        ctx.save_for_backward(*parameters)
        result = signal.clone()
        _wait_until(begin + FORWARD * seconds)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        begin = time.perf_counter()
        # To make the gradients is part of the time: what counts is that they are there at its end.
        gradients = [parameter * GRADIENT for parameter in ctx.saved_tensors]
        _wait_until(begin + (1 - FORWARD) * ctx.seconds)
        return grads[0], None, *gradients


GRADIENT = 1e-3
"""The gradient, relative to the weight."""


def _wait_until(end: float) -> None:
    time.sleep(max(0.0, end - time.perf_counter()))


class _Waiting(nn.Module):
    """One layer: its parameters, by number, and its time."""

    def __init__(self, shapes: Iterable[tuple[int, ...]], seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        for number, shape in enumerate(shapes):
            parameter = nn.Parameter(torch.randn(shape).mul_(math.prod(shape[1:]) ** -0.5))
            self.register_parameter(str(number), parameter)

    def forward(self, signal: Tensor) -> Tensor:
        result: Tensor = _Compute.apply(signal, self.seconds, *self.parameters())  # type: ignore[no-untyped-call]
        return result


class Emulated(nn.Module):
    """A model of ``layers`` whose forward and backward together take ``seconds``. Input and output: one float, ``(1,)``."""

    def __init__(self, layers: Sequence[Layer], seconds: float) -> None:
        super().__init__()
        total = sum(layer.multiplications for layer in layers)
        seconds *= float(os.environ.get("GOSSAMER_LAB_SLOWDOWN", "1"))
        self._seconds = [seconds * layer.multiplications / total for layer in layers]
        self.layers = nn.Sequential(*(_Waiting(layer.shapes, s) for layer, s in zip(layers, self._seconds, strict=True)))

    def profile(self) -> dict[str, tuple[float, float]]:
        """Seconds of forward and backward by layer, as :meth:`gossamer.simulate.Compute.layered` takes them."""
        return {f"layers.{i}": (FORWARD * s, (1 - FORWARD) * s) for i, s in enumerate(self._seconds)}

    def forward(self, signal: Tensor) -> Tensor:
        """``signal``, after as long as the model takes."""
        result: Tensor = self.layers(signal)
        return result


def emulated(name: str, seconds: float) -> Workload:
    """The workload of this name (one of ``MODELS``) with ``seconds`` of compute per step. Raises ConfigurationError."""
    if name not in MODELS:
        raise ConfigurationError(f"no emulated model {name!r}; known: {', '.join(MODELS)}")
    if not isinstance(seconds, int | float) or not 0 < seconds < 3600:
        raise ConfigurationError(f"an emulated model takes a number of seconds between 0 and 3600; got {seconds!r}")
    return Workload(
        f"{name}, {seconds:g} s emulated",
        build_model=lambda: Emulated(MODELS[name](), seconds),
        build_optimizer=_sgd,
        random_batch=lambda generator: (torch.rand(1, generator=generator), torch.zeros(1)),
        loss=lambda outputs, targets: (outputs - targets).sum(),
    )


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=1e-3, momentum=0.9)
