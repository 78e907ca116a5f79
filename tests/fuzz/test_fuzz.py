"""A few dozen cases of the fuzzer, and what it must not overlook. ``make fuzz`` runs as many as there is time for."""

import dataclasses

import pytest
import torch

from fuzz.cases import Case, draw, sensible, simpler
from fuzz.laws import (
    a_resumed_run_ends_with_the_same_bits,
    exact_training_is_that_of_one_process,
    nothing_is_lost,
    ranks_are_bit_identical,
)
from fuzz.loops import reference
from fuzz.runs import REFUSED, broken_by, check, in_processes

SEEDS = range(24)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_case(seed: int) -> None:
    case = draw(seed)
    broken = check(case)
    assert broken in ("", REFUSED), f"{case.code()}\n{broken}"


FOUND = [
    # An optimizer without any history, of which a resumed run knew too late that there is none.
    Case("GossipGraD(ahead=1.0)", dtype="float32", linear=True, layers=("linear:6",), steps=4, resume=1),
    # An overflow in the first step, of which nothing is kept to choose chunks from.
    Case("ChunkSparse(chunk=16, residual='fp32')", dtype="float32", linear=True, steps=3, scaler=True, overflow=(0, 0)),
]


@pytest.mark.parametrize("case", FOUND, ids=Case.code)
def test_a_case_that_once_broke_a_law(case: Case) -> None:
    assert check(case) == ""


@pytest.mark.processes
def test_cases_in_real_processes() -> None:
    cases = [case for case in map(draw, range(100)) if case.world == 2][:6]
    told = dict(zip(cases, in_processes(cases, timeout=280), strict=True))
    assert not any(told.values()), "\n\n".join(f"{case.code()}\n{text}" for case, text in told.items() if text)


def test_a_case_is_its_seed_and_its_code() -> None:
    for seed in SEEDS:
        case = draw(seed)
        assert draw(seed) == case == eval(case.code())
        assert all(sensible(other) or other != case for other in simpler(case))


def test_the_laws_can_fail() -> None:
    """A result that is off by little breaks the law that is about it."""
    case = Case("AllReduce()", world=2, layers=("linear:6", "linear:3"), linear=True, resume=1)
    own = reference(case)
    initial = {name: tensor.clone() for name, tensor in reference(dataclasses.replace(case, steps=0)).items()}
    fine = [{"initial": initial, "own": dict(own), "mean": dict(own), "residual": {}, "buffers": {}} for _ in range(2)]
    assert broken_by(case, [fine, fine]) == ""
    off = {name: tensor + 1e-8 * torch.ones_like(tensor) for name, tensor in own.items()}
    wrong = [fine[0], {**fine[1], "own": off, "mean": {name: tensor + 1e-7 for name, tensor in own.items()}}]
    assert exact_training_is_that_of_one_process(case, wrong)
    assert ranks_are_bit_identical(case, wrong)
    assert nothing_is_lost(case, wrong)
    assert a_resumed_run_ends_with_the_same_bits(case, fine, wrong)
    assert broken_by(case, [wrong]).startswith("exact_training")


def test_every_algorithm_is_drawn() -> None:
    from gossamer.algorithms import registry

    texts = " ".join(draw(seed).algorithm for seed in range(400))
    assert [name for name in registry() if registry()[name].__module__.startswith("gossamer.") and name not in texts] == []
