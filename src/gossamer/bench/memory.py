"""Memory: what each method needs at its peak beyond the same training without communication, one method at a time.

A script of the lab; every rank prints one JSON object:

    gossamer lab --hosts 4 -- -m gossamer.bench.memory --workload 'AlexNet(0.2)' --methods ddp 'AllReduce()'

Every rank forks a process for each method in turn, so that methods do not share memory. It first trains a tiny model, which
loads code and compiles kernels: what counts is what grows with the model. Then the kernel's own mark of the most memory
resident since (VmHWM), from before the workload's model is made until after its last step, less that of the method
``compute``: model, gradients, optimizer and activations cancel out. The C library is told to keep no freed memory.
"""

import argparse
import ctypes
import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gossamer.bench.catalogue import find_workload
from gossamer.bench.peers import BASELINE
from gossamer.bench.trained import make_method
from gossamer.bench.workload import Workload
from gossamer.errors import GossamerError

FIGURES = ("memory", "memory_noise")
"""What a row tells of a method: see :func:`beyond`."""

STEPS = 4
REPEATS = 2

_PATIENCE = timedelta(minutes=2)

_LIMIT = 900.0
"""Seconds that one training may take: what hangs is no collective, which would end, but for example a deadlock of threads."""

_MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD of glibc's malloc.h

_TINY = Workload(
    "tiny",
    build_model=lambda: nn.Linear(256, 256),
    build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    random_batch=lambda generator: (torch.rand(1, 256, generator=generator), torch.zeros(1, 256)),
    loss=lambda outputs, targets: (outputs - targets).square().sum(),
)


@dataclass(frozen=True, slots=True)
class Peak:
    """Bytes at the peak of a training, and of its model's gradients."""

    nbytes: int
    gradients: int


def measure(workload: Workload, method: str, steps: int) -> Peak:
    """The peak of this process, which trains nothing else. Collective: the process group exists."""
    _keep_nothing()
    _train(_TINY, method, steps)
    _give_back()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak from now on
    return Peak(_train(workload, method, steps) - before, sum(p.nbytes for p in workload.build_model().parameters()))


def _train(workload: Workload, method: str, steps: int) -> int:
    """Train a few steps; the process's peak, in bytes, before anything is freed."""
    trained = make_method(workload, method, dist.get_rank())
    with trained.joined.turn():
        for _ in range(trained.timed(steps)):
            trained.step()
        if trained.joined.replica is not None:
            trained.joined.replica.wait_for_exchanges()
        dist.barrier()
        peak = _status("VmHWM")
    trained.joined.close()
    return peak


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def _give_back() -> None:
    """Let the C library return what it holds free; otherwise the workload would find it there."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _keep_nothing() -> None:
    """Have the C library return what is freed at once, all but small pieces: what it would keep differs from run to run."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, 1 << 16)


def in_turn(workload: str, methods: Iterable[str], steps: int = STEPS, repeats: int = REPEATS) -> dict[str, list[Peak]]:
    """Every method's peaks on this rank, of ``repeats`` trainings, each in a forked process; without methods that fail.

    All of them meet at one store, at ``MASTER_PORT``: of no other port is it known that nobody uses it.

    To be called before this process uses torch for anything: what has threads cannot be forked. So ``workload``, the name of
    one, is loaded by the forked processes only: its file may compute something.
    """
    turns = [method for _ in range(repeats) for method in methods]
    found: dict[str, list[Peak]] = {}
    with _store_served():
        for index, method in enumerate(turns):
            peak = _forked(workload, method, steps, str(index))
            if peak is not None:
                found.setdefault(method, []).append(peak)
    return {method: peaks for method, peaks in found.items() if len(peaks) == repeats}


@contextmanager
def _store_served() -> Iterator[None]:
    """On rank 0, a process with the store that all ranks' processes meet at; unless torchrun's agent has one there."""
    if os.environ["RANK"] != "0" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield
        return
    end, held = os.pipe()
    there, told = os.pipe()
    server = os.fork()
    if server == 0:
        os.close(held)
        os.close(there)
        os._exit(_serve(end, told))
    os.close(end)
    os.close(told)
    try:
        with os.fdopen(there, "rb") as answer:
            if not answer.read():
                raise GossamerError(f"the store that all ranks meet at cannot be served at port {os.environ['MASTER_PORT']}")
        yield
    finally:
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        os.close(held)


def _serve(end: int, told: int) -> int:
    """Serve the store, and say so, until the other end of the pipe ``end`` closes: its process has died."""
    try:
        store = _store(is_master=True)
        os.write(told, b"there")
        os.close(told)
        os.read(end, 1)
        del store
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _store(is_master: bool = False) -> TCPStore:
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=is_master, timeout=_PATIENCE, wait_for_workers=False)


def _forked(workload: str, method: str, steps: int, name: str) -> Peak | None:
    """The peak of a process of its own, in a process group of this name; None if it failed, and said why."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os._exit(_child(workload, method, steps, name, writer))
    well = _ended(child, f"the training with {method}", _LIMIT)
    os.close(writer)
    os.set_blocking(reader, False)  # processes that a peer has left behind may hold the other end
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        said = pipe.read()
    return Peak(**json.loads(said)) if well and said else None


def _ended(child: int, what: str, seconds: float) -> bool:
    """Whether a process ended well; one that has not ended after so many seconds is killed."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    sys.stderr.write(f"{what} was killed: it had not ended after {seconds:g} s\n")
    return False


def _child(workload: str, method: str, steps: int, name: str, writer: int) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = PrefixStore(name, _store())
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_PATIENCE)
        peak = measure(find_workload(workload), method, steps)
        os.write(writer, json.dumps({"nbytes": peak.nbytes, "gradients": peak.gradients}).encode())
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def beyond(ranks: Sequence[dict[str, list[Peak]]]) -> dict[str, dict[str, float]]:
    """Every method's peak beyond ``compute``, in units of the gradients, on the rank where it is largest; and the noise.

    Of the methods that did not fail on some rank.

    ``memory_noise``: by how much repeats of the method, or of ``compute``, differ on some rank, in the same units.
    """
    measured = [method for method in ranks[0] if all({method, BASELINE} <= found.keys() for found in ranks)]
    return {method: _beyond([(found[method], found[BASELINE]) for found in ranks]) for method in measured}


def _beyond(pairs: Sequence[tuple[list[Peak], list[Peak]]]) -> dict[str, float]:
    gradients = pairs[0][0][0].gradients
    more = [statistics.fmean(peak.nbytes for peak in own) - statistics.fmean(p.nbytes for p in base) for own, base in pairs]
    spreads = [max(p.nbytes for p in peaks) - min(p.nbytes for p in peaks) for pair in pairs for peaks in pair]
    return dict(zip(FIGURES, (max(more) / gradients, max(spreads) / gradients), strict=True))


def read(records: Iterable[dict[str, Any]]) -> list[dict[str, list[Peak]]]:
    """What :func:`main` printed on every rank."""
    return [{method: [Peak(*each) for each in peaks] for method, peaks in found["peaks"].items()} for found in records]


def main() -> None:
    """Measure, and print from every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file, or an emulated model such as 'AlexNet(2.0)'")
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    methods = dict.fromkeys([BASELINE, *options.methods])
    found = in_turn(options.workload, methods, options.steps, options.repeats)
    peaks = {method: [(peak.nbytes, peak.gradients) for peak in each] for method, each in found.items()}
    sys.stdout.write(json.dumps({"peaks": peaks}) + "\n")


if __name__ == "__main__":
    main()
