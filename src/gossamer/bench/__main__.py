"""Bench command by itself: ``torchrun … -m gossamer.bench`` on a cluster, as ``gossamer bench`` in the lab."""

import typer

from gossamer.bench.command import bench

typer.run(bench)
