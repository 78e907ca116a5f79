"""Plan command: ``gossamer plan``, for Typer."""

import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import torch
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import nn
from torch.optim import Optimizer

from gossamer.bench.catalogue import find_workload
from gossamer.bench.cluster import is_here, joined
from gossamer.bench.workload import Workload
from gossamer.comm.connect import connect
from gossamer.comm.runner import Runner
from gossamer.engine.acceptance import accept
from gossamer.engine.agreement import agree
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.planning.candidates import Fidelity, candidates, check_fidelity, overlapped
from gossamer.planning.chooser import LEARNING
from gossamer.planning.facts import gradient_bytes, nodes_of
from gossamer.planning.plan import Plan, planned, read_plan
from gossamer.planning.profile import STEPS, StepProfile
from gossamer.planning.report import COLUMNS, cells, choices, measured
from gossamer.simulate.profile import Compute

_WORKLOAD = "A Python file with build_model and random_batch, as for gossamer bench, or a plan that is there, to show it."
_WIDTH = 118
"""Characters of a line where the output is no terminal."""

_FIDELITY = "exact: the same mean; close: at most 1.03 times as many steps, as far as is known; loose: 1.25 times."


def plan(
    workload: Annotated[str, typer.Argument(help=_WORKLOAD)],
    fidelity: Annotated[str, typer.Option(help=_FIDELITY)] = "close",
    overlap_forward: Annotated[bool, typer.Option(help="Choose among methods with overlap_forward=True.")] = False,
    save_to: Annotated[Path, typer.Option(help="Where the plan is written.")] = Path("plan.toml"),
) -> None:
    """Measure these ranks and their network, predict every method, and choose one.

    On a cluster: torchrun ... -m gossamer plan mine.py

    On emulated hosts: gossamer lab --hosts 4 --rate 200mbit -- -m gossamer plan mine.py
    """
    try:
        check_fidelity(fidelity)
        if workload.endswith(".toml"):
            show(read_plan(workload))
        else:
            _on_ranks(workload, cast(Fidelity, fidelity), overlap_forward, save_to)
    except (GossamerError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        typer.echo(f"gossamer plan{'' if rank == '0' else f' (rank {rank})'}: {error}", err=True)
        raise typer.Exit(2) from None


def _on_ranks(text: str, fidelity: Fidelity, overlap_forward: bool, save_to: Path) -> None:
    workload = find_workload(text)
    if not is_here():
        raise ConfigurationError(
            "a plan is made by the ranks of a cluster, which measure the network between them: write torchrun … -m gossamer "
            f"plan {text}, or gossamer lab --hosts 4 --rate 200mbit -- -m gossamer plan {text}"
        )
    with joined([text]):
        made = make(workload, fidelity, overlap_forward)
    if os.environ["RANK"] == "0":
        made.save(save_to)
        show(made)
        typer.echo(f"{save_to} holds the plan: gossamer.replicate(model, optimizer, plan={str(save_to)!r})")


def make(workload: Workload, fidelity: Fidelity, overlap_forward: bool) -> Plan:
    """Measure and choose. Collective."""
    torch.manual_seed(0)
    model = workload.build_model()
    optimizer = workload.build_optimizer(model)
    runner = connect()
    try:
        runner.agree_on_opening("gossamer plan", devices={p.device for p in model.parameters()})
        agree(runner, {"the model": f"{type(model).__name__}, {gradient_bytes(model)} bytes", "the class": fidelity})
        compute = profile(workload, model, optimizer, runner)
        found = candidates("loose", [optimizer], nodes_of(runner))
        both = [*found, *overlapped(found if overlap_forward else found[:1])]
        usual = partial(accept, buffers=None, scaler=None)
        return planned(runner, model, [optimizer], compute, both, fidelity, overlap_forward, usual)
    finally:
        runner.close()


def profile(workload: Workload, model: nn.Module, optimizer: Optimizer, runner: Runner) -> Compute:
    """What steps compute on these ranks, which take a few alone, at the same time."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    watched, generator = StepProfile(model, trainable, optimizer, time.perf_counter), torch.Generator().manual_seed(runner.rank)
    watched.hook()
    for _ in range(LEARNING + STEPS):
        inputs, targets = workload.random_batch(generator)
        optimizer.zero_grad()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        watched.end_step()
    watched.release()
    return watched.compute(runner, LEARNING)


def show(made: Plan) -> None:
    """Print a plan."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    console.print(*map(escape, measured(made)), sep="\n", highlight=False)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number in (2, 3) else "left", overflow="fold")
    for row in made.table:
        table.add_row(*map(escape, cells(row)), style="bold" if row == made.row else "")
    console.print(table)
    console.print(*map(escape, choices(made)), sep="\n", highlight=False)
