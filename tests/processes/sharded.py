"""Models in parts: a small transformer, and how it is sharded over a mesh of real processes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WORDS, WIDTH, LENGTH, HEADS = 11, 10, 6, 2


class Attention(nn.Module):
    """Causal attention whose heads may be shared out: as many as the rows of its weights here give."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 14), nn.Linear(14, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Transformer(nn.Module):
    """Of two blocks. Widths are such that two ranks have parts of different sizes of some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(WORDS, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).clone()  # FSDP2 warns of outputs that are views


def transformer(seed: int = 0) -> Transformer:
    """In double precision, with the weights of ``seed``."""
    torch.manual_seed(seed)
    return Transformer().double()


def batch(step: int, who: int, size: int = 3) -> Tensor:
    """The words of a step for a worker with data of its own."""
    return torch.randint(0, WORDS, (size, LENGTH), generator=torch.Generator().manual_seed(1000 * step + who))


def loss_of(outputs: Tensor, words: Tensor) -> Tensor:
    """The mean cross-entropy of the next words."""
    return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), words[:, 1:].flatten())


def fsdp(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over the dimension ``shard``: each block, and the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def tensor_parallel(model: Transformer, mesh: DeviceMesh, sequence: bool = True) -> None:
    """Colwise and rowwise over the dimension ``tensor``; ``sequence``: norms work on a part of the words each."""
    part, whole = Shard(1), Replicate()
    for block in model.blocks:
        plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
        plan |= {"attention.out": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan |= {
                "first": SequenceParallel(),
                "second": SequenceParallel(),
                "attention": PrepareModuleInput(input_layouts=part, desired_input_layouts=whole),
                "attention.out": RowwiseParallel(output_layouts=part),
                "up": ColwiseParallel(input_layouts=part),
                "down": RowwiseParallel(output_layouts=part),
            }
        parallelize_module(block, mesh["tensor"], plan)
    outside: dict[str, Any] = {
        "words": RowwiseParallel(input_layouts=whole, output_layouts=part if sequence else whole),
        "head": ColwiseParallel(input_layouts=part if sequence else whole, output_layouts=whole),
        "norm": SequenceParallel(),
    }
    if not sequence:
        del outside["norm"]
    parallelize_module(model, mesh["tensor"], outside)


def both(model: Transformer, mesh: DeviceMesh) -> None:
    """FSDP2 over tensor-parallel parts."""
    tensor_parallel(model, mesh)
    fsdp(model, mesh)


KINDS: dict[str, tuple[tuple[int, ...], tuple[str, ...], Callable[[Transformer, DeviceMesh], None]]] = {
    "fsdp": ((2, 2), ("replicate", "shard"), fsdp),
    "tensor": ((2, 2), ("replicate", "tensor"), tensor_parallel),
    "tensor without sequence": ((2, 2), ("replicate", "tensor"), partial(tensor_parallel, sequence=False)),
    "both": ((2, 2, 2), ("replicate", "shard", "tensor"), both),
}
"""By name: a mesh's shape, the names of its dimensions, and what shards a model over all but the first."""


class Sharded:
    """A transformer in parts. ``readers``: how many have data of their own, of whom this rank is number ``reader``."""

    def __init__(self, kind: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        shape, names, shard = KINDS[kind]
        self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        self.model = transformer(seed).to(dtype)
        shard(self.model, self.mesh)
        has_data = [name for name in names if name != "tensor"]
        self.readers, self.reader = 1, 0
        for name in has_data:
            self.readers *= self.mesh[name].size()
            self.reader = self.reader * self.mesh[name].size() + self.mesh.get_local_rank(name)

    def loss(self, step: int) -> Tensor:
        """Of this rank's batch."""
        words = batch(step, self.reader)
        outputs = self.model(words)
        return loss_of(outputs.full_tensor() if isinstance(outputs, DTensor) else outputs, words)

    def sharded_parameters(self) -> dict[str, Any]:
        """The parameters by name, also where a forward pass has put whole ones in their places."""
        reshard(self.model)
        return dict(self.model.named_parameters())

    def whole(self) -> Tensor:
        """All weights, as one flat tensor."""
        reshard(self.model)
        return flat(self.model)


def reshard(model: nn.Module) -> None:
    """Let FSDP2 put the parts back."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """A DTensor in one piece."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def load_whole(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Fill the parts of a model with those of whole ``weights``."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            whole = weights[name]
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)


def flat(model: nn.Module) -> Tensor:
    """Its weights, whole, as one flat tensor."""
    return torch.cat([whole(parameter).flatten() for parameter in model.parameters()])


def clip_gradients(model: nn.Module, bound: float) -> None:
    """As torch does, which in 2.9 rounds the factor for DTensors to float32 (6e-7 beside the right one, without gossamer)."""
    if not torch.__version__.startswith("2.9."):
        nn.utils.clip_grad_norm_(model.parameters(), bound, foreach=False)
        return
    norm: Any = nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None], foreach=False)
    factor = min(1.0, bound / (float(whole(norm)) + 1e-6))
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


def alone(readers: int, steps: int, clip: float | None = None, size: int = 3) -> Transformer:
    """The model of one process that has trained on all batches."""
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        optimizer.zero_grad()
        words = torch.cat([batch(step, who, size) for who in range(readers)])
        loss_of(model(words), words).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


class Heads(nn.Module):
    """Linear in its weights, so that gradients do not depend on them: under any exchange that keeps the mean, the mean of the
    replicas moves by the mean update. One part has no elements of a weight with one row, and of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.heads = nn.ModuleList(nn.Linear(7, rows) for rows in (5, 1, 4))
        self.number = nn.Parameter(torch.ones(1))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([head(x).sum() for head in self.heads]).sum() + self.number.sum() * x.mean()


def stage_of(model: Transformer, number: int) -> nn.Module:
    """One of two stages of the transformer: up to the first block, and from the second one on."""
    if number == 0:
        return nn.Sequential(model.words, model.blocks[0])
    return nn.Sequential(model.blocks[1], model.norm, model.head)


def of_all(value: Any) -> list[Any]:
    """What every rank has."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone
