"""Workloads: the byte GPT and the convnet of the examples, on synthetic data, at full or at reduced size."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


class Block(nn.Module):
    """A transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A byte-level language model."""

    def __init__(self, layers: int = 4, width: int = 128, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))


class ConvNet(nn.Module):
    """Two convolutions with pooling and two linear layers, for 28 × 28 images."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        )  # fmt: skip
        self.classes = nn.Sequential(nn.Linear(3136, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, images: Tensor) -> Tensor:
        return self.classes(self.features(images))


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer, and a loss on the batch of (rank, step)."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loss: Callable[[nn.Module, Batch], Tensor]
    batch: Callable[[int, int, torch.dtype], Batch]


def gpt(layers: int = 4, width: int = 128, context: int = 64, batch: int = 8) -> Workload:
    """Random bytes, AdamW."""

    def make_batch(rank: int, step: int, dtype: torch.dtype) -> Batch:
        tokens = torch.randint(0, 256, (batch, context + 1), generator=generator(rank, step))
        return tokens[:, :-1], tokens[:, 1:]

    def loss(model: nn.Module, pair: Batch) -> Tensor:
        return F.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())

    return Workload(
        lambda: GPT(layers, width, 4, context), lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3), loss, make_batch
    )


def convnet(hidden: int = 512, batch: int = 64) -> Workload:
    """Soft random shapes on a black ground, as photographs of clothes are; SGD with momentum.

    (On noise, one unit that falls on the other side of its ReLU makes even DDP differ from itself by 1e-4.)
    """

    def make_batch(rank: int, step: int, dtype: torch.dtype) -> Batch:
        source = generator(rank, step)
        coarse = torch.rand(batch, 1, 5, 5, generator=source)
        shapes = F.pad(F.interpolate(coarse, size=(20, 20), mode="bilinear"), (4, 4, 4, 4))
        images = (255 * (2 * shapes - 1).clamp(min=0)).round() / 255
        return images.to(dtype), torch.randint(0, 10, (batch,), generator=source)

    def loss(model: nn.Module, pair: Batch) -> Tensor:
        return F.cross_entropy(model(pair[0]), pair[1])

    return Workload(lambda: ConvNet(hidden), lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9), loss, make_batch)


def generator(rank: int, step: int) -> torch.Generator:
    """The random source of one rank's batch of one step."""
    return torch.Generator().manual_seed(7919 * step + rank)
