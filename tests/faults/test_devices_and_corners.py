"""On a device the host waits for nothing; what an algorithm remembers is handed over when another one follows; one meaning of
the average; what a profiler and ``metrics()`` show."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from contracts.cases import algorithms
from echo import EchoRunner
from fake_device import FakeDevice
from faults.training import Ramp, batch, mlp, sgd, squares, vector
from gossamer import (
    DESLOC,
    AllReduce,
    ChunkSparse,
    DecentralizedSGD,
    DiLoCo,
    Gossip,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    PushSum,
    ScatterReduce,
    after,
    loopback,
)
from gossamer.algorithms import Algorithm
from gossamer.codecs import Cast, Sign
from gossamer.comm.digraph import RandomPush

# -- on a device ----------------------------------------------------------------------------------------------------------


def on_meta(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, steps: int = 6) -> None:
    """Train on ``meta`` tensors, of which no value can be read."""
    runner = EchoRunner(FakeDevice(torch.device("meta")))
    entry = importlib.import_module("gossamer.replicate")
    monkeypatch.setattr(entry, "connect", lambda *arguments, **options: runner)
    monkeypatch.setattr("gossamer.replication._start_equal", lambda *arguments: None)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).to("meta")
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.empty(8, 10, device="meta")).square().mean().backward()
        optimizer.step()
    replica.close()
    if runner.data.error is not None:
        raise runner.data.error


@pytest.mark.parametrize("algorithm", algorithms(), ids=repr)
def test_under_every_algorithm_a_step_on_a_device_reads_no_value(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    on_meta(algorithm, monkeypatch)


# -- what is handed over when another algorithm follows -------------------------------------------------------------------

SHAPE = (4, 64)
SIGNS = ScatterReduce(codec=Sign(block=8), residual="fp32", gather_below=0)

KEEP_BACK = {
    "ScatterReduce": SIGNS,
    "ChunkSparse": ChunkSparse(chunk=16, density=0.3, bucket_bytes=400, residual="fp32", codec=Cast(wire="fp32")),
    "PowerSGD": PowerSGD(rank=1, residual="fp32"),
    "Hierarchical(ScatterReduce)": Hierarchical(SIGNS, ranks_per_node=2),
}
"""Algorithms over gradients that send later what they do not send now."""

KEEP_THE_MEAN = {
    "Gossip": Gossip(wire="fp32"),
    "DecentralizedSGD": DecentralizedSGD(),
    "PushSum": PushSum(),
    "PushSum, directed": PushSum(topology=RandomPush()),
    "LocalSGD": LocalSGD(every=2),
    "GossipPGA": GossipPGA(period=3, wire="fp32"),
    "Hierarchical(Gossip)": Hierarchical(Gossip(wire="fp32"), ranks_per_node=2),
}
"""Algorithms over weights in full precision that leave the mean over the ranks as it is."""

EVERYTHING = {"AllReduce": AllReduce()} | KEEP_BACK | KEEP_THE_MEAN


def noise(rank: int, step: int) -> Tensor:
    """Another gradient on each rank."""
    return batch(rank, step, *SHAPE) + rank


def total(steps: int, world: int) -> Tensor:
    """What the mean of the weights is after so many steps, if nothing is lost."""
    return -sum(noise(rank, step) for rank in range(world) for step in range(steps)).reshape(-1) / world


def trained(algorithm: Algorithm, steps: int, rank: int) -> Tensor:
    model = Ramp(*SHAPE)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(steps):
        optimizer.zero_grad()
        model(noise(rank, step)).backward()
        optimizer.step()
    replica.close(average=True)
    return vector(model)


def lost(algorithm: Algorithm, steps: int, world: int) -> float:
    """How much of the gradients is in no rank's weights, of numbers of about ten."""
    values = loopback(lambda rank: trained(algorithm, steps, rank), world)
    assert all(torch.allclose(each, values[0], rtol=0, atol=1e-9) for each in values)
    return float((values[0] - total(steps, world)).abs().max())


PAIRS = {f"{first}, then {second}": (EVERYTHING[first], EVERYTHING[second]) for first in EVERYTHING for second in EVERYTHING}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("pair", list(PAIRS))
def test_nothing_is_lost_where_one_algorithm_follows_another(pair: str) -> None:
    """What is kept back of gradients is sent in the end, by exact steps; the mean of the weights is the sum of the updates."""
    before, then = PAIRS[pair]
    whole = after(9, AllReduce(), before=after(4, then, before=before))
    assert lost(whole, 11, 4) < 1e-4


AROUND = {f"{name}, {steps} steps": (name, steps) for name in KEEP_THE_MEAN for steps in (3, 4, 5, 6)}


@pytest.mark.parametrize("around", list(AROUND))
def test_the_average_is_right_at_any_moment_around_a_hand_over(around: str) -> None:
    """Also just before and just after the first exchange of the next algorithm."""
    name, steps = AROUND[around]
    assert lost(after(4, LocalSGD(every=3), before=KEEP_THE_MEAN[name]), steps, 4) < 1e-4


