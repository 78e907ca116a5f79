"""Forms of an all-reduce, and the transports that choose among them: closed forms, and a published cluster."""

from statistics import median

import pytest
from torch import nn

from gossamer import AllReduce
from gossamer.comm.operations import Traffic
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, Transport, step_time
from gossamer.simulate.forms import FORMS

from .test_step_time import tensors

ALL = ("ring", "halving-doubling", "tree")
BYTES = 4_000_000
ONE_BUCKET = AllReduce(bucket_bytes=2**30, gather_below=0)
COMPUTE = Compute(forward=0.03, backward=0.07)


def exposed(world: int, link: Link, numel: int = BYTES // 4, **options) -> float:
    """Seconds of an all-reduce that nothing hides."""
    return step_time(tensors(numel), ONE_BUCKET, world=world, link=link, compute=COMPUTE, **options).exposed_seconds


@pytest.mark.parametrize("machines", [2, 3, 4, 7, 16, 100])
def test_every_form_sends_what_it_must(machines: int) -> None:
    """No form sends fewer bytes than a ring, nor has fewer rounds than it takes to receive from all and to answer."""
    ring = FORMS["ring"](BYTES, machines)
    for form in FORMS.values():
        traffic = form(BYTES, machines)
        assert traffic.bytes >= ring.bytes
        assert traffic.rounds >= (machines - 1).bit_length() + 1 if machines > 2 else 2
    power = machines & (machines - 1) == 0
    assert (FORMS["halving-doubling"](BYTES, machines).bytes == ring.bytes) is power
    assert FORMS["tree"](BYTES, machines) == Traffic(2 * BYTES, 2 * (machines - 1).bit_length())


def test_alone_nothing_is_sent() -> None:
    assert {form(BYTES, 1) for form in FORMS.values()} == {Traffic(0, 0)}


@pytest.mark.parametrize(("latency", "rounds"), [(1e-6, 2 * 15), (1e-2, 2 * 4)])
def test_a_transport_takes_the_form_that_ends_first(latency: float, rounds: int) -> None:
    """Of 16: a ring has 30 rounds, halving and doubling eight, with as many bytes."""
    link = Link(bandwidth=1e9, latency=latency, transport=Transport(all_reduce=("ring", "halving-doubling")))
    wire = 8 * 2 * 15 / 16 * BYTES / 1e9
    least = wire + 8 * latency
    assert exposed(16, link) == pytest.approx(least, rel=1e-4)
    alone = Link(bandwidth=1e9, latency=latency)
    assert exposed(16, alone) == pytest.approx(wire + 30 * latency, rel=1e-4)
    assert exposed(16, link) <= exposed(16, alone)


def test_a_tree_is_for_short_messages_and_a_ring_for_long_ones() -> None:
    for numel, form in ((1000, "tree"), (10**7, "ring")):
        times = {
            each: exposed(12, Link(bandwidth=1e9, latency=1e-3, transport=Transport(all_reduce=(each,))), numel) for each in ALL
        }
        assert min(times, key=times.__getitem__) == form
        chosen = exposed(12, Link(bandwidth=1e9, latency=1e-3, transport=Transport(all_reduce=ALL)), numel)
        assert chosen == pytest.approx(times[form])


def test_a_ring_through_machines_leaves_each_of_them_once_a_turn() -> None:
    """16 machines of 8: 30 hops between machines, and 224 inside."""
    link, inside = Link(bandwidth=1e9, latency=1e-3), Link(latency=1e-5)
    found = exposed(128, link, ranks_per_node=8, inside=inside)
    assert found == pytest.approx(8 * 2 * 127 / 128 * BYTES / 1e9 + 30 * 1e-3 + 224 * 1e-5, rel=1e-4)


def test_a_slow_link_inside_of_machines_is_what_counts() -> None:
    slow = exposed(4, Link(bandwidth=1e9), ranks_per_node=2, inside=Link(bandwidth=1e8))
    assert slow == pytest.approx(8 * 2 * 3 / 4 * BYTES / 1e8, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"efficiency": 0}, {"efficiency": 1.1}, {"efficiency": "90 %"}, {"ceiling": 0}, {"ceiling": float("nan")},
        {"window": -1}, {"all_reduce": ()}, {"all_reduce": "ring"}, {"all_reduce": ("star",)},
    ],
)  # fmt: skip
def test_nonsense_of_a_transport_is_refused(options: dict) -> None:
    with pytest.raises(ConfigurationError):
        Transport(**options)


# BERT-Large (the encoder, 302 million parameters in 24 layers, fp32) on 16 machines of 8 V100, TCP between them: seconds per
# epoch of about 115 steps, digitised from the plot over bandwidth in BAGUA's paper (arXiv 2107.01499).
STEPS = 115
ASYNCHRONOUS = 61
"""Nothing is waited for: what is computed."""
DDP = {1: 2590, 2: 1290, 4: 645, 8: 322, 16: 160, 100: 126}

CALIBRATION, TEST = (1, 100), (2, 4, 8, 16)
"""Gbit/s. The first row gives the efficiency, the last one, where the transport saturates, its ceiling."""


def bert_on(gbit: float) -> float:
    """Predicted seconds per epoch of DDP."""
    bits, forward = 8 * 2 * 127 / 128 * 4 * 302e6, ASYNCHRONOUS / 3  # beside which nothing is sent
    goodput = {rate: STEPS * bits / (DDP[rate] - forward) for rate in CALIBRATION}
    transport = Transport(efficiency=goodput[1] / 1e9, ceiling=goodput[100])
    model = nn.ModuleList(tensors(302_000_000 // 24) for _ in range(24))
    compute = Compute.uniform(model, forward=forward / STEPS, backward=2 * forward / STEPS)
    link, inside = Link(bandwidth=gbit * 1e9, latency=5e-5, transport=transport), Link(bandwidth=1.2e12, latency=5e-6)
    algorithm = AllReduce(bucket_bytes=25 * 2**20)
    found = step_time(model, algorithm, world=128, link=link, compute=compute, ranks_per_node=8, inside=inside, steps=2)
    return STEPS * found.step_seconds


def test_a_published_cluster_is_predicted_at_other_rates() -> None:
    errors = [abs(bert_on(gbit) / DDP[gbit] - 1) for gbit in TEST]
    assert median(errors) <= 0.07
    assert max(errors) <= 0.2
