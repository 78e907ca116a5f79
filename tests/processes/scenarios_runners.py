"""Scenarios: one algorithm file under two runners. Every subgroup of 1 … 5 ranks trains alike; the test compares."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from gossamer import (
    DESLOC,
    AllReduce,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    Hierarchical,
    LowPrecisionDecentralized,
    ScatterReduce,
    SparseLoCo,
    after,
    sparta,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm, registry
from gossamer.codecs import TopPerChunk
from gossamer.comm.connect import connect
from gossamer.comm.ops import AllGather, AllToAll, Broadcast, Flow, Permute, all_gather, start, wait, within
from gossamer.comm.ops import AllReduce as Reduce
from gossamer.comm.runner import Runner
from gossamer.comm.topology import ShiftOne, shift
from processes.worker import Here

WORLDS = (1, 3, 4)
STEPS = 6


def algorithms() -> dict[str, Algorithm]:
    """Every registered algorithm with its defaults, and with each other value of its ``wire``, in small buckets."""
    made: list[Algorithm] = []
    for kind in registry().values():
        small: dict[str, Any] = {"bucket_bytes": 64} | ({"chunk": 8} if "chunk" in kind.__dataclass_fields__ else {})
        made.append(kind(**small))
        if "wire" in kind.__dataclass_fields__:
            made += [kind(wire=wire, **small) for wire in ("fp32", "fp16", "bf16")]
    made += [
        Hierarchical(outer, bucket_bytes=64, ranks_per_node=2)
        for outer in (AllReduce(), Gossip(), ScatterReduce(gather_below=0))
    ]
    made.append(after(2, Gossip(), before=ScatterReduce(gather_below=0)))
    made.append(Gossip(topology=ShiftOne(), bucket_bytes=64))  # somebody has a bye where ranks are odd in number
    return {repr(algorithm).replace("bucket_bytes=64, ", ""): algorithm for algorithm in made}


def outer_loops() -> dict[str, Algorithm]:
    """Those that train alone for some steps, with an exchange within the steps of :func:`train_real`."""
    short: dict[str, Any] = {"every": 3, "dense": 0, "bucket_bytes": 64}
    sparse = LowPrecisionDecentralized(codec=TopPerChunk(density=0.25))
    made = [
        DiLoCo(**short),
        DiLoCo(**short, outlier=5.0, delay=2, merge=0.5),
        DiLoCo(**short, averaging=Gossip()),
        DiLoCo(**short, averaging=sparse),
        EagerDiLoCo(**short),
        SparseLoCo(**short),
        DESLOC(**short, first=1, second=2),
        streaming_diloco(every=4, fragments=2, delay=3, dense=0, bucket_bytes=64),
        sparta(DiLoCo(**short), share=0.1),
        after(2, DiLoCo(**short)),
    ]
    return {repr(algorithm).replace("bucket_bytes=64, ", ""): algorithm for algorithm in made}


def is_exact(algorithm: Algorithm) -> bool:
    """Whether it computes the mean in full precision."""
    return algorithm.traits.exact and getattr(algorithm, "wire", "fp32") == "fp32"


class Exact(nn.Module):
    """A loss that is linear in the parameters, so that a gradient is whatever the batch says."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(1)
        shapes = [(7,), (20, 2), (1, 1), (4, 2, 2), (33, 6)]
        self.weights = nn.ParameterList(torch.randint(-32, 32, shape, generator=source) / 16.0 for shape in shapes)

    def forward(self, slopes: list[Tensor]) -> Tensor:
        return torch.stack([(w * s).sum() for w, s in zip(self.weights, slopes, strict=True)]).sum()


def exact_slopes(model: Exact, rank: int, world: int, step: int) -> list[Tensor]:
    """Multiples of world/64: dividing by the world, adding, and rounding to 16 bits are all exact."""
    source = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-4, 5, w.shape, generator=source) * world / 64.0 for w in model.weights]


