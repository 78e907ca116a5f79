"""The page of topologies: its command draws, and its table says what the functions say."""

import sys
from pathlib import Path

import pytest

from benchmarks.studies import topologies
from gossamer.comm.topology import FAMILY, Dissemination, Ring

PAGE = Path(__file__).parents[2] / "docs" / "topologies.md"


def test_every_topology_has_a_name() -> None:
    assert len(topologies.NAMES) == len(FAMILY) == len(set(topologies.NAMES))


def test_a_curve_ends_at_exact_consensus() -> None:
    assert [round(value, 2) for value in topologies.curve(Dissemination(), 4)] == [1.0, 0.58, 0.0]
    assert len(topologies.curve(Ring(), 16)) == 25


def test_the_table_on_the_page_is_up_to_date() -> None:
    """Run `make study NAME=topologies` after changing a topology."""
    assert topologies.table((16, 12)) in PAGE.read_text()


def test_the_command_draws_and_fills_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- topologies -->\nold\n<!-- /topologies -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["topologies", "--page", str(page)])
    topologies.main()
    assert "| hypercube | 1 | 4 |" in page.read_text()
    assert "old" not in page.read_text()
    for name in ("topologies.png", "mixing.png"):
        assert (tmp_path / "assets" / name).read_bytes()[:4] == b"\x89PNG"
