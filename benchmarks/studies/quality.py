"""Time to quality: how long ways to train take to a stated quality, in the lab, beside the first of them.

    python -m benchmarks.studies.quality --set quality-hooks
    python -m benchmarks.studies.quality --workload examples/01_gpt.py --target-after 300 --eval-every 25

The clock stands still during evaluations. What counts is when the median of five evaluations first reaches the target.
While it stands still, steps of the workload without communication are timed too, now and then in every run: with as many
steps as the first method takes, nothing can be faster than these. (``compute`` among the methods times them in a run of its
own, for runs that have none.) Every run is written down when it ends, and is not done again. A set of ``quality.toml`` is
measured by its name; without options, all of them.
"""

import argparse
import re
import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from benchmarks.studies.crossing import Points, smoothed
from benchmarks.studies.harness import RESULTS, parser_of
from benchmarks.studies.pictures import quality_over_time
from benchmarks.studies.quality_table import page, points, seconds_to, target_after
from benchmarks.studies.training import training_of
from gossamer.bench.cases import Case
from gossamer.bench.catalogue import digest, find_workload, is_of
from gossamer.bench.conditions import busy_machine, conditions, load
from gossamer.bench.in_lab import lab_json
from gossamer.bench.methods import parse_method
from gossamer.bench.peers import BASELINE
from gossamer.bench.plots import require_matplotlib
from gossamer.bench.rows import Record, Store
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.lab import LabError

ALONE_EVERY = 4
"""Evaluations of a run after which steps without communication are timed. They are timed beside each method, because a virtual
machine computes by a tenth faster or slower from one hour to the next."""

COMPUTE_SECONDS = 30.0
"""For how long the method that does not communicate is timed: it shows what is possible, and reaches nothing together."""

METHODS = (
    "ddp",
    "ddp-fp16",
    "ddp-powersgd",
    "post-localsgd",
    "Gossip()",
    "in_parts(8, Gossip())",
    "ScatterReduce()",
    "ChunkSparse()",
)

KEY = ("workload", "network", "hosts", "method", "seed", "eval_every")


class Runs(Store):
    """Training runs of a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, KEY)

    def of(self, key: Record) -> Record | None:
        """The run of this key, unless the workload's file was another one then."""
        of_file = digest(key["workload"])
        return next((row for row in self.rows if key.items() <= row.items() and is_of(row, of_file)), None)


def train(key: Record, seconds: float, until: float | None, told: Callable[[Record], None]) -> Record:
    """A run in the lab, as a row. Raises GossamerError if it fails."""
    command = ["-m", "benchmarks.studies.quality_run", "--workload", key["workload"], "--method", key["method"]]
    numbers = {"--seed": key["seed"], "--eval-every": key["eval_every"], "--seconds": seconds}
    numbers["--alone-every"] = 0 if key["method"] == BASELINE else ALONE_EVERY
    command += [str(part) for pair in numbers.items() for part in pair]
    command += [] if until is None else ["--until", repr(until)]
    spec, load_before = Case(key["workload"], key["network"], key["hosts"]).spec(), load()
    _, *found = lab_json(spec, command, told)
    evaluations = [(each["step"], each["seconds"], each["quality"]) for each in found if "quality" in each]
    alone = [each["alone"] for each in found if "alone" in each]
    measure = next(each["measure"] for each in found if "quality" in each)
    shared = {"measure": measure, "evaluations": evaluations, "when": round(time.time()), "digest": digest(key["workload"])}
    if alone:
        shared["alone"] = alone
    return key | shared | conditions([key["method"]], load_before, {"model and batches": key["seed"]})


class Study:
    """All runs of one workload: methods × seeds, with the target of every seed."""

    def __init__(self, options: argparse.Namespace, runs: Runs, console: Console) -> None:
        self._options, self._runs, self._console = options, runs, console
        self.targets: dict[int, float] = {}
        self.failed: dict[str, str] = {}
        """Why methods were not trained, by their names."""

    @property
    def rows(self) -> list[Record]:
        """The runs of this study that there are, by method."""
        keys = [self._key(method, seed) for method in self._options.methods for seed in range(self._options.seeds)]
        return [run for key in keys if (run := self._runs.of(key)) is not None]

    def train_all(self) -> None:
        """Train what is lacking, the first method of a seed before the others: it may set the target."""
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress:
            for line in busy_machine():
                progress.log(line)
            for seed in range(self._options.seeds):
                reference, *others = self._options.methods
                self.targets[seed] = self._target(self._train(reference, seed, progress))
                for method in others:
                    try:
                        self._train(method, seed, progress)
                    except LabError:  # no other method will run here either
                        raise
                    except GossamerError as error:  # a peer that is not installed, or does not run here
                        self.failed[method] = f"seed {seed}: {error}"
                        progress.log(f"{method}, {self.failed[method]}", markup=False)

    def _train(self, method: str, seed: int, progress: Progress) -> Record:
        """The run of a method, trained unless there is one that is long enough."""
        key, until = self._key(method, seed), self.targets.get(seed, self._options.target)
        limit = self._options.seconds if until is not None else self._options.target_after
        if method == BASELINE:
            limit, until = min(limit, COMPUTE_SECONDS), None
        run = self._runs.of(key)
        if run is not None and (run["evaluations"][-1][1] >= limit or (until is not None and _reached(run, until))):
            return run
        name = f"{method}, seed {seed}"
        bar = progress.add_task(f"{name}: starting", total=None)
        told = _Told(name, lambda text: progress.update(bar, description=text))
        run = train(key, limit, until, told)
        self._runs.add([run])
        progress.remove_task(bar)
        step, seconds, quality = run["evaluations"][-1]
        progress.log(f"{name}: {step} steps in {seconds:.1f} s, {run['measure']} {quality:.4f}", markup=False)
        return run

    def _target(self, run: Record) -> float:
        return float(target_after(run, self._options.target_after) if self._options.target is None else self._options.target)

    def _key(self, method: str, seed: int) -> Record:
        values = (
            str(self._options.workload),
            self._options.network,
            self._options.hosts,
            method,
            seed,
            self._options.eval_every,
        )
        return dict(zip(KEY, values, strict=True))