# -- what is handed over when a state is loaded by others -----------------------------------------------------------------


def begun(algorithm: Algorithm, steps: range, rank: int, saved: Any = None) -> tuple[Any, Any]:
    """Train for ``steps``, going on from ``saved``; what a checkpoint holds. Gradients are the same on all ranks, so that the
    wanted sum is the same for any number of them."""
    model = Ramp(*SHAPE)
    optimizer = SGD(model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, algorithm)
    if saved is not None:
        model.load_state_dict(saved[0])
        replica.load_state_dict(saved[1])
    for step in steps:
        optimizer.zero_grad()
        model(noise(0, step)).backward()
        optimizer.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, replica.state_dict()
    replica.close()
    return state


def resumed(algorithm: Algorithm, worlds: tuple[int, int], save: int, steps: int) -> Tensor:
    """Saved at step ``save`` by one number of ranks, loaded by another one; the weights at the end."""
    first = loopback(lambda rank: begun(algorithm, range(save), rank), worlds[0])
    merged = {key: value for _, state in first for key, value in state.items()}

    def go_on(rank: int) -> tuple[Any, Any]:
        saved = first[rank] if worlds[0] == worlds[1] else (first[0][0], merged)
        return begun(algorithm, range(save, steps), rank, saved)

    found: Tensor = loopback(go_on, worlds[1])[0][0]["w"].reshape(-1)
    return found


WORLDS = {"4 to 4": (4, 4), "4 to 2": (4, 2), "6 to 3": (6, 3), "6 to 5": (6, 5), "2 to 4": (2, 4)}
RESUMED = {f"{name}, {change}, at {save}": (name, change, save) for name in KEEP_BACK for change in WORLDS for save in (3, 5)}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("resume", list(RESUMED))
def test_nothing_is_lost_where_other_ranks_go_on_and_another_algorithm_follows(resume: str) -> None:
    """Saved before the change of algorithms, or at it. What a rank kept back is sent by some rank, whatever its part was."""
    name, change, save = RESUMED[resume]
    algorithm = after(5, AllReduce(), before=KEEP_BACK[name])
    right = -sum(noise(0, step) for step in range(7)).reshape(-1)
    assert float((resumed(algorithm, WORLDS[change], save, 7) - right).abs().max()) < 1e-4


# -- one meaning of the average -------------------------------------------------------------------------------------------

AVERAGES = {
    "DiLoCo": DiLoCo(every=2),
    "DiLoCo, every step": DiLoCo(every=1, rate=0.5, momentum=0.5),
    "DiLoCo without Nesterov": DiLoCo(every=2, nesterov=False),
    "DiLoCo of signs": DiLoCo(every=2, averaging=SIGNS),
    "LocalSGD": LocalSGD(every=2),
    "LocalSGD, merged late": LocalSGD(every=4, delay=3, merge=0.5, dense=0),
    "DESLOC, merged late": DESLOC(every=4, delay=3, merge=0.5, dense=0),
    "Gossip": Gossip(wire="fp32"),
    "PushSum": PushSum(topology=RandomPush()),
}


def average_after(algorithm: Algorithm, steps: int, rank: int, weighed: bool = False) -> tuple[Tensor, Tensor]:
    """Inside ``consensus()``, and after ``close(average=True)``, at the same moment."""
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(steps):
        if weighed:
            replica.weigh(1 + 3 * rank)
        optimizer.zero_grad()
        squares(model, rank, step).backward()
        optimizer.step()
    with replica.consensus():
        inside = vector(model)
    replica.close(average=True)
    return inside, vector(model)


AMID = {f"{name}, {steps} steps": (name, steps) for name in AVERAGES for steps in (3, 4, 5, 6)}


@pytest.mark.parametrize("amid", list(AMID))
def test_the_average_inside_consensus_is_that_of_close(amid: str) -> None:
    name, steps = AMID[amid]
    for inside, closed in loopback(lambda rank: average_after(AVERAGES[name], steps, rank), 2):
        assert torch.allclose(inside, closed, rtol=0, atol=1e-12)


COUNTED = [
    LocalSGD(every=2, dense=0),
    LocalSGD(every=4, delay=3, dense=0),
    DiLoCo(every=2, dense=0),
    after(2, LocalSGD(every=2)),
]


@pytest.mark.parametrize("steps", [4, 5, 6])
@pytest.mark.parametrize("algorithm", COUNTED, ids=repr)
def test_so_it_is_where_workers_count_by_their_samples(algorithm: Algorithm, steps: int) -> None:
    for inside, closed in loopback(lambda rank: average_after(algorithm, steps, rank, weighed=True), 2):
        assert torch.allclose(inside, closed, rtol=0, atol=1e-12)


LAGGING = [LocalSGD(every=3, lag=6, dense=0), Gossip(every=2, lag=3, wire="fp32"), DESLOC(every=2, lag=4, dense=0)]


