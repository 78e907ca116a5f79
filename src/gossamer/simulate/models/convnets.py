"""Convolutional networks for images of 224 × 224 pixels and a thousand classes, as their papers describe them."""

import torch
from torch import Tensor, nn

CLASSES = 1000


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int | None = None) -> list[nn.Module]:
    """A convolution with a bias, and the rectifier after it; padded so that stride 1 keeps the size, unless said."""
    padded = kernel // 2 if padding is None else padding
    return [nn.Conv2d(inputs, outputs, kernel, stride, padded), nn.ReLU()]


def alexnet() -> nn.Module:
    """AlexNet in a single column (Krizhevsky 2014, arXiv 1404.5997)."""
    return nn.Sequential(
        *_convolution(3, 64, 11, 4, 2), nn.MaxPool2d(3, 2), *_convolution(64, 192, 5), nn.MaxPool2d(3, 2),
        *_convolution(192, 384, 3), *_convolution(384, 256, 3), *_convolution(256, 256, 3), nn.MaxPool2d(3, 2),
        nn.Flatten(), nn.Linear(256 * 6 * 6, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES),
    )  # fmt: skip


_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
"""Channels of its convolutions; 0: pooling."""


def vgg16() -> nn.Module:
    """VGG-16, configuration D (Simonyan and Zisserman 2014, arXiv 1409.1556)."""
    layers: list[nn.Module] = []
    inputs = 3
    for outputs in _VGG16:
        layers += _convolution(inputs, outputs, 3) if outputs else [nn.MaxPool2d(2, 2)]
        inputs = outputs or inputs
    head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, CLASSES)]
    return nn.Sequential(*layers, nn.Flatten(), *head)


def _normalised(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution without a bias, and a batch norm."""
    return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut; the 3 × 3 one has the stride."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.residual = nn.Sequential(
            *_normalised(inputs, width, 1), nn.ReLU(), *_normalised(width, width, 3, stride), nn.ReLU(),
            *_normalised(width, outputs, 1),
        )  # fmt: skip
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else nn.Sequential(*_normalised(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


def resnet50() -> nn.Module:
    """ResNet-50 (He et al. 2015, arXiv 1512.03385), with the stride in the 3 × 3 convolutions ("version 1.5")."""
    layers, inputs = [*_normalised(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)], 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            layers.append(Bottleneck(inputs, 64 * 2**stage, 2 if stage and not block else 1))
            inputs = 4 * 64 * 2**stage
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))


class Inception(nn.Module):
    """Convolutions of 1 × 1, 3 × 3 and 5 × 5 and a pooling beside each other, each of few channels."""

    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [
                nn.Sequential(*_convolution(inputs, one, 1)),
                nn.Sequential(*_convolution(inputs, three[0], 1), *_convolution(*three, 3)),
                nn.Sequential(*_convolution(inputs, five[0], 1), *_convolution(*five, 5)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), *_convolution(inputs, pool, 1)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


_INCEPTIONS = (
    (192, 64, (96, 128), (16, 32), 32), (256, 128, (128, 192), (32, 96), 64), None,
    (480, 192, (96, 208), (16, 48), 64), (512, 160, (112, 224), (24, 64), 64), (512, 128, (128, 256), (24, 64), 64),
    (512, 112, (144, 288), (32, 64), 64), (528, 256, (160, 320), (32, 128), 128), None,
    (832, 256, (160, 320), (32, 128), 128), (832, 384, (192, 384), (48, 128), 128),
)  # fmt: skip
"""Table 1 of the paper; None: pooling."""


def googlenet() -> nn.Module:
    """GoogLeNet without its two auxiliary classifiers (Szegedy et al. 2014, arXiv 1409.4842)."""
    stem = [
        *_convolution(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), *_convolution(64, 64, 1),
        *_convolution(64, 192, 3), nn.MaxPool2d(3, 2, ceil_mode=True),
    ]  # fmt: skip
    body = [nn.MaxPool2d(3, 2, ceil_mode=True) if made is None else Inception(*made) for made in _INCEPTIONS]
    return nn.Sequential(*stem, *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, CLASSES))
