"""Overhead: what exact all-reduce adds to a step where nothing travels, beside what PyTorch's DDP adds to it.

One process. With a world of one there is nobody to send to; with several ranks torch's fake process group stands for the
others: its operations are over as soon as they begin. What remains is the work beside the network: hooks, copies into
buckets, the launch of every exchange, the wait for it. The models have the parameters of ResNet-50 and GPT-2 and compute
next to nothing, so that nothing hides it. Beside the step time stands what all threads of the process used in it: processor
time in user mode and in the kernel, and page faults (memory that was touched for the first time). On a GPU, where one is
there, the time is that of the GPU: the host's counts as far as the GPU waits for it.
"""

import argparse
import resource
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import GradBucket, HashStore  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

import gossamer
from benchmarks.studies.absent import AbsentRunner
from benchmarks.studies.harness import Study, console, parser_of, seconds_of, spread
from gossamer.algorithms import AllReduce
from gossamer.bench.clock import clock_for
from gossamer.bench.conditions import conditions, load
from gossamer.bench.emulated import MODELS, Emulated
from gossamer.bench.ratios import ends, require_scipy
from gossamer.bench.rows import Column, Record, Store, code, milliseconds, number, text
from gossamer.engine.assembly import assemble
from gossamer.replica import Replica

SIZES = ("ResNet50", "GPT2")
WORLDS = (1, 8)
ALONE = "alone"
OURS = "AllReduce()"

Step = Callable[[], None]


def _ours(model: nn.Module, optimizer: SGD, device: torch.device) -> nn.Module:
    if dist.get_world_size() == 1:
        gossamer.replicate(model, optimizer, AllReduce())
    else:
        Replica(assemble(model, (optimizer,), AllReduce(), AbsentRunner(device), "local"))
    return model


def _ddp(model: nn.Module, views: bool) -> nn.Module:
    network = DistributedDataParallel(model, gradient_as_bucket_view=views)
    if dist.get_world_size() > 1:
        network.register_comm_hook(None, _answered)
    return network


def _answered(_: None, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """What DDP does by itself, but for the answer: it cannot read that of a fake process group.

    Nor does this divide by the number of ranks: without a hook DDP does so while it copies, in no time of its own.
    """
    flat = bucket.buffer()
    dist.all_reduce(flat, async_op=True)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


METHODS: Mapping[str, Callable[[nn.Module, SGD, torch.device], nn.Module]] = {
    ALONE: lambda model, optimizer, device: model,
    "ddp": lambda model, optimizer, device: _ddp(model, views=False),
    "ddp, gradient_as_bucket_view": lambda model, optimizer, device: _ddp(model, views=True),
    OURS: _ours,
}
"""What is trained, by name: how a model is made to be trained so."""


@contextmanager
def group_of(world: int, device: torch.device) -> Iterator[None]:
    """A default process group: this process alone, or this one of ``world`` ranks of which no other is there."""
    if world == 1:
        dist.init_process_group("gloo" if device.type == "cpu" else "nccl", store=HashStore(), rank=0, world_size=1)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trained(size: str, method: str, device: torch.device) -> Step:
    """A step of a model of this size, trained in this way."""
    torch.manual_seed(0)
    model = Emulated(MODELS[size](), 0.0).to(device)
    optimizer = SGD(model.parameters(), lr=1e-3)
    network, signal = METHODS[method](model, optimizer, device), torch.rand(1, device=device)

    def step() -> None:
        optimizer.zero_grad()
        network(signal).sum().backward()
        optimizer.step()

    return step


USED = ("user_seconds", "kernel_seconds", "page_faults")
"""What a process uses, per step."""


def used() -> dict[str, float]:
    """By all threads of this process so far, by the names of ``USED``."""
    told = resource.getrusage(resource.RUSAGE_SELF)
    return dict(zip(USED, (told.ru_utime, told.ru_stime, told.ru_minflt + told.ru_majflt), strict=True))


@dataclass(frozen=True, slots=True)
class Timed:
    """Of one method: seconds per step in each round, and what was :func:`used` per step of all rounds."""

    seconds: list[float] = field(default_factory=list)
    used: dict[str, float] = field(default_factory=lambda: dict.fromkeys(USED, 0.0))


def measure(size: str, world: int, device: torch.device, rounds: int, steps: int) -> dict[str, Timed]:
    """What each method takes in interleaved rounds; the order of the methods turns from round to round."""
    clock = clock_for(device)
    with group_of(world, device):
        methods = {name: trained(size, name, device) for name in METHODS}
        for step in methods.values():
            seconds_of(step, clock, 4)  # buckets are laid out, kernels compiled, memory touched
        found = {name: Timed() for name in methods}
        names = list(methods)
        for number in range(rounds):
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                before = used()
                found[name].seconds.append(seconds_of(methods[name], clock, steps))
                for what, now in used().items():
                    found[name].used[what] += (now - before[what]) / (rounds * steps)
    return found


def rows_of(size: str, world: int, found: Mapping[str, Timed]) -> list[Record]:
    """One per method: the median step time, and what it has beyond training alone in the same round."""
    rows = []
    for method, timed in found.items():
        beyond = [own - alone for own, alone in zip(timed.seconds, found[ALONE].seconds, strict=True)]
        low, high = ends(beyond)
        row = {"model": size, "world": world, "method": method, "step_seconds": statistics.median(timed.seconds)}
        row |= {"beyond": statistics.median(beyond), "low": low, "high": high}
        rows.append(row | timed.used | {"seconds": timed.seconds})
    return rows


def _beyond(row: Record) -> str:
    return "" if row["method"] == ALONE else f"{_ms(row['beyond'])} ({_ms(row['low'])} to {_ms(row['high'])})"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def columns(rows: Sequence[Record]) -> Sequence[Column]:
    """What the table shows."""
    told = spread([{"rounds": len(row["seconds"])} for row in rows])
    return (
        Column("parameters of", text("model")),
        Column("ranks", text("world")),
        Column("method", code("method")),
        Column("ms per step", milliseconds("step_seconds", "{:.2f}")),
        Column(f"ms beyond training alone ({told})", _beyond),
        Column("in user mode, ms", milliseconds("user_seconds", "{:.2f}")),
        Column("in the kernel, ms", milliseconds("kernel_seconds", "{:.2f}")),
        Column("page faults", number("page_faults", "{:.0f}")),
    )


def note(rows: Sequence[Record]) -> str:
    """Where the first row was measured, and how long."""
    first = rows[0]
    where = first.get("accelerator") or f"one thread of {first['processor']}"
    return f"{where}; torch {first['torch']}; {len(first['seconds'])} rounds."


STUDY = Study("overhead", ("model", "world", "method"), columns, note=note)


def on_device(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """The rows of every model and number of ranks."""
    require_scipy()
    torch.set_num_threads(1)
    device, load_before = torch.device(options.device), load()
    for size in options.sizes:
        for world in WORLDS:
            console.log(f"{size} on {device}, {world} {'rank' if world == 1 else 'ranks'}: {options.rounds} rounds")
            rows = rows_of(size, world, measure(size, world, device, options.rounds, options.steps))
            yield from (row | conditions(METHODS, load_before, 0) for row in rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every model, in a world of one and among others that are not there."""
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", choices=sorted(MODELS), default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=4)
    STUDY.main(parser, on_device, arguments)


if __name__ == "__main__":
    main()