@pytest.mark.parametrize("steps", [15, 16, 17])
@pytest.mark.parametrize("algorithm", LAGGING, ids=repr)
def test_so_it_is_where_ranks_are_at_different_steps(algorithm: Algorithm, steps: int) -> None:
    for inside, closed in loopback(lambda rank: average_after(algorithm, steps - 3 * rank, rank), 3):
        assert torch.allclose(inside, closed, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", list(AVERAGES))
def test_looking_at_the_average_changes_nothing(name: str) -> None:
    def train(rank: int, look: bool) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, AVERAGES[name])
        for step in range(7):
            optimizer.zero_grad()
            squares(model, rank, step).backward()
            optimizer.step()
            if look:
                with replica.consensus():
                    pass
                replica.consensus_distance()
        replica.close()
        return vector(model)

    right = loopback(lambda rank: train(rank, False), 2)
    for values, wanted in zip(loopback(lambda rank: train(rank, True), 2), right, strict=True):
        assert torch.equal(values, wanted)


# -- what a profiler shows ------------------------------------------------------------------------------------------------


def profiled(algorithm: Algorithm, rank: int) -> set[str]:
    """The names of everything that a profiler has seen in three steps."""
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for step in range(3):
            optimizer.zero_grad()
            squares(model, rank, step).backward()
            optimizer.step()
    replica.close()
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0), Gossip(), LocalSGD(every=1)], ids=repr)
def test_a_profiler_shows_flows_and_waits_by_bucket_and_first_parameter(algorithm: Algorithm) -> None:
    (names,) = loopback(lambda rank: profiled(algorithm, rank), 1)
    ours = {name for name in names if name.startswith("gossamer: ")}
    parameters = [name for name, _ in mlp().named_parameters()]
    for what in ("flow", "wait"):
        assert any(f"{what} of bucket 0" in name and any(p in name for p in parameters) for name in ours), sorted(ours)
    assert not any("step" in name for name in ours), "a name per step cannot be summed up"


# -- metrics --------------------------------------------------------------------------------------------------------------


def metrics_after(algorithm: Algorithm, steps: int, rank: int, width: int) -> list[dict[str, float]]:
    """After each step."""
    torch.manual_seed(0)
    model = nn.Linear(width, width)
    optimizer = SGD(model.parameters(), lr=0.01)
    replica = gossamer.replicate(model, optimizer, algorithm)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(rank, step, 2, width).float()).square().mean().backward()
        optimizer.step()
        found.append(replica.metrics())
    replica.close()
    return found


RATIOS = {
    "AllReduce": (AllReduce(), 1.0),
    "AllReduce in 16 bits": (AllReduce(wire="bf16"), 2.0),
    "LocalSGD every 8": (LocalSGD(every=8, dense=0), 8.0),
    "DiLoCo every 8": (DiLoCo(every=8, dense=0), 8.0),
    "Gossip": (Gossip(wire="fp32"), 1.5),
    "Gossip every 5": (Gossip(wire="fp32", every=5), 7.5),
}
"""Bytes of an exact all-reduce in every step, by bytes sent, among 4 ranks: the former are 2·3/4 of the gradients' bytes."""


@pytest.mark.parametrize("name", list(RATIOS))
def test_the_compression_ratio_is_related_to_an_exact_all_reduce_of_every_step(name: str) -> None:
    algorithm, ratio = RATIOS[name]
    for metrics in loopback(lambda rank: metrics_after(algorithm, 200, rank, width=160), 4):
        assert metrics[-1]["compression_ratio"] == pytest.approx(ratio, rel=0.1)


TOTALS = ("bytes_sent", "messages_sent", "exposed_seconds", "wire_seconds", "local_seconds", "elapsed_seconds")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0), Gossip(), LocalSGD(every=3)], ids=repr)
def test_metrics_tell_what_the_last_step_took(algorithm: Algorithm, world: int) -> None:
    """From the end of one step of the optimizer to the end of the next one: a plot of that is no ramp."""
    for metrics in loopback(lambda rank: metrics_after(algorithm, 9, rank, width=32), world):
        before, now = metrics[-2], metrics[-1]
        for name in TOTALS:
            assert 0 <= now[f"{name}_last_step"] <= now[name]
        for name in ("bytes_sent", "messages_sent"):
            assert now[f"{name}_last_step"] == now[name] - before[name]
        assert 0 < now["elapsed_seconds_last_step"] < now["elapsed_seconds"]


def test_asking_for_metrics_twice_changes_nothing() -> None:
    def train(rank: int) -> bool:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer)
        for step in range(3):
            optimizer.zero_grad()
            squares(model, rank, step).backward()
            optimizer.step()
        first, second = replica.metrics(), replica.metrics()
        replica.close()
        return all(first[f"{name}_last_step"] == second[f"{name}_last_step"] for name in TOTALS)

    assert loopback(train, 2) == [True, True]
