"""Command line: ``gossamer lab`` and the commands to come."""

import typer

from gossamer.lab.command import lab

app = typer.Typer(
    name="gossamer",
    help="Data-parallel PyTorch training that does not wait for a slow network.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("lab", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(lab)


@app.callback()
def root() -> None:
    """Keeps ``lab`` a subcommand while it is the only one."""


def main() -> None:
    """The console script ``gossamer``."""
    app()
