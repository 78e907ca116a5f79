"""Models made of named blocks, and the batches that they are given."""

from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from fuzz.cases import Case

BATCH, WIDTH = 4, 6
OTHER_TYPES = {"single": torch.float32, "half": torch.bfloat16}
"""Layers whose parameters have another type than the model's."""


class Net(nn.Module):
    """The blocks of a case, one after the other, over a row of numbers."""

    def __init__(self, layers: tuple[str, ...]) -> None:
        super().__init__()
        self.kinds = [layer.split(":")[0] for layer in layers]
        self.blocks = nn.ModuleList()
        width, self._linears = WIDTH, []
        for layer in layers:
            kind, _, size = layer.partition(":")
            block, width = self._block(kind, int(size or 0), width)
            self.blocks.append(block)

    def _block(self, kind: str, size: int, width: int) -> tuple[nn.Module, int]:
        if kind in ("linear", "frozen", "giant", "alone", "transposed", *OTHER_TYPES):
            block: nn.Module = nn.Linear(width, size, bias=kind != "alone")
            if kind == "frozen":
                block.requires_grad_(False)
            if kind == "transposed":  # a parameter that does not lie row by row
                block.weight = nn.Parameter(torch.empty(width, size).uniform_(-0.4, 0.4).t())
            return block, size
        if kind in ("conv", "channels_last"):
            block = nn.Conv2d(1, size, (1, 3), padding=(0, 1))
            return block.to(memory_format=torch.channels_last) if kind == "channels_last" else block, width * size
        if kind == "embedding":
            return nn.Embedding(11, width), width
        if kind == "layernorm":
            return nn.LayerNorm(width), width
        if kind == "batchnorm":
            return nn.BatchNorm1d(width), width
        if kind in ("tied", "tied_by_memory"):  # two modules with one parameter, or with one memory: see make_model
            block = nn.ModuleList([nn.Linear(width, width), nn.Linear(width, width)])
            if kind == "tied":
                block[1].weight = block[0].weight
            return block, width
        if kind == "twice":
            return nn.Linear(width, width), width
        shape = {"scalar": (), "empty": (0, 3), "unused": (size,), "rarely": (width,)}[kind]
        block = nn.Module()
        block.value = nn.Parameter(torch.full(shape, 0.5))
        return block, width

    def forward(self, x: Tensor, ids: Tensor, rarely: bool) -> Tensor:
        for kind, block in zip(self.kinds, self.blocks, strict=True):
            x = torch.tanh(self._applied(kind, block, x, ids, rarely))
        return x.square().mean()

    def _applied(self, kind: str, block: Any, x: Tensor, ids: Tensor, rarely: bool) -> Tensor:
        if kind in ("conv", "channels_last"):
            return block(x[:, None, None, :]).flatten(1)
        if kind == "embedding":
            return x + block(ids)
        if kind in ("tied", "tied_by_memory"):
            return block[1](torch.tanh(block[0](x)))
        if kind in OTHER_TYPES:
            return block(x.to(OTHER_TYPES[kind])).to(x.dtype)
        if kind == "twice":
            return block(torch.tanh(block(x)))
        if kind == "scalar":
            return x * block.value
        if kind == "empty":
            return x + block.value.sum()
        if kind == "rarely":
            return x + block.value if rarely else x
        return x if kind == "unused" else block(x)


def loss_of(case: Case, model: Net, rank: int, step: int, micro: int) -> Tensor:
    """The loss of one backward pass of one rank."""
    generator = torch.Generator().manual_seed(10_000 * case.seed + 1000 * rank + 10 * step + micro)
    dtype = getattr(torch, case.dtype)
    rarely = (step + rank + case.seed) % 3 == 0
    if case.linear:
        terms = []
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            kind = model.kinds[int(name.split(".")[1])]
            if kind != "unused" and (kind != "rarely" or rarely):
                terms.append((parameter * gradient).sum().to(dtype))
        return torch.stack(terms).sum()
    x = torch.randn(BATCH, WIDTH, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(0, 11, (BATCH,), generator=generator)
    loss: Tensor = model(x, ids, rarely)
    return loss


def make_model(case: Case, seed: int) -> Net:
    """The model, with weights of this seed."""
    torch.manual_seed(seed)
    model = Net(case.layers).to(getattr(torch, case.dtype))
    for kind, block in zip(model.kinds, model.blocks, strict=True):
        if kind in OTHER_TYPES:
            block.to(OTHER_TYPES[kind])
        if kind == "tied_by_memory":
            block[1].weight.data = block[0].weight.data
    return model


def tied_by_memory(model: Net) -> list[tuple[str, str]]:
    """The names of parameters that share their memory with another one's, and that one's."""
    blocks = [f"blocks.{index}" for index, kind in enumerate(model.kinds) if kind == "tied_by_memory"]
    return [(f"{block}.1.weight", f"{block}.0.weight") for block in blocks]


def make_optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer or two over the trainable parameters."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    count = min(case.optimizers, len(trainable))
    name, _, given = case.optimizer.partition("(")
    factory, _, rest = given.partition(", ") if name == "MasterWeights" else ("", "", given)
    options, first = eval(f"dict({rest}"), [getattr(torch.optim, factory)] if factory else []
    make = getattr(gossamer.optim, name, None) or getattr(torch.optim, name)
    return [make(*first, trainable[index::count], **options) for index in range(count)]
