"""gossamer bench: what is measured, what is told, and what is kept when something fails."""

import io
import json
import time

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from gossamer.bench import command
from gossamer.bench.cases import Case, Turns
from gossamer.bench.results import Results
from gossamer.bench.session import Place, Session
from gossamer.bench.suites import Run
from gossamer.bench.trained import MethodError
from gossamer.cli import app
from gossamer.errors import GossamerError

from .test_cases import a_row

CASE = Case("Convnet(0.05)", "200mbit", 4)
CASE_KEYS = {"workload": CASE.workload, "network": CASE.network}
TURNS = Turns(2, 1, 1)


def a_place(fails=(), separate=True, calls=None, now=None, error=GossamerError("rank 1 fell over")):
    def measure(case, methods, turns, on_record):
        note("time", methods)
        if set(fails) & set(methods):
            raise error
        turns = {"rounds": turns.rounds, "steps_per_round": turns.steps, "warmup": turns.warmup}
        case = {"workload": case.workload, "network": case.network, "hosts": case.hosts}
        return [a_row(method, when=round(time.time()), **case, **turns) for method in methods]

    def note(what, methods):
        if calls is not None:
            calls.append((what, *methods))

    return Place(lambda: now or {}, list, lambda case, methods: [], measure, separate)


def run(place, tmp_path, methods, per_run=1, again=False, progress=None):
    results = Results(tmp_path / "results.jsonl")
    turns = {"rounds": TURNS.rounds, "steps": TURNS.steps, "warmup": TURNS.warmup}
    wanted = Run((CASE.workload,), methods=tuple(methods), per_run=per_run, **turns)
    Session(place, wanted, results, progress or command._progress(quiet=True), again).run([CASE])


def rows(tmp_path):
    return {row["method"]: row for row in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())}


def kept(tmp_path):
    return {method: row for method, row in rows(tmp_path).items() if "failed" not in row}


def test_a_portion_that_fails_leaves_the_next_one_unharmed(tmp_path):
    with pytest.raises(GossamerError, match=r"what was measured is kept(.|\n)*QSGD\(\): rank 1 fell over"):
        run(a_place(fails=["QSGD()"]), tmp_path, ["QSGD()", "Gossip()"])
    assert kept(tmp_path).keys() == {"ddp", "compute", "Gossip()"}


def test_a_method_that_failed_is_a_row_and_is_tried_again_last_and_by_itself(tmp_path):
    methods = ["QSGD()", "Gossip()"]
    with pytest.raises(GossamerError):
        run(a_place(fails=["QSGD()"]), tmp_path, methods)
    assert rows(tmp_path)["QSGD()"]["failed"] == "rank 1 fell over"
    calls = []
    run(a_place(calls=calls), tmp_path, [*methods, "AllReduce()"], per_run=3)
    assert calls == [("time", "ddp", "compute", "AllReduce()"), ("time", "ddp", "compute", "QSGD()")]
    assert kept(tmp_path).keys() == {"ddp", "compute", "AllReduce()", *methods}
    with pytest.raises(GossamerError):
        run(a_place(fails=["QSGD()"]), tmp_path, ["QSGD()"], again=True)
    assert "QSGD()" in kept(tmp_path), "what failed does not take the place of what was measured"


def test_a_method_that_fails_takes_none_of_its_portion_along(tmp_path):
    methods = ["AllReduce()", "QSGD()", "Gossip()", "ScatterReduce()"]
    with pytest.raises(GossamerError) as caught:
        run(a_place(fails=["QSGD()"]), tmp_path, methods, per_run=3)
    assert str(caught.value).splitlines()[1:] == [f"{CASE}, ddp, compute, QSGD(): rank 1 fell over"]
    assert kept(tmp_path).keys() == {"ddp", "compute", *methods} - {"QSGD()"}


def test_where_all_are_measured_by_the_same_ranks_it_is_the_end_and_the_method_is_known(tmp_path):
    methods, error = ["QSGD()", "Gossip()"], MethodError("QSGD()", ValueError("no such thing"))
    place = a_place(fails=["QSGD()"], separate=False, error=error)
    with pytest.raises(GossamerError, match=r"^QSGD\(\): ValueError: no such thing$"):
        run(place, tmp_path, methods, per_run=2)
    assert rows(tmp_path).keys() == {"QSGD()"}
    with pytest.raises(GossamerError):
        run(place, tmp_path, methods, per_run=2)
    assert kept(tmp_path).keys() == {"ddp", "compute", "Gossip()"}, "it takes the others along once only"


