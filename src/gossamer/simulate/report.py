"""Report: methods beside each other on a cluster, and what limits each of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gossamer.algorithms.base import Algorithm
from gossamer.simulate.cluster import Cluster, Processor, Stragglers
from gossamer.simulate.prediction import StepTime, step_time
from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.run import MakeOptimizer
from gossamer.simulate.task import Task
from gossamer.simulate.trace import Spans, collecting

BASELINE = "ddp"
"""What the others are compared with: an exact all-reduce in buckets of 25 MiB, as DDP has them."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One method, as it is written, and what it consists of. ``optimizer``: where it has another one than the task."""

    name: str
    algorithm: Algorithm | None
    optimizer: MakeOptimizer | None = None
    overlap_forward: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on a cluster of so many machines.

    ``limits``: the seconds of a step by what they are spent on; they add up to ``step_seconds``. ``to_ddp``: the step time
    relative to that of DDP; ``efficiency``: the time of computing alone relative to the step.
    """

    method: str
    machines: int
    workers: int
    step_seconds: float
    to_ddp: float
    efficiency: float
    samples_per_second: float
    bytes_per_step: float
    messages_per_step: float
    limits: dict[str, float]

    @property
    def limit(self) -> str:
        """What most of the time goes to that is not computing; "compute" where that is below a hundredth of the step."""
        beside = {name: seconds for name, seconds in self.limits.items() if name != "compute"}
        most = max(beside, key=lambda name: beside[name])
        return most if beside[most] > 0.01 * self.step_seconds else "compute"


STEPS, STEPS_WITH_PAUSES = 200, 1000
"""Of how many steps unequal workers are drawn unless the cluster says. With a jitter of 5 %, two hundred give the step time to
about 0.2 %; pauses are rare."""


def sampled(cluster: Cluster) -> Cluster:
    """The cluster with that number of steps to draw."""
    stragglers = cluster.stragglers
    if stragglers.none or stragglers.steps is not None:
        return cluster
    return replace(cluster, stragglers=replace(stragglers, steps=STEPS if stragglers.pauses is None else STEPS_WITH_PAUSES))


Price = Callable[[Cluster], StepTime]


def price_of(task: Task, way: Way, compute: Compute) -> Price:
    """Called with a cluster: what a step takes there."""

    def price(cluster: Cluster) -> StepTime:
        return step_time(
            task.model, way.algorithm, cluster=cluster, compute=compute, optimizer=way.optimizer or task.optimizer,
            overlap_forward=way.overlap_forward,
        )  # fmt: skip

    return price


# -- what limits a step -------------------------------------------------------------------------------------------------


def _with_links(cluster: Cluster, change: Callable[[Link], Link]) -> Cluster:
    inside, across = (link and change(link) for link in (cluster.inside, cluster.across))
    return replace(cluster, between=change(cluster.between), inside=inside, across=across)


_WITHOUT: dict[str, Callable[[Cluster], Cluster]] = {
    "rounds": lambda cluster: _with_links(cluster, lambda link: replace(link, latency=0.0)),
    "codec": lambda cluster: replace(cluster, processor=Processor()),
    "wire": lambda cluster: _with_links(cluster, lambda _: Link()),
}
"""By what is slow: the cluster on which it is not."""


def limits_of(price: Price, cluster: Cluster, found: StepTime) -> dict[str, float]:
    """Seconds of a step by what they are spent on; they add up to the step.

    One cause after the other is taken away: unequal workers, latencies, codecs, finite rates. What a step gains by that is
    its part; what is left is computing. Where two causes hide behind each other, the part is counted where the last one goes.
    """
    left = found.step_seconds - found.straggler_seconds
    parts = {"stragglers": found.straggler_seconds}
    cluster = replace(cluster, stragglers=Stragglers(), own={})
    for name, without in _WITHOUT.items():
        simpler = without(cluster)
        seconds = left if simpler == cluster else price(simpler).step_seconds
        parts[name], left, cluster = left - seconds, seconds, simpler
    return parts | {"compute": left}


def spans_of(price: Price, cluster: Cluster) -> Spans:
    """What one worker does in each step, where all are equal."""
    with collecting() as spans:
        price(replace(cluster, stragglers=Stragglers(), own={}))
    return spans


def rows(task: Task, ways: Sequence[Way], clusters: Sequence[Cluster], compute: Compute) -> Iterator[Row]:
    """All methods on one cluster after the other; ``ways`` begin with the baseline."""
    for cluster in clusters:
        usual = math.nan
        for number, way in enumerate(ways):
            price = price_of(task, way, compute)
            found = price(cluster)
            usual = found.step_seconds if number == 0 else usual
            yield _row(task, way, cluster, found, usual, limits_of(price, cluster, found), compute)


def _row(
    task: Task, way: Way, cluster: Cluster, found: StepTime, usual: float, limits: dict[str, float], compute: Compute
) -> Row:
    alone = compute.seconds / cluster.machines.speed
    return Row(
        method=way.name,
        machines=cluster.machines.count,
        workers=cluster.world,
        step_seconds=found.step_seconds,
        to_ddp=found.step_seconds / usual,
        efficiency=alone / found.step_seconds,
        samples_per_second=cluster.world * task.batch / found.step_seconds,
        bytes_per_step=found.bytes_per_step,
        messages_per_step=found.messages_per_step,
        limits=limits,
    )


# -- as text ------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "machines",
    "method",
    "step, ms",
    "to DDP",
    "efficiency",
    "compute",
    "wire",
    "rounds",
    "codec",
    "stragglers",
    "limit",
)


def cells(row: Row) -> list[str]:
    """A row as text, in the order of ``COLUMNS``; what it is spent on in milliseconds."""
    spent = [_milliseconds(row.limits[name]) for name in COLUMNS[5:10]]
    figures = [_milliseconds(row.step_seconds), f"{row.to_ddp:.2f}", f"{100 * row.efficiency:.0f} %"]
    return [str(row.machines), row.method, *figures, *spent, row.limit]


def _milliseconds(seconds: float) -> str:
    value = 1e3 * seconds
    return "" if abs(value) < 0.05 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def record(task: Task, cluster: Cluster, compute: Compute, found: Sequence[Row], inputs: dict[str, Any]) -> dict[str, Any]:
    """Everything that went in, and came out, for JSON: what is infinite is None."""
    model = {
        "name": task.name,
        "parameters": task.parameters,
        "gradient_bytes": task.gradient_bytes,
        "batch_per_device": task.batch,
        "samples": task.samples,
        "operations_per_step": task.counted.total,
        "memory_bytes": task.memory(),
    }
    step = {name: getattr(compute, name) for name in ("forward", "backward", "optimizer")}
    whole = {"inputs": inputs, "model": model, "compute_seconds": step, "cluster": asdict(cluster)}
    finite: dict[str, Any] = _finite(whole | {"rows": [asdict(row) | {"limit": row.limit} for row in found]})
    return finite


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
