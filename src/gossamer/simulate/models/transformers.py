"""Transformers: GPT-2 in its four sizes, BERT-Large, and two decoders as they are trained now."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def attention(q: Tensor, k: Tensor, v: Tensor, heads: int, kv_heads: int | None = None, causal: bool = True) -> Tensor:
    """Attention of ``(batch, length, width)`` queries over keys and values of ``kv_heads`` heads (as many as queries have)."""
    batch, length, width = q.shape
    size = width // heads
    spread = heads // (kv_heads or heads)
    query = q.view(batch, length, heads, size).transpose(1, 2)
    key, value = (each.view(batch, length, -1, size).transpose(1, 2).repeat_interleave(spread, 1) for each in (k, v))
    mixed: Tensor = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal)[0]
    return mixed.transpose(1, 2).reshape(batch, length, width)


class GPT2Block(nn.Module):
    """Attention and a perceptron, each behind a layer norm and added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(attention(q, k, v, self.heads))
        added: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + added


class GPT2(nn.Module):
    """GPT-2 (Radford et al. 2019): learned places, and a head that shares the embedding's weights."""

    def __init__(self, layers: int, width: int, heads: int, words: int = 50257, context: int = 1024) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(words, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(GPT2Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


class BertBlock(nn.Module):
    """Attention and a perceptron, each added to what came in, and a layer norm behind each."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.out(attention(self.query(x), self.key(x), self.value(x), self.heads, causal=False)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """BERT's encoder with its pooler (Devlin et al. 2018, arXiv 1810.04805); outputs are the pooled first places."""

    def __init__(self, layers: int, width: int, heads: int, words: int = 30522, context: int = 512) -> None:
        super().__init__()
        self.token, self.place, self.kind = nn.Embedding(words, width), nn.Embedding(context, width), nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(BertBlock(width, heads) for _ in range(layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]] + self.kind(torch.zeros_like(tokens))
        return torch.tanh(self.pooler(self.blocks(self.norm(x))[:, 0]))


@dataclass(frozen=True, kw_only=True)
class DecoderSize:
    """``kv_heads``: heads of keys and values, each for several of queries; ``inner``: width of the gated perceptron."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    inner: int
    words: int = 32000


class DecoderBlock(nn.Module):
    """Attention and a gated perceptron without biases, each behind an RMS norm. Rotations of places, which have no parameters
    and hardly any arithmetic, are left out."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.size, width = size, size.width
        shared = width // size.heads * size.kv_heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, shared, bias=False), nn.Linear(width, shared, bias=False)
        self.gate, self.up = nn.Linear(width, size.inner, bias=False), nn.Linear(width, size.inner, bias=False)
        self.down = nn.Linear(size.inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.out(attention(self.query(y), self.key(y), self.value(y), self.size.heads, self.size.kv_heads))
        y = self.norm2(x)
        added: Tensor = self.down(F.silu(self.gate(y)) * self.up(y))
        return x + added


class Decoder(nn.Module):
    """A decoder as Llama's (Touvron et al. 2023, arXiv 2307.09288), with a head of its own."""

    def __init__(self, size: DecoderSize) -> None:
        super().__init__()
        self.token = nn.Embedding(size.words, size.width)
        self.blocks = nn.Sequential(*(DecoderBlock(size) for _ in range(size.layers)))
        self.norm, self.head = nn.RMSNorm(size.width), nn.Linear(size.width, size.words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.token(tokens))))  # type: ignore[no-any-return]


ONE_BILLION = DecoderSize(layers=22, width=2048, heads=32, kv_heads=4, inner=5632)
"""TinyLlama (Zhang et al. 2024, arXiv 2401.02385)."""

SEVEN_BILLION = DecoderSize(layers=32, width=4096, heads=32, kv_heads=32, inner=11008)
"""Llama 2 7B (arXiv 2307.09288)."""