def _reached(run: Record, target: float) -> bool:
    return seconds_to(run, target) is not None


class _Told:
    """Makes one line of what a run tells: where it is, and how good it was when last evaluated."""

    def __init__(self, name: str, show: Callable[[str], None]) -> None:
        self._name, self._show, self._quality = name, show, ""

    def __call__(self, record: Record) -> None:
        if "quality" in record:
            self._quality = f", {record['measure']} {record['quality']:.4f}"
        if "seconds" in record:
            step = record.get("at", record.get("step"))
            self._show(f"{self._name}: step {step}, {record['seconds']:.0f} s{self._quality}")


def conclude(study: Study, options: argparse.Namespace) -> list[str]:
    """Save the table and the picture; the table's lines."""
    lines, name, measure = page(study.rows, study.targets), find_workload(options.workload).name, study.rows[0]["measure"]
    for method, why in study.failed.items():
        lines += ["", f"`{method}` was not trained with {' '.join(why.split())[-400:]}"]
    stem = f"{re.sub(r'[^A-Za-z0-9]+', '-', name).strip('-').lower()}-quality"
    options.save_to.mkdir(parents=True, exist_ok=True)
    (options.save_to / f"{stem}.md").write_text("\n".join(lines) + "\n")
    curves: dict[str, list[Points]] = {}
    for row in study.rows:
        if row["method"] == BASELINE:
            continue
        curves.setdefault(row["method"], []).append(smoothed(points(row)))
    title = f"{name}: {measure} over wall-clock training time"
    quality_over_time(
        options.save_to / f"{stem}.png", curves, title=title, measure=measure, target=statistics.median(study.targets.values())
    )
    return lines


SETS = Path(__file__).with_suffix(".toml")


def make_parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--set", help="a set of quality.toml")
    parser.add_argument("--workload", type=Path, help="a Python file with training_batches() and quality()")
    parser.add_argument("--network", default="200mbit", help="as in gossamer bench")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="the first one is the reference")
    parser.add_argument("--seeds", type=int, default=5)
    goal = parser.add_mutually_exclusive_group()
    goal.add_argument("--target", type=float, help="an accuracy to reach, or a loss, whichever the workload's quality is")
    goal.add_argument("--target-after", type=float, metavar="SECONDS", help="what the first method reaches in so many seconds")
    parser.add_argument("--seconds", type=float, default=1800.0, help="after which a run ends, target or not")
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--save-to", type=Path, default=Path("out/quality"))
    return parser


def sets(path: Path = SETS) -> dict[str, list[argparse.Namespace]]:
    """The options of every run of every set of a file."""
    usual = vars(make_parser().parse_args([]))
    return {
        name: [
            argparse.Namespace(**usual | told | {"workload": Path(told["workload"]), "save_to": RESULTS / name})
            for told in runs
        ]
        for name, runs in tomllib.loads(path.read_text()).items()
    }


def asked_for(options: argparse.Namespace) -> list[argparse.Namespace]:
    """What a command line asks for. Raises ConfigurationError for a set that does not exist, or a run without a goal."""
    if options.workload is None:
        known = sets()
        if options.set not in (None, *known):
            raise ConfigurationError(f"there is no set {options.set!r}; there are {', '.join(known)}")
        return [each for name, runs in known.items() if options.set in (None, name) for each in runs]
    if options.target is None and options.target_after is None:
        raise ConfigurationError("say what is to be reached: --target or --target-after")
    return [options]


def fetch_data(workload: Workload, hosts: int) -> None:
    """Have the workload load its data here, once: what it may have to download cannot be reached from emulated hosts."""
    training_batches, _ = training_of(workload)
    next(iter(training_batches(0, hosts, 0)))


def train_and_write(options: argparse.Namespace, console: Console) -> Study:
    """Train what is lacking of one study, and write and show its table."""
    study = Study(options, Runs(options.save_to / "quality.jsonl"), console)
    require_matplotlib()
    workload = find_workload(options.workload)
    for method in options.methods:
        parse_method(method)
    if options.methods[0] == BASELINE:
        raise ConfigurationError(f"{BASELINE} reaches nothing that others could be measured by: name another method first")
    fetch_data(workload, options.hosts)
    study.train_all()
    console.print("\n".join(conclude(study, options)), markup=False, highlight=False, soft_wrap=True)
    return study


def main(arguments: Sequence[str] | None = None) -> int:
    """Train what is lacking, and show the tables; the exit code: 1 if a method was not trained."""
    options, console = make_parser().parse_args(arguments), Console()
    try:
        studies = [train_and_write(each, console) for each in asked_for(options)]
    except GossamerError as error:
        Console(stderr=True).print(f"time to quality: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 1 if any(study.failed for study in studies) else 0


if __name__ == "__main__":
    sys.exit(main())
