"""A prediction in which equal buckets follow one of them is that in which each is exchanged by itself, to the last bit."""

import pytest
from torch import nn

from gossamer import Gossip, ScatterReduce
from gossamer.algorithms import Algorithm, after
from gossamer.bench.methods import algorithm_of, parse_method
from gossamer.comm.runner import Runner
from gossamer.comm.topology import Dissemination, Hypercube, OnePeerExponential, RandomMatching, ShiftOne, rotated
from gossamer.simulate import Cluster, Compute, Link, Machines, Processor, StepTime, Stragglers, step_time
from gossamer.simulate.clocked import ClockedRunner

from .configurations import CONFIGURATIONS, Configuration

METHODS = [
    "SparseLoCo(every=3)", "EagerDiLoCo(every=3)", "DESLOC(every=2)", "sparta(DiLoCo(every=3))", "LowPrecisionDecentralized()",
    "streaming_diloco(every=4, fragments=2, delay=1)", "DiLoCo(every=3, averaging=Gossip())", "QSGD()",
    "DiLoCo(every=3, averaging=ScatterReduce(codec=Quantize(bits=4), decay=0.9))", "ScatterReduce(codec=Sign())",
    "AllReduce(wire='bf16')", "Hierarchical(ScatterReduce(), ranks_per_node=2)", "Hierarchical(Gossip(), ranks_per_node=2)",
]  # fmt: skip
ALL = CONFIGURATIONS | {method: Configuration(algorithm_of(parse_method(method))) for method in METHODS}
PROCESSORS = {"free": Processor(), "with costs": Processor(copy=1e9, message=1e-4, transport=1e9)}


def model() -> nn.Module:
    """Layers that are alike, in buckets that are alike, and others between them."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.LayerNorm(512))]).to("meta")


def predict(configuration: Configuration, cluster: Cluster) -> StepTime:
    return step_time(
        model(),
        configuration.algorithm,
        cluster=cluster,
        compute=Compute(forward=0.01, backward=0.02),
        optimizer=configuration.optimizer,
        overlap_forward=configuration.overlap_forward,
        buffers="local",
    )


@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("name", ALL)
def test_following_an_equal_bucket_gives_the_same_bits(name: str, processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machines = Machines(count=2, devices=2) if "ranks_per_node=2" in name else Machines(count=4)
    link = Link(bandwidth=2e8, latency=1e-3)
    cluster = Cluster(machines=machines, between=link, processor=PROCESSORS[processor])
    predict(ALL[name], cluster)  # the first one also works out what is known from then on, such as how long payloads are
    found = predict(ALL[name], cluster)
    monkeypatch.setattr(ClockedRunner, "flow_of", Runner.flow_of)
    assert found == predict(ALL[name], cluster)


def test_unequal_workers_carry_out_what_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(
        machines=Machines(count=4), between=Link(bandwidth=2e8, latency=1e-3), stragglers=Stragglers(jitter=0.1, steps=60)
    )
    found = predict(Configuration(ScatterReduce()), cluster)
    monkeypatch.setattr(ClockedRunner, "flow_of", Runner.flow_of)
    assert found == predict(Configuration(ScatterReduce()), cluster)


class EveryOther(Gossip, register=False):
    """Of a user, who looks at the number of a bucket."""

    def exchange(self, bucket, state, ctx):  # type: ignore[no-untyped-def]
        if bucket.index % 2:
            yield from ()
            return bucket.flat.zero_()
        return (yield from super().exchange(bucket, state, ctx))


def test_an_algorithm_of_the_user_may_look_at_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(machines=Machines(count=4), between=Link(bandwidth=2e8, latency=1e-3))
    found = predict(Configuration(EveryOther()), cluster)
    assert found.bytes_per_step < predict(Configuration(Gossip()), cluster).bytes_per_step
    monkeypatch.setattr(ClockedRunner, "flow_of", Runner.flow_of)
    assert found == predict(Configuration(EveryOther()), cluster)


TOPOLOGIES = [Dissemination(), OnePeerExponential(), Hypercube(), ShiftOne(), RandomMatching(), rotated(Dissemination())]


@pytest.mark.parametrize("world", [4, 7, 8])
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_few_steps_are_priced_as_a_whole_cycle_of_partners(topology: object, world: int) -> None:
    if topology == Hypercube() and world == 7:
        return
    algorithm: Algorithm = Gossip(topology=topology)  # type: ignore[arg-type]
    cluster = Cluster(machines=Machines(count=world), between=Link(bandwidth=2e8, latency=1e-3))
    few = predict(Configuration(algorithm), cluster)
    shared = {"cluster": cluster, "compute": Compute(forward=0.01, backward=0.02), "buffers": "local"}
    cycle = topology.cycle(world)  # type: ignore[attr-defined]
    many = step_time(model(), algorithm, steps=4 * cycle, **shared)  # type: ignore[arg-type]
    if topology == RandomMatching() and world % 2:  # byes are drawn: no number of steps has them all
        assert few.step_seconds == pytest.approx(many.step_seconds, rel=0.2)
        return
    for figure in ("step_seconds", "bytes_per_step", "messages_per_step", "exposed_seconds"):
        assert getattr(few, figure) == pytest.approx(getattr(many, figure), rel=1e-9, abs=1e-12), figure


def test_a_part_that_follows_another_is_priced_as_that_one() -> None:
    cluster = Cluster(machines=Machines(count=4), between=Link(bandwidth=2e8, latency=1e-3))
    later = predict(Configuration(after(3, Gossip())), cluster)
    assert later.step_seconds == pytest.approx(predict(Configuration(Gossip()), cluster).step_seconds, rel=1e-9)
