"""What a replica says about its own communication."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Quantize
from gossamer.comm.loopback import solo_runner
from gossamer.comm.runner import Meter
from gossamer.engine.statistics import Statistics
from gossamer.optim import OneBitAdam


def metrics(algorithm: Algorithm, world: int = 4, steps: int = 3) -> dict[str, float]:
    def run(rank: int) -> tuple[dict[str, float], float]:
        torch.manual_seed(0)
        model = nn.Linear(512, 256, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        begin = replica.metrics()["bytes_sent"]
        for number in range(steps):
            optimizer.zero_grad()
            model(torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean().backward()
            optimizer.step()
        found = replica.metrics()
        replica.close()
        return found, found["bytes_sent"] - begin

    found, sent = loopback(run, world)[0]
    # What opening costs is in it, so that it is a little less than in the long run.
    exact = steps * 2 * (world - 1) / world * 4 * 512 * 256
    assert found["compression_ratio"] == pytest.approx(exact / found["bytes_sent"], rel=1e-4)
    return found | {"while_training": exact / sent}


def test_a_lane_that_waits_takes_nothing_from_what_others_have_computed() -> None:
    """It has counted its wait already, and the time of its flow not yet."""
    runner = solo_runner()
    runner.meters = lambda: [Meter(wire_seconds=1.0, busy_seconds=3.0), Meter(wire_seconds=5.0)]  # type: ignore[method-assign]
    found = Statistics(runner).read(0, [])
    assert (found["wire_seconds"], found["local_seconds"]) == (6.0, 2.0)


@pytest.mark.parametrize(("algorithm", "ratio"), [(AllReduce(), 1), (AllReduce(wire="bf16"), 2), (ScatterReduce(), 3.9)])
def test_the_compression_ratio(algorithm: Algorithm, ratio: float) -> None:
    assert metrics(algorithm)["while_training"] == pytest.approx(ratio, rel=0.02)


def test_gossip_in_half_precision_sends_a_third() -> None:
    """One message of half the bytes, instead of 1.5 times the bytes; one more is under way at the end."""
    assert metrics(Gossip(wire="bf16"), steps=30)["while_training"] == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize(("warmup", "ratio"), [(99, 1), (3, 2)])
def test_an_optimizer_that_communicates_counts_both_of_its_phases(warmup: int, ratio: float) -> None:
    """Exact bytes in the first one; in the second, 1/32 of them."""

    def run(rank: int) -> dict[str, float]:
        model = nn.Linear(1024, 512, bias=False)
        optimizer = OneBitAdam(model.parameters(), warmup=warmup)
        replica = gossamer.replicate(model, optimizer)
        begin = replica.metrics()["bytes_sent"]
        for _ in range(6):
            model(torch.ones(1, 1024)).square().mean().backward()
            optimizer.step()
        found = replica.metrics()
        replica.close()
        sent = found["bytes_sent"]
        return found | {"while_training": found["compression_ratio"] * sent / (sent - begin)}

    found = loopback(run, 4)[0]
    assert found["while_training"] == pytest.approx(ratio, rel=0.05)
    assert (found["residual_norm"] > 0) == (warmup < 6)


def test_the_residual_of_an_optimizer_that_communicates_is_the_error_of_its_codec() -> None:
    """Relative to the means, and not to itself, whose memory the bucket has given away."""

    def run(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(512, 256, bias=False)
        optimizer = OneBitAdam(model.parameters(), warmup=2, codec=Quantize(bits=8))
        replica = gossamer.replicate(model, optimizer)
        norms = []
        for number in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 512, generator=torch.Generator().manual_seed(10 * number + rank))).square().mean().backward()
            optimizer.step()
            norms.append(replica.metrics()["residual_norm"])
        replica.close()
        return norms

    for norms in loopback(run, 2):
        assert norms[:2] == [0, 0]
        assert all(0 < norm < 0.05 for norm in norms[2:])


def test_the_residual_is_the_error_of_the_codec() -> None:
    norms = [metrics(ScatterReduce(codec=Quantize(bits=bits)))["residual_norm"] for bits in (8, 4, 2)]
    assert 0 < norms[0] < 0.05 < norms[1] < norms[2]
    assert metrics(AllReduce())["residual_norm"] == 0
    assert all(map(math.isfinite, norms))