def train_exact(algorithm: Algorithm, rank: int, world: int, **options: Any) -> tuple[list[Tensor], list[float]]:
    """Gradients and weights after every step; and the bytes and messages that this rank has sent meanwhile."""
    model = Exact()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    replica = gossamer.replicate(model, optimizer, algorithm, **options)
    seen, before = [], replica.metrics()
    for step in range(STEPS):
        optimizer.zero_grad()
        model(exact_slopes(model, rank, world, step)).backward()
        seen += [w.grad.clone() for w in model.weights]
        optimizer.step()
        seen += [w.detach().clone() for w in model.weights]
    replica.state_dict()  # ends whatever is under way
    sent = [replica.metrics()[key] - before[key] for key in ("bytes_sent", "messages_sent")]
    replica.close()
    return [*seen, *(w.detach().clone() for w in model.weights)], sent


def train_real(algorithm: Algorithm, rank: int, world: int, **options: Any) -> list[Tensor]:
    """The weights of a small network in float64 after training on random numbers."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = gossamer.replicate(model, optimizer, algorithm, **options)
    for step in range(10):
        source = torch.Generator().manual_seed(100 * step + rank)
        optimizer.zero_grad()
        model(torch.randn(8, 10, generator=source, dtype=torch.float64)).square().mean().backward()
        optimizer.step()
    replica.close()
    return [p.detach().clone() for p in model.parameters()]


def long_messages(runner: Runner) -> list[Tensor]:
    """Operations that go in rounds, several under way, others among them, some waited for before earlier ones."""
    world, source = runner.world, torch.Generator().manual_seed(runner.rank)

    def numbers(*shape: int) -> Tensor:
        return torch.randint(-99, 99, shape, generator=source).float()

    def flow() -> Flow[list[Tensor]]:
        handles = []
        for length in (600_000, 33, 150_000, 0):  # of 4 bytes: three pieces, all together, one piece
            handles.append((yield start(AllToAll(numbers(world, length)))))
            handles.append((yield start(Permute(numbers(length + 1), shift(1, world)))))
            handles.append((yield start(AllGather(numbers(length + 2)))))
        if world > 2:  # among some of them, on connections of their own
            some = tuple(rank for rank in range(world) if rank != 1)
            if runner.rank != 1:
                found_there = yield from within(all_gather(numbers(200_000)), some)
            handles.append((yield start(AllToAll(numbers(world, 150_000)))))
        handles.append((yield start(Broadcast(numbers(10), source=world - 1))))
        handles.append((yield start(Reduce(numbers(70_000)))))
        handles.append((yield start(AllGather(numbers(300_000)))))
        found = {}
        for place in (2, 0, 12, 7, *range(len(handles))):
            if place not in found:
                found[place] = (yield wait(handles[place])).clone()
        there = [found_there] if world > 2 and runner.rank != 1 else []
        return [*(found[place] for place in range(len(handles))), *there]

    return runner.run(flow, "long messages")


def long_messages_in_every_world(here: Here) -> dict[int, list[Tensor]]:
    """What this rank got in every world that it belongs to."""
    found = {}
    for world in WORLDS[1:]:
        group = dist.new_group(list(range(world)))
        if here.rank < world:
            runner = connect(group, timeout=30.0)
            runner.agree_on_opening()
            found[world] = long_messages(runner)
            runner.close()
    return found


def every_world(here: Here) -> dict[tuple[str, str, int], list[Any]]:
    """What this rank saw with every algorithm in every world that it belongs to."""
    seen = {}
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if here.rank >= world:
            continue
        for name, algorithm in algorithms().items():
            options = {"group": group, "timeout": 30.0}
            exact, sent = train_exact(algorithm, here.rank, world, **options)
            seen["exact", name, world], seen["sent", name, world] = exact, sent
            if is_exact(algorithm):
                seen["real", name, world] = train_real(algorithm, here.rank, world, **options)
        for name, algorithm in outer_loops().items() if world > 2 else ():
            seen["real", name, world] = train_real(algorithm, here.rank, world, group=group, timeout=30.0)
    return seen
