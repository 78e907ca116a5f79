"""Scenarios: exchanges of weights, averages and checkpoints of models that are in parts."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer import (
    AllReduce,
    ByteGrad,
    ChunkSparse,
    DecentralizedSGD,
    DiLoCo,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    PushSum,
    QuantizedGossip,
    ScatterReduce,
    after,
    checkpoint,
    in_parts,
)
from gossamer.optim import MasterWeights
from processes.sharded import Heads, Sharded, batch, flat, load_whole, of_all, transformer
from processes.worker import Here

STEPS = 7

KEEP_THE_MEAN = {
    "gossip": Gossip(),
    "in fp32": Gossip(wire="fp32", every=2),
    "in parts": in_parts(2, Gossip()),
    "push-sum": PushSum(),
    "local": LocalSGD(every=3),
    "nodes": Hierarchical(ranks_per_node=1),
    "gossipgrad": GossipGraD(),
    "quantized": QuantizedGossip(),
    "low precision": LowPrecisionDecentralized(),
    "decentralized": DecentralizedSGD(),
    "pga": GossipPGA(period=3),
    "late": Gossip(lag=2),
    "phases": after(3, Gossip()),
}


def words(step: int, rank: int) -> Tensor:
    return torch.randn(2, 7, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def heads(here: Here, algorithm: Any, **options: Any) -> tuple[Heads, torch.optim.Optimizer, gossamer.Replica]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Heads()
    fully_shard(model.heads[0], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, here.replicate(model, optimizer, algorithm, mesh=mesh["replicate"], **options)


def moved_by_the_mean_update() -> Tensor:
    """The weights of one process after the mean of all ranks' updates."""
    model = Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        torch.stack([model(words(step, rank)) for rank in range(4)]).mean().backward()
        optimizer.step()
    return flat(model)


def the_mean_moves_by_the_mean_update(here: Here) -> None:
    """Whatever is exchanged, of parts of which some have no elements; and no two replicas are equal before."""
    expected = moved_by_the_mean_update()
    for name, algorithm in KEEP_THE_MEAN.items():
        model, optimizer, replica = heads(here, algorithm, buffers="local")
        for step in range(STEPS):
            optimizer.zero_grad()
            model(words(step, here.rank)).backward()
            optimizer.step()
        apart = replica.consensus_distance()
        assert len(set(of_all(apart))) == 1, (name, "one distance, of all parts")
        with replica.consensus():
            inside = flat(model)
            assert replica.consensus_distance() == 0
        error = float((inside - expected).abs().max())
        assert error < 1e-9, (name, error)
        replica.close(average=True)
        assert float((flat(model) - expected).abs().max()) < 1e-9, name


def the_distance_is_that_of_whole_models(here: Here) -> None:
    model, optimizer, replica = heads(here, Gossip())
    for step in range(3):
        optimizer.zero_grad()
        model(words(step, here.rank)).backward()
        optimizer.step()
    replica.wait_for_exchanges()
    every = of_all(flat(model))
    replicas = [every[0], every[2]]
    assert torch.equal(every[0], every[1]), "one replica"
    mean = (replicas[0] + replicas[1]) / 2
    expected = (sum(float((each - mean).norm() / mean.norm()) ** 2 for each in replicas) / 2) ** 0.5
    assert abs(replica.consensus_distance() - expected) < 1e-12
    assert expected > 0


def a_forward_pass_sees_the_average(here: Here) -> None:
    """Also after one that has left FSDP2's outermost parameters whole; and afterwards this replica's own weights."""
    parts = Sharded("fsdp")
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-2)
    replica = here.replicate(parts.model, optimizer, Gossip(), mesh=parts.mesh["replicate"])
    for step in range(3):
        optimizer.zero_grad()
        parts.loss(step).backward()
        optimizer.step()

    def seen() -> Tensor:
        with torch.no_grad():
            return parts.model(batch(99, 0)).clone()

    def expected() -> Tensor:
        """Of whole weights on one process."""
        model, weights = transformer(), {name: p.full_tensor() for name, p in parts.sharded_parameters().items()}
        load_whole(model, weights)
        with torch.no_grad():
            return model(batch(99, 0)).clone()

    replica.wait_for_exchanges()
    before = expected()
    torch.testing.assert_close(seen(), before, rtol=0, atol=1e-12)
    with replica.consensus():
        average = expected()
        torch.testing.assert_close(seen(), average, rtol=0, atol=1e-12)
    assert float((average - before).abs().max()) > 1e-6
    torch.testing.assert_close(seen(), before, rtol=0, atol=1e-12)
    parts.loss(3).backward()
    optimizer.step()  # the forward pass has gathered what is there now
    replica.close(average=True)
    torch.testing.assert_close(seen(), expected(), rtol=0, atol=1e-12)


