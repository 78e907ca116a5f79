"""Rates for TensorBoard, W&B, MLflow or a function."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer.integrations.logging import Rates


class Scalars:
    """Writes as TensorBoard's ``SummaryWriter`` does."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


class Run:
    """Writes as a run of W&B does."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((values, step))


class Metrics:
    """Writes as ``mlflow`` does."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        assert step is not None
        self.rows.append((metrics, step))


def train(rank: int, writer: Any) -> list[dict[str, float]]:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, gossamer.AllReduce())
    rates = Rates(replica, writer)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.ones(2, 8) * rank).sum().backward()
        optimizer.step()
        if step % 3 == 2:
            found.append(rates())
    replica.close()
    return found


def test_what_is_logged_are_rates_and_no_ramps() -> None:
    """An all-reduce of 72 gradients (and one number of use for each of the two parameters) in every step."""
    rows: list[tuple[dict[str, float], int]] = []
    found = gossamer.loopback(lambda rank: train(rank, lambda values, step: rows.append((dict(values), step))), 2)[0]
    assert [step for _, step in rows] == [3, 3, 6, 6]
    first, second = found
    assert second["bytes_per_step"] == pytest.approx(72 * 4, rel=0.1)
    assert second["bytes_per_step"] <= first["bytes_per_step"]  # the first ones agreed on a plan
    assert second["bytes_per_second"] == pytest.approx(second["bytes_per_step"] / second["seconds_per_step"])
    for values in found:
        assert 0 <= values["exposed_share"] <= 1
    assert set(rows[0][0]) == {f"gossamer/{name}" for name in first}


@pytest.mark.parametrize("kind", [Scalars, Run, Metrics])
def test_the_writers_that_people_have_are_known(kind: Any) -> None:
    writers = [kind(), kind()]
    found = gossamer.loopback(lambda rank: train(rank, writers[rank]), 2)
    rows = writers[0].rows
    if kind is Scalars:
        assert ("gossamer/bytes_per_step", found[0][1]["bytes_per_step"], 6) in rows
    else:
        assert rows[1] == ({f"gossamer/{name}": value for name, value in found[0][1].items()}, 6)


def test_what_cannot_write_is_refused() -> None:
    model = nn.Linear(1, 1)
    replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(gossamer.ConfigurationError, match="add_scalar"):
        Rates(replica, 7)


def test_tensorboard_itself_takes_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed (pip install '.[integrations]')")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    writers = [SummaryWriter(str(tmp_path / str(rank))) for rank in range(2)]
    found = gossamer.loopback(lambda rank: train(rank, writers[rank]), 2)
    for writer in writers:
        writer.close()
    read = EventAccumulator(str(tmp_path / "0"))
    read.Reload()
    values = [event.value for event in read.Scalars("gossamer/bytes_per_step")]
    assert values == pytest.approx([each["bytes_per_step"] for each in found[0]])
