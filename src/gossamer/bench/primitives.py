"""Primitives: the rate of single exchanges beside what plain TCP sockets reach in the same run.

A script of the lab; rank 0 prints one JSON object per pattern and size:

    gossamer lab --hosts 4 --rate 200mbit -- -m gossamer.bench.primitives --mbytes 8 16
"""

import argparse
import json
import os
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.comm.ops import Flow, maximum, permute
from gossamer.comm.topology import Permutation, shift
from gossamer.comm.torch_runner import TorchRunner
from gossamer.lab.line_rate import lab_addresses, line_rate
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


def exchange(runner: TorchRunner, permutation: Permutation, message: Tensor, drain: int, pause: float) -> float:
    """Seconds of one exchange on the slowest rank, all ranks starting together after ``pause`` seconds of silence.

    As in the plain-TCP measure, ``drain`` bytes go ahead on the same connections and the clock starts when they are
    there; with 0 it starts at the start.
    """

    def flow() -> Flow[float]:
        if drain:
            yield from permute(message[:drain], permutation)
        begin = time.perf_counter()
        yield from permute(message, permutation)
        return time.perf_counter() - begin

    time.sleep(pause)
    slowest(runner, 0.0)  # a barrier, on connections of its own
    return slowest(runner, runner.wait(runner.submit(flow, f"an exchange of {message.numel()} bytes")))


def measure(runner: TorchRunner, pattern: str, nbytes: int, repeats: int) -> dict[str, Any]:
    """Interleaved seconds of plain TCP, the exchange, and the exchange after a silence; and rates in bits per second."""
    world = runner.world
    permutation = pairs(world) if pattern == "pair" else shift(world - 1, world)
    message = torch.zeros(nbytes, dtype=torch.uint8)
    rows: dict[str, list[float]] = {"tcp": [], "gossamer": [], "gossamer_after_silence": []}

    drain = max(256_000, 4 * parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).burst)
    for _ in range(repeats):
        plain = line_rate(runner.rank, world, lab_addresses(), "pair" if pattern == "pair" else "ring", nbytes, 1)
        rows["tcp"] += plain
        rows["gossamer"].append(exchange(runner, permutation, message, drain, pause=0.0))
        rows["gossamer_after_silence"].append(exchange(runner, permutation, message, 0, SILENCE))
    medians = {name: statistics.median(seconds) for name, seconds in rows.items()}
    return {
        "pattern": pattern,
        "bytes": nbytes,
        "seconds": rows,
        "bits_per_second": {name: 8 * nbytes / median for name, median in medians.items()},
        "ratio_to_tcp": statistics.median(t / g for t, g in zip(rows["tcp"], rows["gossamer"], strict=True)),
        "ratio_after_silence": statistics.median(
            t / g for t, g in zip(rows["tcp"], rows["gossamer_after_silence"], strict=True)
        ),
    }


def main() -> None:
    """Measure every pattern and size, and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--patterns", nargs="+", choices=("pair", "ring"), default=["pair", "ring"])
    parser.add_argument("--mbytes", nargs="+", type=float, default=[8.0, 16.0, 64.0], help="message sizes in 10^6 bytes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    runner = TorchRunner()
    runner.agree_on_opening()
    for pattern in options.patterns:
        for mbytes in options.mbytes:
            row = measure(runner, pattern, round(mbytes * 1e6), options.repeats)
            if runner.rank == 0:
                sys.stdout.write(json.dumps(row | {"rate": os.environ.get("GOSSAMER_LAB_RATE", "")}) + "\n")
    runner.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
