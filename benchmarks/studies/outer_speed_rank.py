"""One rank of the study of outer loops' speed: trains each method in turn, and prints what a step took on this host."""

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from gossamer.bench.emulated import emulated
from gossamer.bench.methods import join, parse_method
from gossamer.bench.peers.base import Joined
from gossamer.bench.peers.torchft import diloco

PERIOD = 32
TORCHFT = f"torchft: DiLoCo(sync_every={PERIOD}, fragment_sync_delay={PERIOD // 2})"


def joined(method: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Joined:
    """What to train with."""
    if method == TORCHFT:
        return diloco(PERIOD // 2, 0.5, PERIOD)(model, optimizer)
    return join(parse_method(method), model, optimizer)


def fewer(trained: Joined, slowdown: float) -> float:
    """By which factor a slow host takes fewer steps: none where all are at the same step."""
    return 1.0 if trained.replica is not None and not trained.replica.algorithm.cadence.lag else slowdown


def come_together(trained: Joined) -> None:
    """End what is under way, so that it costs no other method's time."""
    if trained.replica is not None:
        trained.replica.catch_up()  # a slow rank has exchanges to take part in that others have begun
        trained.replica.wait_for_exchanges()
    dist.barrier()


def seconds_per_step(step: Callable[[], Any], steps: int) -> float:
    """Of so many steps."""
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begin) / steps


def main(seconds: float, periods: int, rounds: int, methods: list[str]) -> None:
    """Every method trains a model of its own; one host may be slower, and takes as many steps fewer."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    work = emulated("GPT", seconds)
    inputs, targets = work.random_batch(torch.Generator().manual_seed(0))
    slowdown = float(os.environ.get("GOSSAMER_LAB_SLOWDOWN", "1"))
    trained = {}
    for method in methods:
        torch.manual_seed(0)
        model = work.build_model()
        trained[method] = joined(method, model, work.build_optimizer(model))
    found: dict[str, list[float]] = {method: [] for method in methods}
    for turn in range(rounds + 1):
        for method, each in trained.items():
            with each.turn():
                steps = periods * PERIOD if turn else PERIOD
                took = seconds_per_step(partial(each.step, inputs, targets, work.loss), round(steps / fewer(each, slowdown)))
                come_together(each)
            if turn:  # the first one makes connections, and the first exchange
                found[method].append(took)
    for method, seconds_of_rounds in found.items():
        sys.stdout.write(json.dumps({"rank": dist.get_rank(), "method": method, "seconds": seconds_of_rounds}) + "\n")
    sys.stdout.flush()
    for each in trained.values():
        each.close()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
