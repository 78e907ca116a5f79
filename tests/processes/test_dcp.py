"""torch.distributed.checkpoint beside replicas, in three real processes."""

import ast
from pathlib import Path

import pytest

from processes.harness import Process, launch, require

MODULE = "scenarios_dcp"


def scenarios() -> list[str]:
    """The public functions of the module that take a place and nothing else."""
    tree = ast.parse((Path(__file__).parent / f"{MODULE}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["here"]]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch(MODULE, scenarios(), 3, timeout=200)


@pytest.mark.parametrize("scenario", scenarios())
def test_dcp(ended: list[Process], scenario: str) -> None:
    require(ended, scenario)
