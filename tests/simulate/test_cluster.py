"""Descriptions of clusters: what they say, and what is refused."""

import pytest

from gossamer import AllReduce, Gossip, Hierarchical
from gossamer.algorithms import Algorithm
from gossamer.comm.topology import Ring
from gossamer.errors import ConfigurationError
from gossamer.simulate import Cluster, Compute, Link, Machines, Pauses, Processor, Stragglers, step_time

from .test_step_time import tensors

TEN = Link(bandwidth=10e9, latency=5e-5)


def test_a_cluster_has_the_workers_of_all_its_machines() -> None:
    cluster = Cluster(machines=Machines(count=16, devices=8, sites=2), between=TEN, across=Link(bandwidth=1e8))
    assert cluster.world == 128


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Machines(count=0), "count must be a whole number, at least 1; got 0"),
        (lambda: Machines(count=2, devices=1.5), "devices must be a whole number"),
        (lambda: Machines(count=2, speed=0), "speed must be a number above 0"),
        (lambda: Machines(count=3, sites=2), "3 machines cannot stand in 2 sites"),
        (lambda: Machines(count=2, device=100), "device must be a name"),
        (lambda: Processor(cores=0), "cores must be a whole number"),
        (lambda: Processor(machines=0), "machines must be a whole number"),
        (lambda: Processor(message=-1), "message must be a number of seconds"),
        (lambda: Processor(copy=-1), "copy must be a number above 0"),
        (lambda: Machines(count=2**18, devices=8), "262144 machines of 8 devices are more than the 1,048,576 workers"),
        (
            lambda: Processor(kernels={"7 bits, encode": 1e9}),
            "kernels has '7 bits, encode', which is none of 'memory copy",
        ),
        (lambda: Processor(kernels={"8 bits, encode": 0}), r"kernels\['8 bits, encode'\] must be a number above 0"),
        (lambda: Pauses(every=0, seconds=1), "every must be a number above 0"),
        (lambda: Stragglers(jitter=2), "jitter must be a share"),
        (lambda: Stragglers(jitter=float("nan")), "jitter must be a share"),
        (lambda: Stragglers(distribution="normal"), "distribution must be"),
        (lambda: Stragglers(slow={"15": 2.0}), "slow must be a mapping of machine numbers"),
        (lambda: Stragglers(slow={15: 0}), r"slow\[15\] must be a number above 0"),
        (lambda: Stragglers(pauses=1.0), "pauses must be Pauses"),
        (lambda: Cluster(machines=4, between=TEN), "machines must be an instance of Machines"),
        (lambda: Cluster(machines=Machines(count=4), between=None), "between must be an instance of Link"),
        (lambda: Cluster(machines=Machines(count=4), between=TEN, own={4: TEN}), "own names machine 4; there are 4"),
        (lambda: Cluster(machines=Machines(count=4), between=TEN, own={0: 1e9}), "own must hold a Link"),
        (
            lambda: Cluster(machines=Machines(count=4), between=TEN, stragglers=Stragglers(slow={9: 2.0})),
            r"stragglers\.slow names machine 9",
        ),
        (lambda: Cluster(machines=Machines(count=4), between=TEN, across=TEN), "across= is the link between sites"),
    ],
)
def test_an_impossible_cluster_is_refused_by_name(make, complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        make()


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(), Hierarchical()], ids=repr)
def test_a_cluster_of_equal_machines_is_priced_as_their_number_and_link(algorithm: Algorithm) -> None:
    inside = Link(bandwidth=100e9, latency=5e-6)
    cluster = Cluster(machines=Machines(count=4, devices=2), between=TEN, inside=inside)
    given = {"compute": Compute(forward=0.03, backward=0.06)}
    spelled = {"world": 8, "link": TEN, "ranks_per_node": 2, "inside": inside}
    model = tensors(10**6, 1000)
    assert step_time(model, algorithm, cluster=cluster, **given) == step_time(model, algorithm, **spelled, **given)


def test_a_faster_device_computes_for_less_time() -> None:
    times = [
        step_time(
            tensors(10**7),
            AllReduce(),
            cluster=Cluster(machines=Machines(count=2, speed=speed), between=TEN),
            compute=Compute(forward=0.1, backward=0.2, optimizer=0.02, ready={"0": 0.2}),
        )
        for speed in (1, 2)
    ]
    assert times[1].compute_seconds == pytest.approx(times[0].compute_seconds / 2)
    assert times[1].exposed_seconds == pytest.approx(times[0].exposed_seconds)


def test_sites_share_the_link_between_them() -> None:
    """A ring of four machines leaves each of two sites once a turn, and has two of its six rounds between them."""
    office, vpn = Link(bandwidth=1e9, latency=1e-4), Link(bandwidth=1e8, latency=0.02)
    cluster = Cluster(machines=Machines(count=4, sites=2), between=office, across=vpn)
    found = step_time(tensors(10**6), AllReduce(), cluster=cluster, compute=Compute(forward=0.1, backward=0.1))
    wire = 8 * 2 * 3 / 4 * 4e6 / 1e8
    assert found.wire_seconds == pytest.approx(wire, rel=1e-3)
    assert found.exposed_seconds == pytest.approx(wire + 2 * 0.02 + 4 * 1e-4, rel=1e-3)
    pairs = Gossip(wire="fp32", topology=Ring(directed=True))
    one = step_time(tensors(10**6), pairs, cluster=cluster, compute=Compute(forward=0, backward=0))
    assert one.step_seconds == pytest.approx(8 * 4e6 / 1e8 + 0.02, rel=1e-3), "one message leaves each site"


def test_what_a_cluster_says_is_not_said_again() -> None:
    cluster = Cluster(machines=Machines(count=4), between=TEN)
    given = {"compute": Compute(forward=0.1, backward=0.1), "cluster": cluster}
    with pytest.raises(ConfigurationError, match="cluster= says what world, link would"):
        step_time(tensors(10), AllReduce(), world=4, link=TEN, **given)
    with pytest.raises(ConfigurationError, match="cluster must be an instance of Cluster"):
        step_time(tensors(10), AllReduce(), **given | {"cluster": 4})
