"""Pictures of measurements."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.bench.peers import BASELINE
from gossamer.errors import ConfigurationError

COLOURS = ("#8a8f98", "#0b7a75", "#d1603d", "#5b5ea6")
"""Grey for what is there already, colours for ours; apart from each other for the colour-blind too."""

_MARKERS = "osD^v<>Ph"
"""Nine beside ten colours: the first 90 pairs all differ."""

_BOUND = "#e0a100"


def require_matplotlib() -> Any:
    """matplotlib's pyplot, drawing into files only; ConfigurationError if it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ConfigurationError("pictures need matplotlib: pip install '.[bench]' where gossamer's sources are") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


@dataclass(frozen=True)
class Panel:
    """Step times over the number of hosts, ``seconds[method][hosts]``, and where they are known their bounds."""

    title: str
    seconds: dict[str, dict[int, float]]
    bounds: dict[str, dict[int, float]] = field(default_factory=dict)


def times_over_hosts(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Draw seconds per step over the number of hosts, one panel beside the other, and save them as ``path``."""
    pyplot = require_matplotlib()
    width = 4.2 * len(panels) + 1.4
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(width, 4.8), dpi=160, layout="constrained", sharey=True, squeeze=False
    )
    looks, lines = looks_of(method for panel in panels for method in panel.seconds), {}
    for axis, panel in zip(axes[0], panels, strict=True):
        for method, seconds in panel.seconds.items():
            hosts = sorted(seconds)
            drawn = axis.plot(hosts, [seconds[n] for n in hosts], **looks[method], linewidth=2.0, markersize=5, label=method)
            lines[method] = drawn[0]
        for method, bounds in panel.bounds.items():
            hosts = sorted(bounds)
            under = axis.plot(hosts, [bounds[n] for n in hosts], color=looks[method]["color"], linestyle=":", linewidth=1.2)
            lines["(dotted: the bound of each)"] = under[0]
        dress_doubling(axis, panel.seconds.values(), "hosts", panel.title)
    axes[0][0].set_ylabel("seconds per step")
    axes[0][0].set_ylim(bottom=0)
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=min(3, len(panels) + 1), frameon=False, fontsize=9)
    finish(figure, path, title)


def looks_of(methods: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and line of each method: computing alone is black and dashed, the others all differ (up to 90 of them)."""
    colours = require_matplotlib().get_cmap("tab10").colors
    looks: dict[str, dict[str, Any]] = {BASELINE: {"color": "black", "marker": "o", "linestyle": "--"}}
    for index, method in enumerate(method for method in dict.fromkeys(methods) if method != BASELINE):
        looks[method] = {"color": colours[index % 10], "marker": _MARKERS[index % len(_MARKERS)], "linestyle": "-"}
    return looks


@dataclass(frozen=True)
class Bars:
    """Seconds per step of several methods, their bounds where there are any, and which of them are gossamer's."""

    title: str
    seconds: dict[str, float]
    bounds: dict[str, float]
    ours: Set[str]

    def colour(self, method: str) -> str:
        """Black, grey or green: computing alone, without gossamer, with it."""
        return "#222222" if method == BASELINE else COLOURS[method in self.ours]


def times_by_method(path: Path, panels: Sequence[Bars], *, title: str) -> None:
    """Draw a horizontal bar of seconds per step for every method, its bound as a line across it; save them as ``path``."""
    pyplot = require_matplotlib()
    columns = min(3, len(panels))
    rows, most = -(-len(panels) // columns), max(len(panel.seconds) for panel in panels)
    size = (5.4 * columns, rows * (0.3 * most + 1.0) + 0.9)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, dpi=100, layout="constrained", squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw_bars(axis, panel)
    shown = [pyplot.Rectangle((0, 0), 1, 1, color=COLOURS[ours]) for ours in (True, False)]
    shown.append(pyplot.Line2D([], [], color=_BOUND, marker="|", markersize=11, markeredgewidth=2.0, linestyle=""))
    names = ["gossamer", "without it", "the least that the step could take"]
    figure.legend(shown, names, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    finish(figure, path, title)


def _draw_bars(axis: Any, panel: Bars) -> None:
    methods, seconds = list(panel.seconds), list(panel.seconds.values())
    bars = axis.barh(methods, seconds, color=[panel.colour(method) for method in methods], height=0.68)
    axis.bar_label(bars, [f"{1e3 * each:.0f} ms" for each in seconds], padding=5, fontsize=8)
    bounded = [method for method in methods if method in panel.bounds]
    bounds = [panel.bounds[method] for method in bounded]
    axis.scatter(bounds, bounded, marker="|", s=210, color=_BOUND, linewidth=2.0, zorder=3)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.18 * max(seconds))
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(panel.title, loc="left", fontsize=11)
    axis.set_xlabel("seconds per step")
    axis.grid(axis="x", color="#e4e6ea")
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)


def finish(figure: Any, path: Path, title: str) -> None:
    """Give the whole figure its title, and save it."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    require_matplotlib().close(figure)


def dress_doubling(axis: Any, curves: Iterable[Mapping[int, float]], counted: str, title: str) -> None:
    """An axis of numbers that double, with a tick for each that some curve has."""
    ticks = sorted({number for curve in curves for number in curve})
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, [str(n) for n in ticks])
    axis.set_title(title, loc="left", fontsize=11)
    axis.set_xlabel(counted)
    axis.grid(axis="y", color="#e4e6ea")
    axis.spines[["top", "right"]].set_visible(False)
