"""Training log: JSON lines from rank 0, with a clock that runs only while the model trains."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from common import mean_over_ranks


class TrainingLog:
    """Steps and evaluations, each with the seconds and bytes that training has taken so far.

    What happens inside ``paused()`` is not counted. Before the clock stops, all ranks wait for each other on the clock,
    so that nobody gains by being ahead of the others or by a message that still is under way.

    ``payload_bytes`` is what this rank handed to the transport, and for DDP, which does not count, what a ring
    all-reduce sends: 2·(p−1)/p of the gradients. ``interface_bytes`` is what has left the emulated host, headers,
    acknowledgements and all; known only inside ``gossamer lab``. ``exposed_seconds``: the training loop stood still
    for gossamer; DDP does not tell.
    """

    def __init__(
        self, options: argparse.Namespace, net: nn.Module, optimizer: Optimizer, replica: gossamer.Replica | None
    ) -> None:
        self._replica, self._limit = replica, options.seconds
        self._device = torch.device(options.device)
        self._world = dist.get_world_size() if dist.is_initialized() else 1
        self._steps, self._items = 0, 0
        size = sum(p.numel() * p.element_size() for p in net.parameters())
        self._ring_bytes = 2 * (self._world - 1) / self._world * size if options.method == "ddp" else 0.0
        self._out = _open(options.log_to)
        algorithm = repr(replica.algorithm) if replica else options.method
        parameters, made = sum(p.numel() for p in net.parameters()), {"world": self._world, "torch": torch.__version__}
        self._write({"algorithm": algorithm, "optimizer": type(optimizer).__name__, "parameters": parameters} | made)
        _wait_for_all()
        self._zero = self._read()

    def step(self, loss: Tensor, items: int) -> None:
        """One step is done, on ``items`` tokens or images per rank."""
        self._steps += 1
        self._items += items * self._world
        self._write({"step": self._steps, "loss": loss.item(), "items": self._items} | self._counted())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the clock stands still."""
        _wait_for_all()
        before = self._read()
        yield
        _wait_for_all()
        after = self._read()
        self._zero = {name: zero + after[name] - before[name] for name, zero in self._zero.items()}

    def evaluated(self, results: dict[str, float]) -> None:
        """Write down the results of an evaluation."""
        self._write({"step": self._steps} | results | self._counted())

    def out_of_time(self) -> bool:
        """Whether the seconds of ``--seconds`` have passed. Collective: all ranks get the same answer."""
        return self._limit is not None and mean_over_ranks(self._counted()["seconds"], self._device) >= self._limit

    def _counted(self) -> dict[str, float]:
        return {name: value - self._zero[name] for name, value in self._read().items()}

    def _read(self) -> dict[str, float]:
        now = {"seconds": time.perf_counter(), "payload_bytes": self._steps * self._ring_bytes}
        if self._replica is not None:
            metrics = self._replica.metrics()
            now |= {"payload_bytes": metrics["bytes_sent"], "exposed_seconds": metrics["exposed_seconds"]}
        sent = _interface_bytes()
        return now if sent is None else now | {"interface_bytes": sent}

    def _write(self, record: dict[str, object]) -> None:
        if self._out is not None:
            self._out.write(json.dumps(record) + "\n")
            self._out.flush()


def _open(name: str | None) -> TextIO | None:
    if name is None or (dist.is_initialized() and dist.get_rank() != 0):
        return None
    return sys.stdout if name == "-" else Path(name).open("w")


def _wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def _interface_bytes() -> int | None:
    """Bytes that have left this host of the lab; its interface carries nothing else than the training."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME")
    if "GOSSAMER_LAB" not in os.environ or interface == "lo":
        return None
    lines = Path("/proc/net/dev").read_text().splitlines()
    counts = next((line.split(":")[1] for line in lines if line.strip().startswith(f"{interface}:")), None)
    return int(counts.split()[8]) if counts else None
