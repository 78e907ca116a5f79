"""Matrix: what is measured, kept and shown."""

import json

import pytest
from typer.testing import CliRunner

from gossamer.bench.matrix import ALWAYS, Case, Results, Turns, cases, draw, portions, table
from gossamer.cli import app
from gossamer.errors import ConfigurationError

CASE = Case("Convnet(0.05)", "200mbit+2ms", 4)


def a_row(side, **more):
    figures = {"step_seconds": 0.5, "ratio": 0.5, "ratio_low": 0.49, "ratio_high": 0.51, "payload_bytes": 2e6}
    counted = {"interface_bytes": 3e6, "exposed_seconds": 0.1, "cpu_seconds": 0.2, "wire_seconds": 0.3, "rounds": 2}
    case = {"workload": CASE.workload, "network": CASE.network, "hosts": CASE.hosts}
    return case | {"side": side, "name": "Convnet"} | figures | counted | more


def test_a_network_is_a_rate_and_a_latency():
    spec = CASE.spec()
    assert spec.rates[0].bps == 200e6
    assert spec.latency_s == 0.002
    assert Case("x", "1gbit", 2).spec().latency_s == 0


@pytest.mark.parametrize(
    "wrong", [(["Convnet(1)"], ["fast"], [4]), (["Convnet(1)"], ["1gbit+soon"], [4]), (["nowhere.py"], ["1gbit"], [4])]
)
def test_what_cannot_be_measured_is_refused_before_anything_is(wrong):
    with pytest.raises(ConfigurationError):
        cases(*wrong)


def test_cases_are_all_combinations():
    assert len(cases(["Convnet(1)", "AlexNet(2)"], ["1gbit", "unshaped"], [2, 4, 8])) == 12


def test_sides_come_in_portions_with_the_reference():
    sides = ["AllReduce()", "Gossip()", "QSGD()"]
    assert list(portions(sides, 2)) == [[*ALWAYS, *sides[:2]], [*ALWAYS, sides[2]]]
    assert list(portions([], 2)) == [list(ALWAYS)]
    with pytest.raises(ConfigurationError, match="Nothing"):
        list(portions(["Nothing()"], 2))


def test_results_are_kept_and_not_measured_again(tmp_path):
    results = Results(tmp_path / "deep" / "results.jsonl")
    assert results.lacking(CASE, ["ddp", "AllReduce()"], Turns(2)) == ["ddp", "AllReduce()"]
    results.add([a_row("ddp"), a_row("AllReduce()")])
    results.add([a_row("ddp", step_seconds=0.7)])
    again = Results(tmp_path / "deep" / "results.jsonl")
    assert again.lacking(CASE, ["ddp", "AllReduce()", "Gossip()"], Turns(2)) == ["Gossip()"]
    assert again.lacking(CASE, ["ddp"], Turns(3)) == ["ddp"], "so few rounds are not enough"
    assert again.lacking(Case(CASE.workload, CASE.network, 8), ["ddp"], Turns(2)) == ["ddp"]
    assert [row["step_seconds"] for row in again.rows if row["side"] == "ddp"] == [0.7]


def test_the_table_shows_bounds_where_there_are_some_and_says_what_is_noisy():
    lines = table([a_row("ddp"), a_row("Gossip()", bound_seconds=0.4), a_row("QSGD()", ratio_high=0.7)])
    assert "| 1 |  |" in lines[2]
    assert "400.0 | 1.250" in lines[3]
    assert "noisy" not in lines[3]
    assert "noisy" in lines[4]


def test_a_picture_is_drawn_where_there_are_several_numbers_of_hosts(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [a_row(side, hosts=hosts) for side in ("ddp", "compute", "Gossip()") for hosts in (2, 4, 8)]
    assert draw(rows, tmp_path) == [tmp_path / "convnet-0-05-hosts.png"]
    assert (tmp_path / "convnet-0-05-hosts.png").stat().st_size > 5000
    assert draw([a_row("ddp")], tmp_path) == []


def test_the_command_measures_and_goes_on_where_it_was(tmp_path):
    runner = CliRunner()
    words = ["bench", "Convnet(0.05)", "--network", "1gbit", "--hosts", "2", "--rounds", "2", "--steps", "1", "--warmup", "1"]
    words += ["--no-memory", "--save-to", str(tmp_path)]
    sides = ["AllReduce()", "ddp-powersgd", "bluefog", "post-localsgd"]
    first = runner.invoke(app, [*words, *(word for side in sides for word in ("--side", side))])
    assert first.exit_code == 0, first.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["side"] for row in rows] == ["bluefog", "ddp", "compute", "AllReduce()", "ddp-powersgd", "post-localsgd"]
    assert "does not build" in rows[0]["missing"]
    by_side = {row["side"]: row for row in rows}
    assert by_side["compute"]["step_seconds"] >= 0.05
    assert by_side["AllReduce()"]["payload_bytes"] == pytest.approx(4 * 1_630_090, rel=0.01)
    assert by_side["ddp"]["payload_bytes"] == 4 * 1_630_090
    when = {row["side"]: row["when"] for row in rows}
    second = runner.invoke(app, [*words, "--side", "AllReduce()"])
    assert second.exit_code == 0, second.output
    assert {row["side"]: row["when"] for row in Results(tmp_path / "results.jsonl").rows} == when
    assert "AllReduce()" in (tmp_path / "results.md").read_text()


def test_memory_is_known_for_all_networks_of_a_workload(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add([a_row("ddp", memory=1.5, memory_noise=0.1), a_row("AllReduce()")])
    assert results.memory(Case(CASE.workload, "1gbit", 4)) == {"ddp": {"memory": 1.5, "memory_noise": 0.1}}
    assert results.memory(Case(CASE.workload, "1gbit", 8)) == {}


def test_only_the_first_of_several_ranks_writes(tmp_path):
    results = Results(tmp_path / "results.jsonl", writes=False)
    results.add([a_row("ddp")])
    assert len(results.rows) == 1
    assert not (tmp_path / "results.jsonl").exists()


def test_the_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["bench", "nowhere.py", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "nowhere.py" in result.output
