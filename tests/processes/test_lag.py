"""Asynchronous gossip in real processes: ranks at different steps, and how they come together again."""

import ast
from pathlib import Path

import pytest

import gossamer
from gossamer import AllReduce, Gossip, Hierarchical, after, by_size
from processes.harness import Process, launch_side_by_side, require

MODULE = "scenarios_lag"


def scenarios() -> list[str]:
    tree = ast.parse((Path(__file__).parent / f"{MODULE}.py").read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    return [f.name for f in functions if [a.arg for a in f.args.args] == ["here"]]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch_side_by_side(MODULE, [scenarios()[half::2] for half in (0, 1)], 3, timeout=150)  # they mostly sleep


@pytest.mark.parametrize("scenario", scenarios())
def test_lag(ended: list[Process], scenario: str) -> None:
    print(scenario, require(ended, scenario)[0])


def test_all_processes_end_well(ended: list[Process]) -> None:
    for process in ended:
        assert process.code == 0, process.errors[-3000:]


@pytest.mark.parametrize(
    "make",
    [
        lambda: after(3, Gossip(lag=1)),
        lambda: by_size(10, small=Gossip(), large=Gossip(lag=1)),
        lambda: Hierarchical(Gossip(lag=1), inner=AllReduce()),
    ],
)
def test_combinations_by_step_are_refused(make) -> None:
    with pytest.raises(gossamer.ConfigurationError, match="all ranks must be at the same step"):
        make()


def test_a_lag_is_a_number_of_steps() -> None:
    with pytest.raises(gossamer.ConfigurationError, match="lag must be a number of steps, at least 0; got -1"):
        Gossip(lag=-1)
