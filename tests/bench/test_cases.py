"""Cases: what is measured, kept and shown."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.bench.cases import ALWAYS, Case, Turns, cases, portions, rows_of
from gossamer.bench.catalogue import digest, is_of
from gossamer.bench.plots import looks_of
from gossamer.bench.results import Results
from gossamer.bench.tables import COLUMNS, ROUNDS, draw
from gossamer.bench.tables import of_rows as table
from gossamer.cli import app
from gossamer.errors import ConfigurationError
from gossamer.spelled import canonical

CASE = Case("Convnet(0.05)", "200mbit+2ms", 4)


def a_row(method, **more):
    figures = {"step_seconds": 0.5, "ratio": 0.5, "ratio_low": 0.49, "ratio_high": 0.51, "payload_bytes": 2e6}
    counted = {"interface_bytes": 3e6, "exposed_seconds": 0.1, "cpu_seconds": 0.2, "wire_seconds": 0.3}
    case = {"workload": CASE.workload, "network": CASE.network, "hosts": CASE.hosts}
    turns = {"rounds": 2, "steps_per_round": 5, "timed_steps": 8, "warmup": 4}
    own = {"compute_seconds": 0.4, "ratio_to_compute": 1.25, "round_seconds": [0.5, 0.5]}
    return case | {"method": method, "name": "Convnet"} | figures | counted | turns | own | more


HEAD = [column.title for column in COLUMNS]
NEW = ("steps_per_round", "timed_steps", "warmup", "compute_seconds", "ratio_to_compute", "round_seconds")
"""What rows did not tell at first."""


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


def test_methods_come_in_portions_with_the_reference():
    methods = ["AllReduce()", "Gossip()", "QSGD()"]
    assert list(portions(methods, 2)) == [[*ALWAYS, *methods[:2]], [*ALWAYS, methods[2]]]
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
    assert [row["step_seconds"] for row in again.rows if row["method"] == "ddp"] == [0.7]


@pytest.mark.parametrize(
    ("turns", "enough"),
    [
        (Turns(2, 5, 4), True),
        (Turns(1, 1, 1), True),
        (Turns(3, 5, 4), False),
        (Turns(2, 6, 4), False),
        (Turns(2, 5, 5), False),
    ],
)
def test_what_was_measured_for_too_short_a_time_is_measured_again(tmp_path, turns, enough):
    results = Results(tmp_path / "results.jsonl")
    results.add([a_row("ddp")])
    assert results.lacking(CASE, ["ddp"], turns) == ([] if enough else ["ddp"])


def test_an_old_row_is_shown_with_empty_cells_and_measured_again(tmp_path):
    old = {name: value for name, value in a_row("Gossip()").items() if name not in NEW}
    results = Results(tmp_path / "results.jsonl")
    results.add([old])
    assert results.lacking(CASE, ["Gossip()"], Turns(2, 1, 1)) == ["Gossip()"]
    shown, whole = (dict(zip(HEAD, line.strip("|").split("|"), strict=True)) for line in table([old, a_row("Gossip()")])[2:])
    assert {name for name in HEAD if not shown[name].strip()} - {name for name in HEAD if not whole[name].strip()} == {
        "relative to compute"
    }
    assert (shown[ROUNDS].strip(), whole[ROUNDS].strip()) == ("2", "2 of 8")


def test_what_was_measured_with_another_version_of_the_file_is_measured_again_and_marked(tmp_path):
    script, path = tmp_path / "mine.py", tmp_path / "results.jsonl"
    script.write_text("first = 1\n")
    case = Case(str(script), "200mbit", 4)
    known = {"workload": str(script), "network": "200mbit"}
    results = Results(path)
    results.add([a_row("ddp", **known, digest=digest(script), when=1, memory=1.0, memory_noise=0.1, memory_bytes=1)])
    results.add([a_row("Gossip()", **known, when=1)])  # of before digests were kept
    assert results.lacking(case, ["ddp", "Gossip()"], Turns(2)) == []
    script.write_text("second = 2\n")
    assert Results(path).lacking(case, ["ddp", "Gossip()"], Turns(2)) == ["ddp"]
    assert not any("another version" in line for line in table(results.rows))
    results.add([a_row("QSGD()", **known, digest=digest(script), when=2)])
    marked = [line for line in table(results.rows) if "another version of its file" in line]
    assert len(marked) == 1
    assert "`ddp`" in marked[0]
    assert digest("Convnet(0.5)") is None


def test_what_a_file_imports_from_beside_it_is_of_its_version(tmp_path):
    script, beside, package = tmp_path / "mine.py", tmp_path / "model.py", tmp_path / "parts"
    script.write_text("import torch\nfrom model import Net\n")
    alone = digest(script)
    assert "+" not in alone
    beside.write_text("import parts.one, model\n")
    package.mkdir()
    (tmp_path / "other.py").write_text("never imported")
    seen = [digest(script)]
    for path in (package / "__init__.py", package / "one.py", beside):
        path.write_text("x = 1\n")
        seen.append(digest(script))
    assert len({alone, *seen}) == 5, "each of them counts"
    assert seen[-1].startswith(f"{alone}+")
    assert is_of({"digest": alone}, seen[-1]), "rows of before told of the file itself only"
    assert not is_of({"digest": seen[0]}, seen[-1])
    assert not is_of({"digest": "other"}, seen[-1])


def test_the_ratio_to_compute_has_its_spread_where_it_is_known():
    spread = {"ratio_to_compute_low": 1.2, "ratio_to_compute_high": 1.3}
    cells = [dict(zip(HEAD, line.strip("|").split("|"), strict=True))["relative to compute"].strip()
             for line in table([a_row("Gossip()"), a_row("QSGD()", **spread), a_row("compute")])[2:]]  # fmt: skip
    assert cells == ["1.250", "1.250 (1.200 to 1.300)", "1"]


def found(compute, gossip):
    """What a run of two rounds says, in which each method takes these seconds."""
    seconds = {"ddp": [1.0, 1.2], "compute": [compute] * 2, "Gossip()": [gossip] * 2}
    ratios = {method: {"reference_seconds": 1.1, "compute_seconds": compute, "ratio_to_compute": own[0] / compute}
              for method, own in seconds.items()}  # fmt: skip
    told = {"workload": "Convnet", "rounds": 2, "steps_per_round": 5, "warmup": 4, "tcp_bits_per_second": 1e8, "missing": {}}
    return told | {"methods": ratios, "seconds": seconds, "latency": 0.0, "conditions": {"torch": "2", "load_before": 0.1}}


def test_every_row_has_compute_and_ddp_of_its_own_run():
    results = Results(Path("nowhere"), writes=False)
    results.add(rows_of(CASE, found(0.5, 0.75)))
    second = found(0.25, 0.5)
    second["methods"]["QSGD()"], second["seconds"]["QSGD()"] = (
        second["methods"].pop("Gossip()"),
        second["seconds"].pop("Gossip()"),
    )
    results.add(rows_of(CASE, second))
    by_method = {row["method"]: row for row in results.rows}
    assert by_method["compute"]["compute_seconds"] == 0.25, "the newest takes the place of the one before"
    assert by_method["Gossip()"]["compute_seconds"] == 0.5, "and other rows still tell theirs"
    assert by_method["Gossip()"]["ratio_to_compute"] == 1.5
    assert by_method["QSGD()"]["ratio_to_compute"] == 2.0
    assert by_method["ddp"]["round_seconds"] == [1.0, 1.2]
    assert by_method["QSGD()"]["reference_seconds"] == 1.1
    assert all(row["load_before"] == 0.1 and row["warmup"] == 4 for row in results.rows)


def test_rows_of_others_say_that_gossamers_runner_does_not_delay_them():
    delayed = [row for row in rows_of(CASE, found(0.5, 0.75) | {"latency": 0.002}) if row["method"] in ("ddp", "Gossip()")]
    whole = [a_row(row["method"], runner_latency=row["runner_latency"]) for row in delayed]
    assert [" (not delayed) |" in line for line in table(whole)[2:]] == [True, False]
    assert not any("not delayed" in line for line in table([a_row("ddp")]))


def test_the_table_shows_bounds_where_there_are_some_and_says_what_is_noisy():
    lines = table([a_row("ddp"), a_row("Gossip()", bound_seconds=0.4), a_row("QSGD()", ratio_high=0.7)])
    assert "| 1 | 1.250 |  |" in lines[2]
    assert "400.0 | 1.250" in lines[3]
    assert "noisy" not in lines[3]
    assert "noisy" in lines[4]
    both = table([a_row("overlap_forward(AllReduce())", bound_seconds=0.4, layered_bound_seconds=0.5)])[2]
    assert "| 400.0 (layer by layer 500.0) | 1.250 (layer by layer 1.000) |" in both


def test_a_picture_is_drawn_over_the_number_of_hosts_where_there_are_several_else_by_method(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [a_row(method, hosts=hosts) for method in ("ddp", "compute", "Gossip()") for hosts in (2, 4, 8)]
    assert draw(rows, tmp_path) == [tmp_path / "convnet-0-05-hosts.png"]
    assert (tmp_path / "convnet-0-05-hosts.png").stat().st_size > 5000
    both = [*rows, a_row("ddp", network="1gbit"), a_row("ddp", network="2gbit", hosts=2)]
    assert draw(both, tmp_path) == [tmp_path / "convnet-0-05-hosts.png", tmp_path / "convnet-0-05-methods.png"]
    one = [a_row("ddp", bound_seconds=0.4), a_row("Gossip()"), a_row("ddp", network="1gbit"), a_row("ddp", workload="mine.py")]
    assert draw(one, tmp_path) == [tmp_path / "convnet-0-05-methods.png", tmp_path / "mine-py-methods.png"]
    assert (tmp_path / "convnet-0-05-methods.png").stat().st_size > 5000
    assert draw([], tmp_path) == []


def test_a_picture_is_of_one_version_of_the_file(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr("gossamer.bench.tables.times_by_method", lambda path, bars, title: drawn.append(bars))
    draw([a_row("ddp", digest="old", when=1), a_row("Gossip()", digest="new", when=2), a_row("QSGD()", when=0)], tmp_path)
    assert [bars.seconds.keys() for bars in drawn[0]] == [{"Gossip()", "QSGD()"}]


def test_two_runs_that_write_one_file_keep_each_others_rows(tmp_path):
    one, other = (Results(tmp_path / "results.jsonl") for _ in range(2))
    one.add([a_row("ddp", step_seconds=0.1)])
    other.add([a_row("Gossip()"), a_row("ddp", step_seconds=0.2)])
    one.add([a_row("QSGD()")])
    assert {row["method"]: row["step_seconds"] for row in Results(tmp_path / "results.jsonl").rows} == {
        "ddp": 0.2,
        "Gossip()": 0.5,
        "QSGD()": 0.5,
    }
    assert [row["method"] for row in one.rows] == ["ddp", "QSGD()"], "what others measure on the way changes no run"


def test_a_row_is_found_however_its_method_and_file_were_spelled(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add([a_row('Gossip(wire="bf16")', workload="./mine.py")])
    again = Results(tmp_path / "results.jsonl")
    assert again.lacking(Case("mine.py", CASE.network, 4), ["Gossip(wire='bf16')"], Turns(2)) == []
    assert canonical("ddp-fp16") == "ddp-fp16"
    assert canonical("Gossip(") == "Gossip("


def test_a_reason_of_several_lines_is_one_cell(tmp_path):
    row = {name: value for name, value in a_row("x").items() if name in ("workload", "network", "hosts", "method", "name")}
    assert table([row | {"missing": "no\n  such | thing"}])[2].count("| not run: no such \\| thing |") == 1


def test_what_was_timed_across_two_phases_says_so():
    assert "| 500.0 (two phases) |" in table([a_row("OneBitAdam()", two_phases=True)])[2]


def test_ninety_methods_look_different():
    pytest.importorskip("matplotlib")
    looks = looks_of(["ddp", "compute", *(f"method {number}" for number in range(89))])
    assert len({tuple(look.values()) for look in looks.values()}) == 91


def test_the_command_measures_and_goes_on_where_it_was(tmp_path, namespaces):
    runner = CliRunner()
    words = ["bench", "Convnet(0.05)", "--network", "1gbit", "--hosts", "2", "--rounds", "2", "--steps", "1", "--warmup", "1"]
    words += ["--save-to", str(tmp_path)]
    methods = ["AllReduce()", "ddp-powersgd", "bluefog", "post-localsgd"]
    first = runner.invoke(app, [*words, *(word for method in methods for word in ("--method", method))])
    assert first.exit_code == 0, first.output
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["bluefog", "ddp", "compute", "AllReduce()", "ddp-powersgd", "post-localsgd"]
    assert "does not build" in rows[0]["missing"]
    by_method = {row["method"]: row for row in rows}
    assert by_method["compute"]["step_seconds"] >= 0.05
    assert by_method["post-localsgd"]["timed_steps"] == by_method["ddp"]["timed_steps"] == 8, (
        "all as long as the slowest period"
    )
    assert by_method["AllReduce()"]["compute_seconds"] == by_method["compute"]["step_seconds"]
    assert by_method["ddp-powersgd"]["payload_bytes"] is None
    assert "bound_seconds" not in by_method["ddp-powersgd"]
    bound = by_method["post-localsgd"]["bound_seconds"]
    line = by_method["post-localsgd"]["tcp_bits_per_second"]
    assert bound == pytest.approx(by_method["compute"]["step_seconds"] + 4 * 1_630_090 / line, rel=0.01)
    assert {"gossamer", "python", "torch", "processor", "cores", "load_before", "load_after", "seeds"} <= by_method[
        "ddp"
    ].keys()
    assert by_method["AllReduce()"]["payload_bytes"] == pytest.approx(4 * 1_630_090, rel=0.01)
    assert by_method["ddp"]["payload_bytes"] == 4 * 1_630_090
    when = {row["method"]: row["when"] for row in rows}
    second = runner.invoke(app, [*words, "--method", "AllReduce()"])
    assert second.exit_code == 0, second.output
    assert {row["method"]: row["when"] for row in Results(tmp_path / "results.jsonl").rows} == when
    assert "AllReduce()" in (tmp_path / "results.md").read_text()


def test_only_the_first_of_several_ranks_writes(tmp_path):
    results = Results(tmp_path / "results.jsonl", writes=False)
    results.add([a_row("ddp")])
    assert len(results.rows) == 1
    assert not (tmp_path / "results.jsonl").exists()


def test_the_command_says_what_is_wrong(tmp_path):
    result = CliRunner().invoke(app, ["bench", "nowhere.py", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "nowhere.py" in result.output
