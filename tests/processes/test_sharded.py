"""Replicas of models that are in parts: FSDP2, tensor parallelism and pipelines, in real processes."""

import ast
from pathlib import Path

import pytest

from processes.harness import Process, launch, require

MODULE = "scenarios_sharded"
QUICK = ["fsdp", "tensor", "one_forward_one_backward"]
OF_EIGHT = ["both"]


def scenarios() -> list[str]:
    """The public functions of the module that take a place and nothing else."""
    tree = ast.parse((Path(__file__).parent / f"{MODULE}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["here"]]


LONG = [name for name in scenarios() if name not in (*QUICK, *OF_EIGHT)]


@pytest.fixture(scope="module")
def quick() -> list[Process]:
    return launch(MODULE, QUICK, 4, timeout=200)


@pytest.fixture(scope="module")
def long() -> list[Process]:
    return launch(MODULE, LONG, 4, timeout=280)


@pytest.mark.parametrize("scenario", QUICK)
def test_parts(quick: list[Process], scenario: str) -> None:
    require(quick, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LONG)
def test_parts_at_length(long: list[Process], scenario: str) -> None:
    require(long, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", OF_EIGHT)
def test_parts_of_parts(scenario: str) -> None:
    require(launch(MODULE, OF_EIGHT, 8, timeout=280), scenario)
