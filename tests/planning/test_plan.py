"""A plan compares candidates on what was measured, chooses by class, and is a file that is read as it was written."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from gossamer import ConfigurationError, algorithms
from gossamer.optim import GossipAdamW
from gossamer.planning import Plan, read_plan
from gossamer.planning.candidates import Candidate, Fidelity, candidates, overlapped
from gossamer.planning.choose import Row, choose
from gossamer.planning.facts import Facts
from gossamer.planning.links import Rate, Rates
from gossamer.planning.plan import loads, make_plan
from gossamer.simulate import Compute
from gossamer.spelled import algorithm_of

SGD = partial(torch.optim.SGD, lr=0.1)
NODES = ((0,), (1,), (2,), (3,))


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(512, 512, device="meta") for _ in range(4)))


def facts(mbit: float, compute: float = 0.1, nodes: tuple[tuple[int, ...], ...] = NODES, inside: float | None = None) -> Facts:
    rate = Rate(goodput=mbit * 1e6, latency=1e-4)
    fast = None if inside is None else Rate(goodput=inside * 1e6, latency=1e-5)
    patterns = {"Gossip()": "pair", "ScatterReduce()": "all", "ScatterReduce(codec=Quantize(bits=4))": "all"}
    return Facts(
        nodes=nodes,
        links=Rates(pair=rate, ring=rate, all=rate),
        inside=None if fast is None else Rates(pair=fast, ring=fast, all=fast),
        compute=Compute.uniform(model(), forward=compute / 3, backward=compute / 2, optimizer=compute / 6),
        patterns=patterns,  # type: ignore[arg-type]
    )


def plan(mbit: float, fidelity: Fidelity, make=SGD, **more) -> Plan:  # type: ignore[no-untyped-def]
    made, found = model(), facts(mbit, **more)
    optimizer = make(made.parameters())
    return make_plan(found, candidates(fidelity, [optimizer], found.nodes), fidelity, made, [optimizer])


def test_plain_all_reduce_is_chosen_where_the_network_costs_nothing() -> None:
    for fidelity in ("exact", "close", "loose"):
        made = plan(100_000, fidelity)
        assert made.method == "AllReduce()"
        assert "plain all-reduce is right" in made.why


@pytest.mark.parametrize(("fidelity", "least"), [("close", 2.0), ("loose", 3.0)])
def test_on_a_slow_link_a_relaxation_of_the_class_is_chosen(fidelity: Fidelity, least: float) -> None:
    made = plan(100, fidelity)
    assert made.row.fidelity == fidelity
    assert made.row.ratio < 1 / least
    assert made.row.limit in ("compute", "bandwidth")
    assert algorithm_of(made.method) == made.algorithm


def test_within_three_percent_the_more_exact_one_wins() -> None:
    row = Row(method="AllReduce()", fidelity="exact", step_seconds=1.0, ratio=1, limit="", steps="1.00", slower=1)
    faster = replace(row, method="Gossip()", fidelity="loose", step_seconds=0.98)
    assert choose([faster, row], "loose") == row
    assert choose([replace(faster, step_seconds=0.96), row], "loose").method == "Gossip()"
    assert choose([replace(faster, step_seconds=0.96), row], "close") == row


def test_steps_to_the_same_quality_count() -> None:
    row = Row(method="AllReduce()", fidelity="exact", step_seconds=1.0, ratio=1, limit="", steps="1.00", slower=1)
    faster = replace(row, method="Gossip()", fidelity="loose", step_seconds=0.9, slower=1.2)
    assert choose([faster, row], "loose") == row


def test_weights_are_never_averaged_with_adam_by_themselves() -> None:
    def found(make) -> list[Candidate]:  # type: ignore[no-untyped-def]
        return candidates("loose", [make(model().parameters())], NODES)

    def weights(each: list[Candidate]) -> list[str]:
        return [candidate.method for candidate in each if candidate.algorithm.subject == "weights"]

    assert weights(found(torch.optim.AdamW)) == []
    assert weights(found(torch.optim.RMSprop)) == []
    assert weights(found(SGD)) == weights(found(partial(GossipAdamW, lr=1e-3))) != []
    assert not any("DiLoCo" in candidate.method for candidate in found(SGD))
    assert not any("ChunkSparse" in candidate.method for candidate in found(torch.optim.AdamW))


def test_classes_hold_what_they_say() -> None:
    optimizer = SGD(model().parameters())
    for fidelity in ("exact", "close", "loose"):
        for candidate in candidates(fidelity, [optimizer], ((0, 1), (2, 3))):
            assert candidate.algorithm.part("gradients") is not None or candidate.fidelity == "loose"
            if candidate.fidelity == "exact":
                assert candidate.steps is not None
                assert candidate.steps.high == 1.0


def test_several_ranks_on_a_machine_are_candidates_for_hierarchies() -> None:
    nodes = ((0, 1), (2, 3), (4, 5), (6, 7))
    made = plan(100, "exact", nodes=nodes, inside=20_000)
    assert made.method == "Hierarchical(AllReduce())"
    assert plan(100, "loose", nodes=nodes, inside=20_000).method.startswith("Hierarchical(")
    assert not any("Hierarchical" in row.method for row in plan(100, "loose").table)


def test_forward_overlap_is_shown_and_not_chosen_unasked() -> None:
    made, optimizer = model(), SGD(model().parameters())
    found = candidates("exact", [optimizer], NODES)
    both = [*found, *overlapped(found[:1])]
    assert not make_plan(facts(100), both, "exact", made, [optimizer]).overlap_forward
    assert make_plan(facts(100), both, "exact", made, [optimizer], overlap_forward=True).overlap_forward


def test_outer_loops_are_predicted_and_not_chosen() -> None:
    made = plan(100, "loose")
    (told,) = (reason for reason in made.left_out if "DiLoCo(every=30)" in reason)
    ratio = float(re.search(r"take (\d\.\d\d) of plain", told)[1])  # type: ignore[index]
    computed = 0.1 / made.of("AllReduce()").step_seconds
    assert computed <= ratio <= computed + 2 / 30
    assert not any("DiLoCo" in row.method for row in made.table)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = plan(100, "loose", nodes=((0, 1), (2, 3)), inside=20_000)
    made.save(tmp_path / "plan.toml")
    assert read_plan(tmp_path / "plan.toml") == made


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: text.replace("format = 1", "format = 7"), "format"),
        (lambda text: text.replace("goodput", "goodputt"), "goodputt"),
        (lambda text: text.replace('fidelity = "loose"', 'fidelity = "lose"'), "'exact', 'close', 'loose'"),
        (lambda text: text.replace("[choice]", "[choose]"), "'choice' is missing"),
        (lambda text: re.sub(r"\nforward = ", r"\nforward = -", text, count=1), "forward"),
        (
            lambda text: re.sub(r"\nstep_seconds = .*", '\nstep_seconds = "5ms"', text),
            "step_seconds must be a number; got '5ms'",
        ),
        (lambda text: re.sub(r"\nlatency = .*", '\nlatency = "5us"', text), "latency must be a number; got '5us'"),
        (lambda text: re.sub(r"\nbytes = .*", '\nbytes = "many"', text), "bytes must be a whole number; got 'many'"),
        (lambda text: re.sub(r"\nmethod = .*", "\nmethod = 3", text), "method must be a text; got 3"),
        (lambda text: text + "x = = 1", "line"),
        (lambda text: text.replace('method = "', 'method = "No', 1), "No"),
    ],
)
def test_a_plan_that_is_not_understood_names_what_is_not(tmp_path: Path, change, told: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigurationError, match=told) as error:
        loads(change(plan(100, "loose").dumps()), "plan.toml")
    assert "plan.toml" in str(error.value)


def test_a_plan_of_another_run_is_refused() -> None:
    made = plan(100, "close")
    made.check(model(), 4)
    with pytest.raises(ConfigurationError, match="made for 4 ranks, and there are 8"):
        made.check(model(), 8)
    with pytest.raises(ConfigurationError, match="bytes of gradients"):
        made.check(nn.Linear(2, 2), 4)


def test_every_candidate_is_written_as_in_a_script() -> None:
    optimizer = SGD(model().parameters())
    for candidate in candidates("loose", [optimizer], ((0, 1), (2, 3))):
        assert isinstance(candidate.algorithm, algorithms.Algorithm)
        assert isinstance(algorithm_of(candidate.computes), algorithms.Algorithm)
