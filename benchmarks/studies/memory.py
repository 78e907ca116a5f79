"""Memory: what a method needs at its peak beyond the same training without communication, in units of the gradients.

The figures are added to the rows of the suites that ask for them. Every training has processes of its own. It first trains
a tiny model, which loads code and compiles kernels: what counts is what grows with the model. Then the kernel's own mark of
the most memory resident since (VmHWM), from before the workload's model is made until after its last step, less that of
``compute``: model, gradients, optimizer and activations cancel out. The C library is told to keep no freed memory.
"""

import argparse
import ctypes
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.studies.harness import AS_RANK, RESULTS, as_rank, console, parser_of
from gossamer.bench.cases import Case, cases, is_measured
from gossamer.bench.catalogue import find_workload
from gossamer.bench.in_lab import lab_json
from gossamer.bench.peers import BASELINE
from gossamer.bench.ranks import of_all
from gossamer.bench.results import Results
from gossamer.bench.rows import Record
from gossamer.bench.suites import Run, suites
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
            found = train(["-m", "benchmarks.studies.memory", AS_RANK, "--workload", workload, "--method", method])
        except GossamerError as error:
            sys.stderr.write(f"the memory of {method} is not known: {str(error).strip().splitlines()[-1]}\n")
            continue
        runs.setdefault(method, []).append(
            [Peak(each["nbytes"], each["gradients"]) for each in sorted(found, key=lambda each: each["rank"])]
        )
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


def weigh(case: Case, methods: Iterable[str]) -> dict[str, dict[str, float]]:
    """The figures of every method in a case. On an unshaped network: memory does not depend on the rate."""
    spec = replace(replace(case, network="unshaped").spec(), timeout=LIMIT)
    return beyond(in_turn(methods, partial(lab_json, spec), case.workload))


def add_to(results: Results, run: Run) -> None:
    """Weigh what has been timed of a run and has no figures yet."""
    for case in cases(run.workloads, run.networks, run.hosts):
        there = {method: row for method, row in results.there(case, run.turns).items() if FIGURES[0] not in row}
        if there:
            console.log(f"{case}: memory of {len(there)} methods")
            found = weigh(case, there)
            results.add([row | found[method] for method, row in there.items() if method in found and is_measured(row)])


def on_rank(workload: str, method: str) -> Iterator[Record]:
    """The peaks of all ranks."""
    own = asdict(measure(find_workload(workload), method, STEPS))
    yield from ({"rank": rank} | each for rank, each in enumerate(of_all(own)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Add figures to the rows of every suite that asks for them; as a rank of the lab, print the peaks."""
    parser = parser_of(__doc__)
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    parser.add_argument("--method", help=argparse.SUPPRESS)
    if AS_RANK in sys.argv:
        parser.add_argument(AS_RANK, action="store_true")
        options = parser.parse_args()
        as_rank(partial(on_rank, options.workload, options.method))
        return
    parser.parse_args(arguments)
    try:
        for name, suite in suites().items():
            for run in suite.runs:
                if run.memory:
                    add_to(Results(RESULTS / name / "results.jsonl"), run)
    except GossamerError as error:
        raise SystemExit(f"memory: {error}") from None


if __name__ == "__main__":
    main()
