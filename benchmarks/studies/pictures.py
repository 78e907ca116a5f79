"""Pictures of studies."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gossamer.bench.plots import dress_doubling, finish, looks_of, require_matplotlib


@dataclass(frozen=True)
class Measured:
    """Values over the number of workers, and what was predicted for them."""

    measured: dict[int, float]
    predicted: dict[int, float]


def over_workers(path: Path, shown: dict[str, dict[str, Measured]], *, title: str) -> None:
    """Draw each of ``shown`` (by what it is, and by method) over the number of workers, predictions dotted."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.6), dpi=160, layout="constrained", squeeze=False)
    names = list(dict.fromkeys(method for methods in shown.values() for method in methods))
    looks = looks_of(names)
    for axis, (name, methods) in zip(axes.flat, shown.items(), strict=False):
        for method, curve in methods.items():
            workers = sorted(curve.measured)
            axis.plot(workers, [curve.measured[n] for n in workers], linewidth=1.8, markersize=4, label=method, **looks[method])
            workers = sorted(curve.predicted)
            dotted = looks[method] | {"linestyle": ":", "marker": "x"}
            axis.plot(workers, [curve.predicted[n] for n in workers], linewidth=1.8, markersize=6, **dotted)
        dress_doubling(axis, [curve.measured for curve in methods.values()], "workers", name)
        axis.set_ylim(bottom=0)
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    finish(figure, path, f"{title} (dotted: predicted)")


def quality_over_time(
    path: Path, curves: dict[str, list[Sequence[tuple[float, float]]]], *, title: str, measure: str, target: float
) -> None:
    """Draw qualities over seconds of training, a thin line for each run of a method, and the target."""
    pyplot = require_matplotlib()
    figure, axis = pyplot.subplots(figsize=(8.6, 4.8), dpi=160, layout="constrained")
    colours = pyplot.get_cmap("tab10").colors
    for index, (method, runs) in enumerate(curves.items()):
        for number, run in enumerate(runs):
            label = method if number == 0 else None
            style = {"color": colours[index % 10], "linewidth": 1.2, "marker": "o", "markersize": 2.5}
            axis.plot([x for x, _ in run], [y for _, y in run], label=label, **style)
    axis.axhline(target, color="black", linestyle=":", linewidth=1.0, label=f"target {target:.4g}")
    axis.set_xlim(left=0)
    axis.set_title(title, loc="left", fontsize=12, fontweight="bold")
    axis.set_xlabel("seconds of training, evaluation not counted", loc="left")
    axis.set_ylabel(f"{measure}, median of five evaluations")
    axis.grid(axis="y", color="#e4e6ea")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def loss_over_bytes(
    path: Path, panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], *, title: str, below: str
) -> None:
    """Draw each method at its mean number of bytes (logarithmic) and loss, ``panels[title][method]`` one pair for each seed,
    with a bar from the least loss to the largest where there are several."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(1, len(panels), figsize=(12.5, 5.2), dpi=130, layout="constrained", squeeze=False)
    looks = looks_of(dict.fromkeys(method for shown in panels.values() for method in shown))
    handles: dict[str, Any] = {}
    for axis, (name, shown) in zip(axes.flat, panels.items(), strict=True):
        for method, runs in shown.items():
            sent, losses = fmean(x for x, _ in runs), [y for _, y in runs]
            spread = [[fmean(losses) - min(losses)], [max(losses) - fmean(losses)]]
            style = looks[method] | {"linestyle": ""}
            handles.setdefault(
                method, axis.errorbar([sent], [fmean(losses)], yerr=spread, capsize=3, markersize=7, label=method, **style)
            )
        least, most = (of(len(runs) for runs in shown.values()) for of in (min, max))
        counted = f"{least} to {most} seeds" if least < most else f"{most} seed{'s' * (most > 1)}"
        axis.set_title(f"{name},\n{counted}", loc="left", fontsize=9.5)
        axis.set_xscale("log")
        axis.set_xlabel(below, loc="left")
        axis.grid(color="#e4e6ea")
        axis.spines[["top", "right"]].set_visible(False)
    axes.flat[0].set_ylabel("validation loss, nats per byte")
    figure.legend(handles.values(), handles, loc="outside right upper", frameon=False, fontsize=8.5)
    finish(figure, path, title)
