"""Scenarios: experts that are left to each rank, or replicated on another dimension of a mesh than the rest of the model."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import gossamer
from gossamer import AllReduce, Gossip
from processes.expect import raises
from processes.sharded import of_all
from processes.worker import Here

STEPS = 6


class Routed(nn.Module):
    """A dense layer, and this rank's experts; those of all ranks where it is trained on one process."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = nn.Linear(5, 4)
        every = [nn.Linear(4, 4) for _ in range(2)]
        self.experts = nn.ModuleDict({str(number): every[number] for number in numbers})
        self.double()

    def forward(self, x: Tensor, expert: int | None) -> Tensor:
        """``expert``: None routes nothing to any."""
        hidden = self.dense(x).tanh()
        return hidden if expert is None else hidden + self.experts[str(expert)](hidden)


def rows(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def expert_of(step: int, rank: int) -> int | None:
    """Ranks 0 and 2 hold the first one, 1 and 3 the second; now and then nothing is routed to one of them."""
    return None if (step, rank) in ((1, 2), (3, 1), (3, 3)) else rank % 2


def alone() -> Routed:
    """On one process: the dense layer by the mean over four ranks, an expert by that over the two that hold it."""
    model = Routed((0, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(model(rows(step, rank), expert_of(step, rank)).square().mean() for rank in range(4)).backward()  # type: ignore[union-attr]
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                parameter.grad /= 4 if name.startswith("dense") else 2
        optimizer.step()
    return model


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "expert"))


def two_replicas(here: Here, **options: Any) -> tuple[Routed, torch.optim.Optimizer, list[gossamer.Replica]]:
    mesh = mesh_of_four()
    model = Routed((here.rank % 2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dense = here.replicate(model, optimizer, ignore=[model.experts], **options)
    experts = here.replicate(model.experts, optimizer, mesh=mesh["replicate"], synchronize="step")
    return model, optimizer, [dense, experts]


def replicated_on_two_dimensions(here: Here) -> None:
    """One optimizer, two replicas; equal to one process also where some experts have no gradient on some ranks."""
    for when in ("backward", "step"):
        model, optimizer, replicas = two_replicas(here, synchronize=when)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(rows(step, here.rank), expert_of(step, here.rank)).square().mean().backward()
            optimizer.step()
        whole = dict(alone().named_parameters())
        difference = max(float((p - whole[name]).detach().abs().max()) for name, p in model.named_parameters())
        assert difference < 1e-12, difference
        assert [replica.step for replica in replicas] == [STEPS, STEPS]
        here.close()


def experts_of_two_layers(here: Here) -> None:
    """A replica for the experts of each layer, all with the optimizer of the whole model."""
    mesh = mesh_of_four()
    layers = nn.ModuleList(Routed((here.rank % 2,)) for _ in range(2))
    optimizer = torch.optim.AdamW(layers.parameters(), lr=1e-2)
    here.replicate(layers, optimizer, ignore=[layer.experts for layer in layers])
    for layer in layers:
        here.replicate(layer.experts, optimizer, mesh=mesh["replicate"], synchronize="step")
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(layer(rows(step, here.rank), expert_of(step, here.rank)).square().mean() for layer in layers).backward()  # type: ignore[union-attr]
        optimizer.step()
    whole = dict(alone().named_parameters())
    difference = max(float((p - whole[name]).detach().abs().max()) for layer in layers for name, p in layer.named_parameters())
    assert difference < 1e-12, difference


def left_to_each_rank(here: Here) -> None:
    model = Routed((here.rank % 2,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    here.replicate(model, optimizer, ignore=["experts"])
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step, here.rank), here.rank % 2).square().mean().backward()
        optimizer.step()
    dense, own = of_all(model.dense.weight.detach()), of_all(next(iter(model.experts.values())).weight.detach())
    assert all(torch.equal(each, dense[0]) for each in dense)
    assert not torch.equal(own[0], own[2])


def by_another_algorithm(here: Here) -> None:
    """The dense layer exactly, experts by gossip: each average is over the ranks of its own replica."""
    mesh = mesh_of_four()
    model = Routed((here.rank % 2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dense = here.replicate(model, optimizer, AllReduce(), ignore=[model.experts])
    experts = here.replicate(model.experts, optimizer, Gossip(), mesh=mesh["replicate"])
    for step in range(3):
        optimizer.zero_grad()
        model(rows(step, here.rank), here.rank % 2).square().mean().backward()
        optimizer.step()
    assert dense.consensus_distance() == 0
    assert experts.consensus_distance() > 0
    with dense.consensus(), experts.consensus():
        own = of_all(next(iter(model.experts.values())).weight.detach().clone())
    assert torch.equal(own[0], own[2])
    assert torch.equal(own[1], own[3])
    assert not torch.equal(own[0], own[1])


def what_is_refused(here: Here) -> None:
    mesh = mesh_of_four()
    model = Routed((here.rank % 2,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with raises(gossamer.ConfigurationError, match="make that one first"):
        here.replicate(model.experts, optimizer, mesh=mesh["replicate"])
    corrected = gossamer.ChunkSparse(density=0.5, momentum_correction=True)
    with raises(gossamer.ConfigurationError, match="takes the momentum out"):
        here.replicate(model, optimizer, corrected, ignore=[model.experts])
    here.replicate(model, optimizer, ignore=[model.experts])
    scaler = torch.amp.GradScaler("cpu")
    with raises(gossamer.ConfigurationError, match="another replica's parameters"):
        here.replicate(model.experts, optimizer, mesh=mesh["replicate"], scaler=scaler)


def the_page(here: Here) -> None:
    text = (Path(gossamer.__file__).parents[2] / "docs" / "sharded.md").read_text()
    (block,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if "ignore=" in block]
    names: dict[str, Any] = {"gossamer": gossamer, "torch": torch, "init_device_mesh": init_device_mesh}
    names["model"] = model = Routed((here.rank % 2,))
    exec(block.replace('"cuda"', '"cpu"').replace("(2, 4)", "(2, 2)"), names)
    here.replicas += [names["dense"], names["experts"]]
    model(rows(0, here.rank), here.rank % 2).square().mean().backward()
    names["optimizer"].step()
    assert [names["dense"].step, names["experts"].step] == [1, 1]
