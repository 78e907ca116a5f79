"""Every way to write a training loop, in three real processes, against DDP where DDP can do it."""

import ast
from pathlib import Path
from typing import Any

import pytest

from processes.harness import Process, launch, require

MODULE = "scenarios_features"
HELPERS = {"numbers", "mlp", "with_adamw", "steps", "loss_of", "plain", "scaled", "batch_norm", "interrupted"}


def scenarios() -> list[str]:
    """The public functions of the module that take a place and nothing else."""
    tree = ast.parse((Path(__file__).parent / f"{MODULE}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["here"] and f.name not in HELPERS]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch(MODULE, scenarios(), 3, timeout=260)


@pytest.mark.parametrize("scenario", scenarios())
def test_feature(ended: list[Process], scenario: str) -> None:
    found: Any = require(ended, scenario)[0]
    seconds = max(process.reports[scenario].seconds for process in ended)
    print(f"{scenario}: {found if found is not None else 'holds'} ({seconds:.1f} s)")


def test_all_processes_end_well_and_say_nothing(ended: list[Process]) -> None:
    for process in ended:
        assert process.code == 0, process.errors[-3000:]
        assert process.output == ""
        assert process.errors == ""
