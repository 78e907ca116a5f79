"""Turns, ratios, counters and bounds, with methods that only say that they were there."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gossamer.bench import counters, paired, turns
from gossamer.bench.bound import Ready
from gossamer.bench.catalogue import find_workload
from gossamer.bench.counters import Counters
from gossamer.bench.methods import parse_method
from gossamer.bench.paired import Sent, _add_bounds
from gossamer.bench.peers import PEERS, Joined, Peer
from gossamer.bench.ratios import ENOUGH, compare
from gossamer.bench.trained import LONGEST, MethodError, Pace, Trained, exchanged, pace
from gossamer.bench.turns import take_turns
from gossamer.errors import GossamerError
from hand_clock import set_clock


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def a_method(name="", events=None, period=1, when="joined", payload=None, took=lambda: None):
    def step():
        took()
        if events is not None:
            events.append(name)

    return Trained(step, Joined(torch.nn.Linear(1, 1), None), when, payload, period)


@pytest.mark.parametrize("names", ["ab", "abc", "abcd"])
def test_every_method_has_its_turn_in_every_round_and_their_order_alternates(alone, names):
    order: list[str] = []

    class Turn:
        def __init__(self, name):
            self.name = name

        def __enter__(self):
            order.append(self.name)

        def __exit__(self, *_):
            pass

    def method(name):
        return Trained(lambda: None, Joined(torch.nn.Linear(1, 1), None, turn=lambda: Turn(name)), "joined", None, 1)

    rounds = 2 * len(names)
    results = take_turns({name: method(name) for name in names}, rounds, Pace(1, 1))
    assert {name: len(found) for name, found in results.items()} == dict.fromkeys(names, rounds)
    turns = [order[start : start + len(names)] for start in range(0, len(order), len(names))]
    assert all(sorted(turn) == sorted(names) for turn in turns)
    for one, next_one in zip(turns[::2], turns[1::2], strict=True):
        assert next_one == one[::-1], "whatever drifts with time within a pair of rounds hits all methods alike"
    assert {turn[0] for turn in turns[::2]} == set(names), "each is the first now and then"


def test_only_timed_steps_count_and_a_round_tells_seconds_per_step(alone, monkeypatch):
    clock, events = set_clock(monkeypatch, turns), []
    rounds = take_turns({"slow": a_method("slow", events, took=lambda: clock.sleep(0.02))}, 3, Pace(1, 4))["slow"]
    assert len(events) == 3 * (1 + 4)
    assert [each.seconds for each in rounds] == pytest.approx([0.02] * 3)


def test_is_told_of_every_round_before_it_begins(alone):
    events: list[object] = []
    take_turns({"one": a_method("one", events)}, 2, Pace(1, 1), told=events.append)
    assert events == [0, "one", "one", 1, "one", "one"]


def test_all_methods_of_a_run_have_the_same_pace_as_far_as_their_periods_allow():
    methods = {period: a_method(period=period) for period in (1, 6, 8, 16, 32)}
    common = pace(methods.values(), 5)
    for period, method in methods.items():
        own = common.of(method)
        assert own.lead_in % period == own.timed_steps % period == 0
        assert LONGEST <= own.lead_in < LONGEST + period
        assert own.lead_in <= own.timed_steps < LONGEST + period
    assert pace([methods[1]], 5).of(methods[1]).taken == 1 + 5, "without periods it is one step that leads in"
    assert pace([methods[1], methods[8]], 20).of(methods[1]).timed_steps == 20


def test_ratios_are_paired():
    drift = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]
    found = compare([0.5 * each for each in drift], drift)
    assert (found["ratio"], found["ratio_low"], found["ratio_high"]) == (0.5, 0.5, 0.5)
    assert (found["step_seconds"], found["reference_seconds"]) == (4.0, 8.0)


def test_few_rounds_have_a_range_and_more_an_interval():
    ratios = [1.0, 1.1, 0.8, 1.4, 1.2, 0.9, 1.05, 1.15, 0.95, 1.3]
    for rounds in range(1, ENOUGH):
        found = compare(ratios[:rounds], [1.0] * rounds)
        assert (found["ratio_low"], found["ratio_high"]) == (min(ratios[:rounds]), max(ratios[:rounds]))
    found = compare(ratios, [1.0] * len(ratios))
    assert min(ratios) < found["ratio_low"] < found["ratio"] < found["ratio_high"] < max(ratios)


def test_counters_grow_per_step(tmp_path, monkeypatch):
    interfaces = tmp_path / "dev"
    monkeypatch.setattr(counters, "_INTERFACES", interfaces)

    def sent(loopback, outside):
        row = "{}: 7 1 0 0 0 0 0 0 {} 1 0 0 0 0 0 0\n"
        interfaces.write_text("Inter-|\n face |\n" + row.format("    lo", loopback) + row.format("  eth0", outside))

    told = {"exposed_seconds": 1.0, "wire_seconds": 2.0}
    replica = SimpleNamespace(metrics=lambda: told)
    sent(100, 1000)
    before = Counters.read(replica)
    sent(5000, 3000)
    told.update(exposed_seconds=1.4, wire_seconds=4.0)
    grown = Counters.read(replica).per_step(before, 4)
    assert grown.interface_bytes == 500, "what stays on the host is not counted"
    assert (grown.exposed_seconds, grown.wire_seconds) == (pytest.approx(0.1), 0.5)
    assert grown.cpu_seconds >= 0
    assert Counters.read(None).wire_seconds == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert Counters.read(None).interface_bytes == 1500, "of one worker"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    interfaces.write_text(interfaces.read_text() + "   ib0: 7 1 0 0 0 0 0 0 800 1 0 0 0 0 0 0\n")
    assert Counters.read(None).interface_bytes == 400, "where messages go"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert Counters.read(None).interface_bytes == 0
    interfaces.unlink()
    assert Counters.read(None).interface_bytes == 0


def test_what_goes_past_the_interfaces_is_not_counted_there(alone, monkeypatch):
    rounds = take_turns({"one": a_method()}, 1, Pace(1, 1))["one"]
    assert paired._counted(rounds)["interface_bytes"] is not None
    monkeypatch.setattr(paired.dist, "get_backend", lambda: "nccl")
    assert paired._counted(rounds)["interface_bytes"] is None


@pytest.mark.parametrize(("fails", "told"), [("join", "made up: ValueError: no"), ("step", "made up: it cannot")])
def test_an_error_of_a_method_names_it(alone, monkeypatch, fails, told):
    def join(model, optimizer):
        if fails == "join":
            raise ValueError("no")
        return Joined(model, optimizer, backward=backward)

    def backward(loss):
        raise GossamerError("it cannot")

    monkeypatch.setitem(PEERS, "made up", Peer("one", join, 1.0))
    with pytest.raises(MethodError) as caught:
        paired.run(find_workload("Convnet(0.001)"), ["compute", "made up"], rounds=1, steps=1, warmup=1)
    assert str(caught.value) == told
    assert caught.value.method == "made up"


def test_a_method_whose_exchange_changes_between_the_rounds_is_marked(alone):
    methods = ["compute", "OneBitAdam(warmup=2)", "OneBitAdam(warmup=4)", "after(3, Gossip())", "after(4, Gossip())"]
    found = paired.run(find_workload("Convnet(0.001)"), methods, rounds=2, steps=1, warmup=3, told=lambda *_: None)["methods"]
    assert [method for method in methods if "two_phases" in found[method]] == ["OneBitAdam(warmup=4)", "after(4, Gossip())"]


def test_the_busiest_host_counts(alone, monkeypatch):
    monkeypatch.setattr(paired, "of_all", lambda own: [own, 99.0])
    told = paired._conditions(["compute"], 0.5)
    assert (told["load_before"], told["load_after"]) == (99.0, 99.0)


def test_bounds_follow_from_when_an_exchange_may_travel():
    step, ready = 10.0, Ready((4.0, 8.0), (0.5, 0.5), 10.0, (2.0, 0.0))
    methods = {name: a_method(when=name) for name in ("joined", "layered", "overlapped", "after")}
    methods |= {"compute": a_method(), "unknown": a_method()}
    figures = {name: {"step_seconds": step if name == "compute" else 99.0} for name in methods}
    ranks = [{name: Sent(0.0 if name == "compute" else each, 1.0) for name in methods} for each in (1e6, 8e6)]
    for sent in ranks:
        sent["unknown"] = Sent(None, 0.0)
    _add_bounds(figures, ranks, [8e6, 8e6], ready, methods)
    bounds = {name: figure.get("bound_seconds") for name, figure in figures.items()}
    assert bounds == {"compute": 10.0, "joined": 12.0, "layered": 10.0, "overlapped": 10.0, "after": 18.0, "unknown": None}
    by_layers = {name: figure.get("layered_bound_seconds") for name, figure in figures.items()}
    assert by_layers == {"compute": None, "joined": None, "layered": 12.0, "overlapped": None, "after": None, "unknown": None}


def test_a_bound_is_never_above_that_of_a_method_that_may_travel_less():
    step, ready = 3.0, Ready((1.0, 1.5, 2.5), (0.2, 0.7, 0.1), 3.0, (0.9, 0.5, 0.0))
    for payload in (0.0, 1e5, 1e6, 1e7):
        methods = {"compute": a_method()} | {name: a_method(when=name) for name in ("overlapped", "joined", "after")}
        figures = {name: {"step_seconds": step} for name in methods}
        _add_bounds(figures, [{name: Sent(payload * (name != "compute"), 1.0) for name in methods}], [8e6], ready, methods)
        bounds = [figures[name]["bound_seconds"] for name in methods]
        assert bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("method", "when"),
    [
        ("ddp", "joined"),
        ("torchft-ddp", "joined"),
        ("post-localsgd", "after"),
        ("torchft-localsgd", "after"),
        ("torchft-diloco", "after"),
        ("hivemind", "after"),
        ("torchft-streaming-diloco", "overlapped"),
        ("AllReduce()", "joined"),
        ("Gossip()", "overlapped"),
        ("overlap_forward(AllReduce())", "layered"),
        ("OneBitAdam()", "joined"),
    ],
)
def test_methods_say_when_their_exchange_travels(method, when):
    assert exchanged(parse_method(method)) == when
    assert method not in PEERS or PEERS[method].when == when