RESUMED: dict[str, Any] = {
    "exact": AllReduce(),
    "scatter": ScatterReduce(),
    "bytes": ByteGrad(),
    "chunks": ChunkSparse(density=0.3, chunk=4),
    "rank": PowerSGD(rank=1),
    "nodes of gradients": Hierarchical(ScatterReduce(), ranks_per_node=1),
    "gossip": Gossip(),
    "in parts": in_parts(2, Gossip()),
    "push-sum": PushSum(),
    "diloco": DiLoCo(every=2),
    "history": GossipGraD(history=True),
    "phases": after(4, Gossip(), before=ScatterReduce()),
}


def train(parts: Sharded, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        parts.loss(step).backward()
        optimizer.step()


def begun(here: Here, kind: str, algorithm: Any, seed: int = 0) -> tuple[Sharded, torch.optim.Optimizer, gossamer.Replica]:
    parts = Sharded(kind, seed)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-2, foreach=False)
    return parts, optimizer, here.replicate(parts.model, optimizer, algorithm, mesh=parts.mesh["replicate"], buffers="local")


def goes_on(here: Here, kind: str, algorithms: dict[str, Any]) -> None:
    """Three steps, saved, three more; loaded into new objects, three more: the same bits."""
    for name, algorithm in algorithms.items():
        folder = Path(here.folder) / f"{kind}-{name}"
        parts, optimizer, replica = begun(here, kind, algorithm)
        train(parts, optimizer, range(3))
        checkpoint.save(folder, 3, model=parts.model, optimizer=optimizer, replica=replica)
        train(parts, optimizer, range(3, 6))
        here.close()
        again, other, replica_again = begun(here, kind, algorithm, seed=1)
        found = checkpoint.load(folder, model=again.model, optimizer=other, replica=replica_again)
        assert found is not None
        assert found["step"] == 3
        train(again, other, range(3, 6))
        here.close()
        assert torch.equal(parts.whole(), again.whole()), name


def fsdp_goes_on(here: Here) -> None:
    goes_on(here, "fsdp", RESUMED)


def tensor_goes_on(here: Here) -> None:
    goes_on(here, "tensor", {name: RESUMED[name] for name in ("scatter", "gossip", "diloco")})


def copies_in_full_precision_go_on(here: Here) -> None:
    """Weights of 16 bits, whose float32 copies are what is exchanged: averages, states and resuming."""
    folder, kept = Path(here.folder) / "copies", []

    def made(seed: int) -> tuple[Sharded, MasterWeights, gossamer.Replica]:
        parts = Sharded("fsdp", seed, torch.bfloat16)
        optimizer = MasterWeights(torch.optim.AdamW, parts.model.parameters(), lr=1e-2)
        return parts, optimizer, here.replicate(parts.model, optimizer, Gossip(), mesh=parts.mesh["replicate"])

    parts, optimizer, replica = made(0)
    train(parts, optimizer, range(3))
    own = parts.whole()
    with replica.consensus():
        inside = of_all(parts.whole())
        assert all(torch.equal(each, inside[0]) for each in inside)
    assert torch.equal(parts.whole(), own)
    checkpoint.save(folder, 3, model=parts.model, optimizer=optimizer, replica=replica)
    train(parts, optimizer, range(3, 6))
    kept.append(parts.whole())
    here.close()
    parts, optimizer, replica = made(1)
    assert checkpoint.load(folder, model=parts.model, optimizer=optimizer, replica=replica)
    train(parts, optimizer, range(3, 6))
    kept.append(parts.whole())
    replica.close(average=True)
    assert torch.equal(*kept)
    after = of_all(parts.whole())
    assert all(torch.equal(each, after[0]) for each in after)
