"""Descriptions of clusters: what they say, and what is refused."""

import pytest

from gossamer.errors import ConfigurationError
from gossamer.simulate import Cluster, Link, Machines, Pauses, Processor, Stragglers

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
        (lambda: Processor(copy=-1), "copy must be a number above 0"),
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
