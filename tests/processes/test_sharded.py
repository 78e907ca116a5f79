"""Replicas of models that are in parts: FSDP2, tensor parallelism and pipelines, in real processes."""

import ast
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

from processes.harness import Process, launch, require

QUICK = ("fsdp", "tensor", "one_forward_one_backward")
OF_EIGHT = ("both",)
ABSENT = {"one_forward_one_backward"} if version("torch").startswith("2.9.") else set[str]()
"""torch's own pipelines fail in 2.9 on a part of the ranks, over Gloo: messages of stages are mixed up."""
MODULES = (
    "scenarios_sharded",
    "scenarios_sharded_weights",
    "scenarios_sharded_dcp",
    "scenarios_sharded_refused",
    "scenarios_sharded_options",
    "scenarios_experts",
)


def scenarios(module: str) -> list[str]:
    """The public functions of a module that take a place and nothing else."""
    tree = ast.parse((Path(__file__).parent / f"{module}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["here"] and f.args.kwarg is None]


LONG = {module: [each for each in scenarios(module) if each not in (*QUICK, *OF_EIGHT)] for module in MODULES}


@cache
def ended(module: str, names: Sequence[str], world: int) -> list[Process]:
    return launch(module, names, world, timeout=280)


@pytest.mark.parametrize("scenario", QUICK)
def test_parts(scenario: str) -> None:
    if scenario in ABSENT:
        pytest.skip("pipelines on a part of the ranks, over Gloo, fail in torch 2.9 also without gossamer")
    require(ended(MODULES[0], tuple(each for each in QUICK if each not in ABSENT), 4), scenario)


@pytest.mark.slow
@pytest.mark.parametrize(("module", "scenario"), [(module, each) for module, several in LONG.items() for each in several])
def test_parts_at_length(module: str, scenario: str) -> None:
    require(ended(module, tuple(LONG[module]), 4), scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", OF_EIGHT)
def test_parts_of_parts(scenario: str) -> None:
    require(ended(MODULES[0], OF_EIGHT, 8), scenario)
