"""Single exchanges: each does what its name says, and is measured by the bytes that it hands to the transport."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.studies import exchanges
from benchmarks.studies.primitives import PATTERNS, payload
from gossamer.comm.loopback import current_runner, loopback

WORLD, SIZE = 4, 64


def outcomes(pattern: str) -> list[Tensor]:
    """Of ranks whose message is their rank + 1."""

    def body(rank: int) -> Tensor:
        runner = current_runner()
        assert runner is not None
        message = torch.full((SIZE,), rank + 1.0)
        return runner.wait(runner.submit(lambda: PATTERNS[pattern](message, WORLD), pattern))

    return loopback(body, WORLD)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("pair", [2, 1, 4, 3]),
        ("ring", [4, 1, 2, 3]),
        ("all-reduce", [10] * WORLD),
        ("scatter-reduce", [10] * WORLD),
    ],
)
def test_what_arrives(pattern: str, expected: list[int]) -> None:
    assert [result.unique().tolist() for result in outcomes(pattern)] == [[value] for value in expected]


def test_a_gather_brings_every_part() -> None:
    for result in outcomes("all-gather"):
        assert result.shape == (WORLD, SIZE // WORLD)
        assert result[:, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("pattern", "shares"), [("pair", 1), ("ring", 1), ("all-reduce", 1.5), ("scatter-reduce", 0.75), ("all-gather", 0.75)]
)
def test_payload_counts_what_a_host_sends(pattern: str, shares: float) -> None:
    assert payload(pattern, torch.zeros(SIZE), WORLD) == shares * 4 * SIZE


ROW = {
    "pattern": "ring", "hosts": 4, "network": "200mbit", "bytes": 8_000_000, "payload": 8_000_000, "cores": 2,
    "processor": "one", "torch": "2", "when": 0, "bits_per_second": {"tcp": 191e6},
    "seconds": {"tcp": [1.0, 1.0, 1.1], "gossamer": [1.0, 1.25, 1.0], "gossamer_after_silence": [2.0, 2.0, 2.0]},
}  # fmt: skip


def test_what_is_not_measured_again_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [[ROW, ROW | {"network": "1gbit"}], [ROW | {"network": "1gbit", "when": 90_000}, ROW | {"hosts": 8}]]
    for rows in measured:
        monkeypatch.setattr(exchanges, "measure", lambda options, store, rows=rows: rows)
        exchanges.main(["--save-to", str(tmp_path)])
    assert [(row["hosts"], row["network"], row["when"]) for row in exchanges.STUDY.store(tmp_path).rows] == [
        (4, "200mbit", 0),
        (4, "1gbit", 90_000),
        (8, "200mbit", 0),
    ]
    assert "from 1970-01-01 to 1970-01-02" in (tmp_path / "exchanges.md").read_text()


def test_the_table_shows_ratios() -> None:
    ratios = "1.000 (0.800 to 1.100) | 0.500 (0.500 to 0.550)"
    assert exchanges.STUDY.page([ROW]).splitlines()[2] == f"| 200mbit | 4 | ring | 8 | 8 | 191.0 | {ratios} |"
