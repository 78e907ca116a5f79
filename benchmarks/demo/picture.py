"""Picture: validation losses over wall-clock time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gossamer.bench.plots import COLOURS, require_matplotlib


@dataclass(frozen=True)
class Curve:
    """Losses over seconds, and the name that stands at the curve's end."""

    name: str
    seconds: Sequence[float]
    losses: Sequence[float]


@dataclass(frozen=True)
class Sooner:
    """A loss that two curves reach: the first at ``late`` seconds, the second at ``early``."""

    loss: float
    early: float
    late: float


def loss_over_time(
    path: Path, curves: Sequence[Curve], *, title: str, subtitle: str, footer: str, until: float, sooner: Sooner | None
) -> None:
    """Draw validation losses over wall-clock training time up to ``until`` seconds, and save them as ``path``."""
    pyplot = require_matplotlib()
    figure, axes = pyplot.subplots(figsize=(8.6, 4.8), dpi=160, layout="constrained")
    for curve, colour in zip(curves, COLOURS, strict=False):
        axes.plot(curve.seconds, curve.losses, color=colour, linewidth=2.2, marker="o", markersize=3.5, clip_on=False)
        axes.annotate(
            f"{curve.name}\n{curve.losses[-1]:.2f}", (curve.seconds[-1], curve.losses[-1]), (8, 0),
            textcoords="offset points", color=colour, va="center", fontsize=10, fontweight="bold", annotation_clip=False,
        )  # fmt: skip
    if sooner is not None:
        _mark_sooner(axes, sooner)
    _dress(axes, until)
    axes.set_title(title, loc="left", fontsize=14, fontweight="bold", pad=24)
    above = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(subtitle, (0, 1), (0, 9), **above, fontsize=9.5, color="#555555")
    axes.annotate(footer, (0, 0), (0, -48), **above, fontsize=7.5, color="#777777", annotation_clip=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    pyplot.close(figure)


def _mark_sooner(axes: Any, sooner: Sooner) -> None:
    """An arrow between the moments at which both curves are at the same loss."""
    line = {"arrowstyle": "<->", "color": "#444444", "linewidth": 1.1, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (sooner.early, sooner.loss), (sooner.late, sooner.loss), arrowprops=line)
    text = f"the same loss {sooner.late / sooner.early:.1f} times sooner"
    # Below its right end: to the right of the earlier curve, and under the later one.
    place = {"textcoords": "offset points", "ha": "right", "va": "top"}
    axes.annotate(text, (sooner.late, sooner.loss), (-4, -5), **place, fontsize=9.5, color="#333333")


def _dress(axes: Any, until: float) -> None:
    axes.set_xlim(0, until)
    axes.set_xlabel("wall-clock training time in seconds (evaluation not counted)", loc="left")
    axes.set_ylabel("validation loss in nats per byte")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
