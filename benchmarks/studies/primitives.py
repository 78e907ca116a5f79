"""Primitives: the rate of single exchanges and collectives beside what plain TCP sockets reach in the same run."""

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from gossamer.bench.rows import Record
from gossamer.comm.ops import Flow, Start, all_gather, all_reduce, all_to_all, maximum, permute
from gossamer.comm.topology import Permutation, shift
from gossamer.comm.torch.runner import TorchRunner
from gossamer.lab.line_rate import Pattern, lab_addresses, line_rate
from gossamer.lab.rates import parse_rate

SILENCE = 0.15
"""Seconds without traffic before a repeat that starts cold, as compute between two exchanges would give."""


def pairs(world: int) -> Permutation:
    """Ranks 0 and 1, 2 and 3 … exchange; an odd last rank keeps its own."""
    return Permutation(tuple(rank ^ 1 if rank ^ 1 < world else rank for rank in range(world)))


def slowest(runner: TorchRunner, seconds: float) -> float:
    """The largest of the ranks' times."""
    mine = torch.tensor([seconds], dtype=torch.float64)
    return float(runner.run(lambda: maximum(mine, runner.world), "the slowest rank").item())


def pair_exchange(message: Tensor, world: int) -> Flow[Tensor]:
    """Both directions of a link concurrently, between two hosts."""
    return (yield from permute(message, pairs(world)))


def ring_shift(message: Tensor, world: int) -> Flow[Tensor]:
    """To one neighbour, from the other."""
    return (yield from permute(message, shift(world - 1, world)))


def exact(message: Tensor, world: int) -> Flow[Tensor]:
    """The sum of all on all."""
    return (yield from all_reduce(message))


def scatter_reduce(message: Tensor, world: int) -> Flow[Tensor]:
    """The sum of all of one part on each: rank ``j`` gets every rank's part ``j`` and adds up, in place."""
    arrived = yield from all_to_all(message.view(world, -1))
    for other in arrived[1:]:
        arrived[0] += other
    return arrived[0]


def gather(message: Tensor, world: int) -> Flow[Tensor]:
    """Every rank's part on all."""
    return (yield from all_gather(message.view(world, -1)[0]))


Exchange = Callable[[Tensor, int], Flow[Tensor]]

PATTERNS: dict[str, Exchange] = {
    "pair": pair_exchange,
    "ring": ring_shift,
    "all-reduce": exact,
    "scatter-reduce": scatter_reduce,
    "all-gather": gather,
}


def payload(pattern: str, message: Tensor, world: int) -> int:
    """Bytes that a rank hands to the transport: for the whole message, or of an all-reduce and its halves for their parts."""
    flow = PATTERNS[pattern](message, world)
    command = next(flow)
    flow.close()
    assert isinstance(command, Start)
    return command.op.traffic(world).bytes


def exchange(runner: TorchRunner, pattern: str, message: Tensor, drain: int, pause: float) -> float:
    """Seconds of one exchange on the slowest rank, all ranks starting together after ``pause`` seconds of silence.

    As in the plain-TCP measure, ``drain`` elements go ahead on the same connections and the clock starts when they are
    there; with 0 it starts at the start.
    """
    send = PATTERNS[pattern]

    def flow() -> Flow[float]:
        if drain:
            yield from send(message[:drain].clone(), runner.world)
        begin = time.perf_counter()
        yield from send(message, runner.world)
        return time.perf_counter() - begin

    time.sleep(pause)
    slowest(runner, 0.0)  # a barrier, on connections of its own
    return slowest(runner, runner.wait(runner.submit(flow, f"{pattern} of {message.nbytes} bytes")))


def measure(runner: TorchRunner, pattern: str, nbytes: int, repeats: int) -> Record:
    """Interleaved seconds of plain TCP with as many bytes, the exchange, and the exchange after a silence; and rates in
    bits of payload per second."""
    world = runner.world
    message = torch.zeros(nbytes // 4 // world * world)
    sent = payload(pattern, message, world)
    plain: Pattern = "pair" if pattern == "pair" else "ring"
    rows: dict[str, list[float]] = {"tcp": [], "gossamer": [], "gossamer_after_silence": []}

    burst = parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).burst
    drain = min(message.numel(), max(64_000, burst) // world * world)  # of 4 bytes each
    for _ in range(repeats):
        rows["tcp"] += line_rate(runner.rank, world, lab_addresses(), plain, sent, 1)
        rows["gossamer"].append(exchange(runner, pattern, message, drain, pause=0.0))
        rows["gossamer_after_silence"].append(exchange(runner, pattern, message, 0, SILENCE))
    medians = {name: statistics.median(seconds) for name, seconds in rows.items()}
    return {
        "pattern": pattern,
        "hosts": world,
        "bytes": nbytes,
        "payload": sent,
        "seconds": rows,
        "bits_per_second": {name: 8 * sent / median for name, median in medians.items()},
    }


def measured(patterns: Sequence[str], mbytes: Sequence[float], repeats: int) -> Iterator[Record]:
    """Every pattern and size. Collective: the process group exists."""
    runner = TorchRunner()
    runner.agree_on_opening(devices={torch.device("cpu")})
    for pattern in patterns:
        for each in mbytes:
            yield measure(runner, pattern, round(each * 1e6), repeats)
    runner.close()