def test_what_is_there_already_is_told_with_its_day_and_what_differs(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    old = {"when": 0, "torch": "2.9", "processor": "A", "host_names": ["a", "b"], "steps_per_round": 1, "warmup": 1}
    results.add([a_row(method, **CASE_KEYS, **old) for method in ("ddp", "compute", "Gossip()")])
    told = io.StringIO()
    place = a_place(now={"torch": "2.13", "processor": "A", "cores": 2, "host_names": ["a", "c"]})
    run(place, tmp_path, ["Gossip()", "QSGD()"], progress=Progress(console=Console(file=told, width=250)))
    lines = " ".join(told.getvalue().split())
    assert f"{CASE}: 1 of 2 methods are there; --again measures them anew. Measured on 1970-01-01." in lines
    assert "Changed since: torch 2.9 → 2.13; host_names a, b → a, c" in lines
    assert "processor" not in lines
    again = io.StringIO()
    run(place, tmp_path, ["Gossip()"], again=True, progress=Progress(console=Console(file=again, width=250)))
    assert "--again" not in again.getvalue()


def bench(monkeypatch, place, tmp_path, *words):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(command, "LAB", place)
    monkeypatch.setenv("COLUMNS", "160")
    more = ["--per-run", "1", "--rounds", "2", "--steps", "1", "--warmup", "1", "--save-to", str(tmp_path)]
    return CliRunner().invoke(app, ["bench", CASE.workload, *words, *more])


@pytest.mark.parametrize(
    ("error", "code"), [(GossamerError("rank 1 fell\nSideError: QSGD(): [/gloo/x] | it"), 2), (KeyboardInterrupt(), 130)]
)
def test_what_was_measured_is_shown_although_something_failed(monkeypatch, tmp_path, error, code):
    result = bench(monkeypatch, a_place(["QSGD()"], error=error), tmp_path, "--method", "Gossip()", "--method", "QSGD()")
    assert result.exit_code == code
    assert "Gossip()" in result.output
    assert "Measured on 20" in result.output
    saved = (tmp_path / "results.md").read_text()
    assert "`Gossip()`" in saved
    assert ("| failed: [/gloo/x] \\| it |" in saved) == (code == 2)
    assert ("failed: [/gloo/x]" in result.output) == (code == 2)


@pytest.mark.parametrize("width", [80, 250])
def test_no_figure_is_lost_in_a_narrow_terminal(width):
    method, told = "with_optimizer(in_parts(2, QuantizedGossip(bits=8)), GossipAdamW())", io.StringIO()
    noisy = {"round_seconds": [1234.5, 2234.5], "step_seconds": 1234.5, "ratio_low": 0.123, "ratio_high": 0.987}
    more = {"bound_seconds": 0.25, "payload_bytes": 123456.0}
    Console(file=told, width=width).print(*command._shown([a_row("ddp", **more), a_row(method, **more | noisy)]))
    shown = told.getvalue().split()
    for figure in ("1234500.0", "0.500", "(0.123", "0.987)", "1.250", "0.12"):
        assert figure in shown, (figure, told.getvalue())
    assert "".join(shown).count("GossipAdamW())") == 1
    assert max(map(len, told.getvalue().splitlines())) <= width


def test_a_column_in_which_nothing_stands_is_not_shown():
    told = io.StringIO()
    Console(file=told, width=120).print(*command._shown([a_row("ddp"), a_row("Gossip()")]))
    assert ("MB" in told.getvalue(), "step / bound" in told.getvalue()) == (True, False)


def test_a_method_that_cannot_be_read_is_told_before_anything_else(monkeypatch, tmp_path):
    Results(tmp_path / "results.jsonl").add([a_row("ddp")])
    result = bench(monkeypatch, a_place(), tmp_path, "--method", "Gosip()")
    assert result.exit_code == 2
    assert "did you mean Gossip()" in result.output
    assert not (tmp_path / "results.md").exists()


def test_a_method_is_found_again_however_it_is_spelled(monkeypatch, tmp_path):
    calls = []
    for method in ("Gossip(wire='bf16')", 'Gossip( wire="bf16")'):
        assert bench(monkeypatch, a_place(calls=calls), tmp_path, "--method", method).exit_code == 0
    assert len(calls) == 1
