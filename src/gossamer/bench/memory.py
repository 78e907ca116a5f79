"""Memory: what a method needs at its peak beyond the same training without communication.

A script of the lab; every rank trains with one method, and prints one JSON object:

    gossamer lab --hosts 4 -- -m gossamer.bench.memory --workload 'AlexNet(0.2)' --method ddp

Every training has processes of its own. It first trains a tiny model, which loads code and compiles kernels: what counts is
what grows with the model. Then the kernel's own mark of the most memory resident since (VmHWM), from before the workload's
model is made until after its last step, less that of ``compute``: model, gradients, optimizer and activations cancel out.
The C library is told to keep no freed memory.
"""

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from gossamer.bench.catalogue import find_workload
from gossamer.bench.peers import BASELINE
from gossamer.bench.rows import Record
from gossamer.bench.trained import make_method
from gossamer.bench.workload import Workload
from gossamer.errors import GossamerError

FIGURES = ("memory", "memory_noise")
"""What a row tells of a method: see :func:`beyond`."""

STEPS = 4
REPEATS = 2

LIMIT = 900.0
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
    """Have the C library return what is freed, all but small pieces: what it would keep differs from run to run."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MMAP_THRESHOLD, 1 << 16)


def in_turn(
    methods: Iterable[str], train: Callable[[list[str]], Sequence[Record]], workload: str, repeats: int = REPEATS
) -> list[dict[str, list[Peak]]]:
    """By rank, every method's peaks in ``repeats`` trainings; without methods that fail, of which it says so.

    ``train``: runs a command on all ranks, and gives what each has printed.
    """
    runs: dict[str, list[list[Peak]]] = {}
    for method in [*dict.fromkeys([BASELINE, *methods])] * repeats:
        try:
            found = train(["-m", "gossamer.bench.memory", "--workload", workload, "--method", method])
        except GossamerError as error:
            sys.stderr.write(f"the memory of {method} is not known: {str(error).strip().splitlines()[-1]}\n")
            continue
        runs.setdefault(method, []).append([Peak(**each) for each in found])
    whole = {method: own for method, own in runs.items() if len(own) == repeats}
    ranks = range(min((len(peaks) for own in whole.values() for peaks in own), default=0))
    return [{method: [peaks[rank] for peaks in own] for method, own in whole.items()} for rank in ranks]


def beyond(ranks: Sequence[dict[str, list[Peak]]]) -> dict[str, dict[str, float]]:
    """Every method's peak beyond ``compute``, in units of the gradients, on the rank where it is largest; and the noise.

    Of the methods that did not fail on some rank.

    ``memory_noise``: by how much repeats of the method, or of ``compute``, differ on some rank, in the same units.
    """
    measured = [method for method in (ranks[0] if ranks else ()) if all({method, BASELINE} <= found.keys() for found in ranks)]
    return {method: _beyond([(found[method], found[BASELINE]) for found in ranks]) for method in measured}


def _beyond(pairs: Sequence[tuple[list[Peak], list[Peak]]]) -> dict[str, float]:
    gradients = pairs[0][0][0].gradients
    more = [statistics.fmean(peak.nbytes for peak in own) - statistics.fmean(p.nbytes for p in base) for own, base in pairs]
    spreads = [max(p.nbytes for p in peaks) - min(p.nbytes for p in peaks) for pair in pairs for peaks in pair]
    return dict(zip(FIGURES, (max(more) / gradients, max(spreads) / gradients), strict=True))


def main() -> None:
    """Measure, and print from every rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file, or an emulated model such as 'AlexNet(2.0)'")
    parser.add_argument("--method", required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    peak = measure(find_workload(options.workload), options.method, options.steps)
    sys.stdout.write(json.dumps(asdict(peak)) + "\n")
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
