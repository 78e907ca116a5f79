"""Command line: ``gossamer lab``, ``gossamer bench``, ``gossamer plan``, ``gossamer simulate``."""

import typer

from gossamer.bench.command import bench
from gossamer.lab.command import CONTEXT_SETTINGS, lab
from gossamer.planning.command import plan
from gossamer.simulate.command import simulate

app = typer.Typer(
    name="gossamer",
    help="Data-parallel PyTorch training that does not wait for a slow network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("lab", context_settings=CONTEXT_SETTINGS)(lab)
app.command("bench")(bench)
app.command("plan")(plan)
app.command("simulate")(simulate)


def main() -> None:
    """The console script ``gossamer``."""
    app()
