"""Pictures of a prediction: speed-up over the number of workers, and the step time over the rate of the links."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gossamer.bench.plots import dress_doubling, finish, looks_of, require_matplotlib
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.profile import Compute
from gossamer.simulate.report import Row, Way, price_of
from gossamer.simulate.task import Task

RATES = 9
"""Rates of the second picture: from a hundredth of the cluster's to a hundred times it."""


def draw(folder: Path, task: Task, ways: Sequence[Way], cluster: Cluster, compute: Compute, found: Sequence[Row]) -> list[Path]:
    """Draw both into ``folder``; the second one for ``cluster``."""
    paths = [folder / "speedup.png", folder / "bandwidth.png"]
    draw_speedup(paths[0], found, f"{task.name} on {cluster.name}")
    draw_bandwidth(paths[1], task, ways, cluster, compute)
    return paths


def draw_speedup(path: Path, found: Sequence[Row], title: str) -> None:
    """How many times as many samples per second as one device alone has, over the number of workers."""
    pyplot = require_matplotlib()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.8), dpi=130, layout="constrained")
    looks = looks_of(row.method for row in found)
    curves = {name: {r.workers: r.workers * r.efficiency for r in found if r.method == name} for name in looks}
    curves = {name: curve for name, curve in curves.items() if curve}
    workers = sorted({row.workers for row in found})
    axis.plot(workers, workers, color="#c4c8ce", linestyle="--", label="as many as workers")
    for name, curve in curves.items():
        axis.plot(list(curve), list(curve.values()), **looks[name], linewidth=2.0, markersize=5, label=name)
    dress_doubling(axis, curves.values(), "workers", "")
    axis.set_yscale("log", base=2)
    axis.set_ylabel("times the speed of one device")
    axis.legend(frameon=False, fontsize=8)
    finish(figure, path, title)


def draw_bandwidth(path: Path, task: Task, ways: Sequence[Way], cluster: Cluster, compute: Compute) -> None:
    """Milliseconds of a step over the rate of the machines' links, all else as it is."""
    pyplot = require_matplotlib()
    figure, axis = pyplot.subplots(figsize=(6.4, 4.8), dpi=130, layout="constrained")
    looks = looks_of(way.name for way in ways)
    usual = cluster.between.bandwidth if math.isfinite(cluster.between.bandwidth) else 1e11
    rates = [usual * 10 ** (4 * step / (RATES - 1) - 2) for step in range(RATES)]
    for way in ways:
        price = price_of(task, way, compute)
        at = [price(replace(cluster, between=replace(cluster.between, bandwidth=rate))).step_seconds for rate in rates]
        axis.plot([rate / 1e9 for rate in rates], [1e3 * each for each in at], **looks[way.name], linewidth=2.0, label=way.name)
    axis.axvline(usual / 1e9, color="#c4c8ce", linestyle=":")
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("rate of a machine's link, Gbit/s (dotted: the cluster's)")
    axis.set_ylabel("ms per step")
    axis.grid(axis="y", color="#e4e6ea")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    finish(figure, path, f"{task.name} on {cluster.name}, {cluster.world} workers")
