"""Topology page: draws every topology and how it mixes, and writes the table of docs/topologies.md."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.pages import insert
from gossamer.bench.plots import COLOURS, require_matplotlib
from gossamer.comm.mixing import messages, slowest_spread, spectral_gap, typical_disagreement
from gossamer.comm.topology import FAMILY, Hypercube, RandomMatching, Topology, rotated

NAMES = (
    "dissemination",
    "one-peer exponential",
    "hypercube",
    "ring, both neighbours",
    "ring, directed",
    "random matching",
    "shift-one",
    "complete",
)
"""What the pictures call the members of ``FAMILY``."""

_DRAWN, _STEPS = 8, 24
_LINES = (*COLOURS[1:], COLOURS[0], "#c2a83e", "#a03b6f", "#4a90d9", "#222222")
_EXACT, _LOWEST = 1e-9, 1e-6


def main() -> None:
    """Draw both pictures and put the table between its markers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=Path("docs/topologies.md"))
    options = parser.parse_args()
    assets = options.page.parent / "assets"
    assets.mkdir(parents=True, exist_ok=True)
    draw_patterns(assets / "topologies.png")
    draw_mixing(assets / "mixing.png", (16, 12))
    options.page.write_text(insert(options.page.read_text(), "topologies", table((16, 12))))


def serves(topology: Topology, world: int) -> bool:
    """Whether a topology takes so many ranks."""
    return not isinstance(topology, Hypercube) or world & (world - 1) == 0


def draw_patterns(path: Path) -> None:
    """One small picture per topology: 8 ranks on a circle, an arrow per message, a colour per step (at most three)."""
    pyplot = require_matplotlib()
    figure, grid = pyplot.subplots(2, 4, figsize=(11, 6.2), dpi=130, layout="constrained")
    for axes, topology, name in zip(grid.flat, FAMILY, NAMES, strict=True):
        steps = min(3, topology.cycle(_DRAWN))
        for step in range(steps):
            _draw_step(axes, topology, step)
        _draw_ranks(axes)
        axes.set_title(name, fontsize=12, fontweight="bold")
        more = ", …" if topology.cycle(_DRAWN) > steps or isinstance(topology, RandomMatching) else ""
        told = "every step" if steps == 1 else f"steps 1 to {steps}{more}"
        axes.text(0, -1.42, told, ha="center", fontsize=9, color="#555555")
    _label_steps(figure)
    figure.savefig(path)
    pyplot.close(figure)


def _place(rank: int) -> tuple[float, float]:
    angle = math.pi / 2 - 2 * math.pi * rank / _DRAWN
    return math.cos(angle), math.sin(angle)


def _draw_step(axes: Any, topology: Topology, step: int) -> None:
    """The messages of one step; a pair that exchanges is one arrow with two heads."""
    met, colour = topology.at(step, _DRAWN), COLOURS[1 + step]
    links = {(rank, to) for rank in range(_DRAWN) for to in met.destinations(rank)}
    for one, other in sorted(links):
        both = (other, one) in links
        if both and one > other:
            continue
        look = {"arrowstyle": "<|-|>" if both else "-|>", "color": colour, "linewidth": 1.5, "shrinkA": 9, "shrinkB": 9}
        look["connectionstyle"] = "arc3" if both else "arc3,rad=0.12"
        axes.annotate("", _place(other), _place(one), arrowprops=look)


def _draw_ranks(axes: Any) -> None:
    for rank in range(_DRAWN):
        axes.text(*_place(rank), str(rank), ha="center", va="center", fontsize=9, zorder=3, bbox=_badge())
    axes.set_xlim(-1.25, 1.25)
    axes.set_ylim(-1.5, 1.25)
    axes.set_aspect("equal")
    axes.axis("off")


def _badge() -> dict[str, Any]:
    return {"boxstyle": "circle,pad=0.28", "facecolor": "white", "edgecolor": "#444444", "linewidth": 1.0}


def _label_steps(figure: Any) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=COLOURS[1 + step], linewidth=2) for step in range(3)]
    names = ["first step", "second", "third"]
    figure.legend(lines, names, loc="outside lower center", ncols=3, frameon=False, fontsize=10)


def draw_mixing(path: Path, worlds: Sequence[int]) -> None:
    """Distance from consensus over steps (random values, root mean square, logarithmic), one panel per number of ranks."""
    pyplot = require_matplotlib()
    figure, panels = pyplot.subplots(1, len(worlds), figsize=(11, 4.8), dpi=130, layout="constrained", sharey=True)
    for axes, world in zip(panels, worlds, strict=True):
        for topology, name, colour in zip(FAMILY, NAMES, _LINES, strict=True):
            if serves(topology, world):
                _draw_curve(axes, topology, world, {"color": colour, "linewidth": 2.0, "label": name})
        _draw_curve(axes, rotated(FAMILY[0]), world, _dashes(_LINES[0], "dissemination, rotated"))
        _draw_curve(axes, rotated(FAMILY[3]), world, _dashes(_LINES[3], "ring, rotated"))
        _dress(axes, world)
    panels[0].set_ylabel("distance from consensus (1 at first)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path)
    pyplot.close(figure)


def _dashes(colour: str, name: str) -> dict[str, Any]:
    return {"color": colour, "linewidth": 1.6, "linestyle": (0, (3, 2)), "label": name}


def curve(topology: Topology, world: int) -> list[float]:
    """Distance from consensus after 0, 1, … steps; ends where consensus is exact."""
    left = []
    for step in range(_STEPS + 1):
        left.append(typical_disagreement(topology, world, step))
        if left[-1] < _EXACT:
            break
    return left


def _draw_curve(axes: Any, topology: Topology, world: int, look: dict[str, Any]) -> None:
    values = curve(topology, world)
    axes.plot(range(len(values)), [max(value, _LOWEST) for value in values], **look)
    if values[-1] < _EXACT:
        axes.plot(len(values) - 1, 1.4 * _LOWEST, marker="v", markersize=7, color=look["color"], clip_on=False, zorder=4)


def _dress(axes: Any, world: int) -> None:
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST, 1.3)
    axes.set_xlim(0, _STEPS)
    axes.set_title(f"{world} ranks", loc="left", fontsize=12, fontweight="bold")
    axes.set_xlabel("steps", loc="left")
    axes.grid(axis="y", color="#e4e4e4", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def table(worlds: Sequence[int]) -> str:
    """A Markdown table: messages per step, steps until everyone knows, and the shrinkage of the distance per cycle."""
    head = ["topology", *(f"{what}, {world} ranks" for world in worlds for what in ("messages", "steps to all", "gap"))]
    rows = [head, ["---"] + ["---:"] * (len(head) - 1)]
    named = [
        *zip(NAMES, FAMILY, strict=True),
        ("dissemination, rotated", rotated(FAMILY[0])),
        ("ring, rotated", rotated(FAMILY[3])),
    ]
    for name, topology in named:
        rows.append([name, *(cell for world in worlds for cell in _cells(topology, world))])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(topology: Topology, world: int) -> list[str]:
    if not serves(topology, world):
        return ["", "", ""]
    cycle = topology.cycle(world)
    gap = f"{spectral_gap(topology, world):.2f} in {cycle} step{'s' * (cycle > 1)}"
    return [f"{messages(topology, world):.3g}", str(slowest_spread(topology, world)), gap]


if __name__ == "__main__":
    main()
