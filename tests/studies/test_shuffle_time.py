"""The timing of samples that travel: fed with the right batches, and reported in full."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.studies.shuffle_time import STUDY, exposed, fed, main, measure, share_of, verdict
from gossamer.bench.cases import Turns
from gossamer.bench.workload import Workload

SMALL = Workload(
    "small",
    build_model=lambda: torch.nn.Linear(4, 2),
    build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    random_batch=lambda generator: (torch.rand(5, 4, generator=generator), torch.randint(0, 2, (5,), generator=generator)),
    loss=torch.nn.functional.cross_entropy,
)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("stored", "nbytes"), [("float32", 5 * (16 + 8)), ("uint8", 5 * (4 + 8))])
def test_both_methods_train_and_the_row_says_what_travelled(alone: None, stored: str, nbytes: int) -> None:
    found = measure(SMALL, SMALL, "compute", stored, Turns(rounds=3, steps=2, warmup=1), batches=7)
    assert found["batch_bytes"] == nbytes
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {"staying": 3, "travelling": 3}
    assert all(second > 0 for seconds in found["seconds"].values() for second in seconds)
    assert found["ratio_low"] <= found["ratio"] <= found["ratio_high"]
    assert found["waited_share"] == found["waited_seconds"] / found["step_seconds"]


def test_every_step_takes_a_batch_whether_or_not_compute_is_emulated() -> None:
    share, generator = share_of(SMALL, 0, 2, "uint8"), torch.Generator().manual_seed(0)
    source = zip(share[0].split(5), share[1].split(5), strict=True)
    inputs, targets = fed(SMALL, source, emulated=False).random_batch(generator)
    assert inputs.sub(share[0][:5] / 255).abs().max() < 1e-6
    assert torch.equal(targets, share[1][:5])
    emulated = replace(SMALL, random_batch=lambda generator: (torch.zeros(1), torch.zeros(1)))
    assert fed(emulated, source, emulated=True).random_batch(generator)[0].shape == (1,)
    assert next(source, None) is None


def row(staying: list[float], travelling: list[float]) -> dict[str, Any]:
    """What was measured, with these step times."""
    about = {"workload": "w", "samples": "w", "method": "compute", "stored": "uint8", "hosts": 4, "network": "200mbit"}
    about |= {"reference_seconds": 0.1, "step_seconds": 0.101, "ratio": 1.01, "ratio_low": 1.0, "ratio_high": 1.02, "when": 0}
    seconds = {"staying": staying, "travelling": travelling}
    return about | {"batch_bytes": 51200, "waited_seconds": 0.00123, "rounds": len(staying), "seconds": seconds}


def test_the_table_has_every_figure() -> None:
    head, rule, line = STUDY.page([row([0.1, 0.1], [0.101, 0.101])]).splitlines()
    assert len(head.split("|")) == len(rule.split("|")) == len(line.split("|"))
    assert line == (
        "| w | 4 | 200mbit | none | uint8 | 51 | 2 | 100.0 | 101.0 | 1.010 (1.000 to 1.020) | +1.0 (+1.0 to +1.0) | "
        "+1.0 (+1.0 to +1.0) | too few rounds | 1.23 |"
    )


def test_of_few_rounds_nothing_is_called_an_interval() -> None:
    few, many = ([0.1 + 0.001 * i for i in range(rounds)] for rounds in (5, 6))
    for seconds, told in ((few, "lowest to highest"), (many, "(95 % interval)")):
        line = STUDY.page([row(seconds, [second + 0.0001 * i**2 for i, second in enumerate(seconds)])]).splitlines()
        assert line[0].count(told) == 3
        assert ("too few rounds" in line[2]) == (seconds is few)
    low, high = exposed(row(few, [second + 0.0001 * i**2 for i, second in enumerate(few)]))[0], 0.0016
    assert (low.low, low.high) == (pytest.approx(0), pytest.approx(high))


def test_exposed_is_the_difference_within_a_round() -> None:
    """Steps that are slow in both arms say nothing; and what is not sure is not claimed."""
    seconds, share = exposed(row([0.1, 0.9, 0.2, 0.4], [0.102, 0.902, 0.202, 0.402]))
    assert seconds.low == pytest.approx(0.002)
    assert seconds.high == pytest.approx(0.002)
    assert share.median == pytest.approx((0.002 / 0.202 + 0.002 / 0.402) / 2)
    staying = [0.1] * 12
    assert verdict(exposed(row(staying, [0.1 + 0.0002 * i for i in range(12)]))[1], 12) == "yes"
    assert verdict(exposed(row(staying, [0.104 + 0.0002 * i for i in range(12)]))[1], 12) == "no"
    assert verdict(exposed(row(staying, [0.1 + 0.006 * (i % 2) for i in range(12)]))[1], 12) == "not shown"


def kept(folder: Path, rows: list[dict[str, Any]]) -> None:
    STUDY.store(folder).add(rows)


def test_the_table_is_made_anew_of_what_was_saved(tmp_path: Path) -> None:
    rows = [row([0.1, 0.1], [0.101, 0.101])]
    kept(tmp_path, rows)
    main(["--table-only", "--save-to", str(tmp_path)])
    assert (tmp_path / "shuffle_time.md").read_text() == STUDY.page(rows)


def test_cases_that_are_not_asked_for_again_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, gossip = row([0.1] * 6, [0.101] * 6), row([0.1] * 6, [0.102] * 6) | {"method": "Gossip()"}
    kept(tmp_path, [old, gossip])
    new = row([0.2] * 6, [0.201] * 6)
    monkeypatch.setattr("benchmarks.studies.shuffle_time.in_lab", lambda options, store: iter([new]))
    main(["--workloads", "Convnet(0.1)", "--save-to", str(tmp_path)])
    assert STUDY.store(tmp_path).rows == [new, gossip]
    assert (tmp_path / "shuffle_time.md").read_text() == STUDY.page([new, gossip])


def test_the_default_is_the_convnet_computed_and_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("benchmarks.studies.shuffle_time.in_lab", lambda options, store: asked.append(options) or [])
    main(["--save-to", str(tmp_path)])
    (options,) = asked
    assert (options.hosts, options.network, options.workloads) == (4, "200mbit", ["examples/02_convnet.py", "Convnet(0.1)"])
    assert options.methods == ["compute", "Gossip(wire='bf16')"]
