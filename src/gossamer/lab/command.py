"""Lab command: `gossamer lab`, for Typer."""

from __future__ import annotations

import os
import sys
from typing import Annotated, cast

import typer

from gossamer.errors import ConfigurationError, GossamerError
from gossamer.lab.launcher import run_lab
from gossamer.lab.spec import LabSpec, Shaping, Slowing

# The first word that is no option is the script, and what follows is its own.
CONTEXT_SETTINGS = {"allow_interspersed_args": False}


def lab(
    command: Annotated[list[str], typer.Argument(help="The script and its arguments, or -m and a module.")],
    hosts: Annotated[int, typer.Option(help="Number of emulated hosts.")],
    rate: Annotated[str, typer.Option(help="200mbit, 1gbit, 25mbyte, unshaped …; or one per host, with commas.")] = (
        "unshaped"
    ),
    procs_per_host: Annotated[int, typer.Option(help="Processes (ranks) per host.")] = 1,
    latency: Annotated[str, typer.Option(help="Added to every packet, one way: 2ms, 500us.")] = "0",
    slow: Annotated[list[str] | None, typer.Option(help="HOST=FACTOR: a host slowed by a factor.")] = None,
    slow_by: Annotated[
        str, typer.Option(help="stopping (its processes), or telling them, who wait longer: GOSSAMER_LAB_SLOWDOWN.")
    ] = "stopping",
    slow_link: Annotated[list[str] | None, typer.Option(help="HOST=RATE: a host with another rate, both ways.")] = None,
    fault: Annotated[
        list[str] | None,
        typer.Option(help="'kill 2 @20s', stop, restart (a rank), cut, power-off, throttle (a host); repeat it for more."),
    ] = None,
    shaping: Annotated[str, typer.Option(help="auto, namespaces, runner (gossamer's traffic only) or none.")] = "auto",
    timeout: Annotated[float | None, typer.Option(help="Seconds after which the run is ended.")] = None,
) -> None:
    """Run a script on emulated hosts with a slow network between them, the way torchrun would.

    Example: gossamer lab --hosts 4 --rate 200mbit -- train.py --epochs 1
    """
    try:
        spec = LabSpec(  # which checks all of them
            hosts=hosts, rate=rate, procs_per_host=procs_per_host, latency=latency,
            slow=_slow(slow or []), slow_by=cast(Slowing, slow_by), slow_links=_slow_links(slow_link or []),
            faults=fault or (), shaping=cast(Shaping, shaping), timeout=timeout,
        )  # fmt: skip
        code = run_lab(spec, command).exit_code
    except GossamerError as error:
        typer.echo(f"gossamer lab: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:  # the reader of our output has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(1) from None
    raise typer.Exit(code)


def main() -> None:
    """Run the command by itself, as `python -m gossamer.lab`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command(context_settings=CONTEXT_SETTINGS)(lab)
    app(prog_name="gossamer lab")


def _slow(texts: list[str]) -> dict[int, float]:
    """Read HOST=FACTOR, repeated or separated by commas."""
    try:
        return {host: float(factor) for host, factor in _per_host(texts).items()}
    except ValueError:
        raise ConfigurationError(f"{','.join(texts)!r} is no slowed host: write HOST=FACTOR, for example 2=3.0") from None


def _slow_links(texts: list[str]) -> dict[int, str]:
    """Read HOST=RATE, repeated or separated by commas."""
    try:
        return _per_host(texts)
    except ValueError:
        raise ConfigurationError(f"{','.join(texts)!r} is no slow link: write HOST=RATE, for example 2=50mbit") from None


def _per_host(texts: list[str]) -> dict[int, str]:
    pairs = [text.partition("=") for text in ",".join(texts).split(",")] if texts else []
    if not all(equals for _, equals, _ in pairs):
        raise ValueError
    return {int(host): value for host, _, value in pairs}
