"""Two exchanges of one gradient are refused, and the class in DDP's form does what DDP does: two real processes."""

import ast
from pathlib import Path

import pytest

from processes.harness import Process, launch, require

MODULE = "scenarios_wrappers"
HELPERS = {"net", "plain", "sgd", "batch", "refused", "wrap", "twins"}


def scenarios() -> list[str]:
    tree = ast.parse((Path(__file__).parent / f"{MODULE}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name not in HELPERS]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch(MODULE, scenarios(), 2, timeout=200)


@pytest.mark.parametrize("scenario", scenarios())
def test_wrapper(ended: list[Process], scenario: str) -> None:
    require(ended, scenario)
