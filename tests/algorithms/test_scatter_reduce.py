"""ScatterReduce: what is not sent is kept, wherever parts are cut; bytes and bad input."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from contracts.cases import bucket_of, exchange, flow_of, noise, own_runner
from gossamer import QSGD, ByteGrad, ChunkSparse, LowPrecisionDecentralized, ScatterReduce, loopback, replicate
from gossamer.codecs import Cast, Codec, ErrorFeedback, Quantize, RandomK, Sign, TopK
from gossamer.comm.ops import AllGather, AllToAll
from gossamer.errors import ConfigurationError
from gossamer.state import RESIDUAL, State

CODECS: list[Codec] = [Quantize(), Quantize(bits=4), Quantize(bits=2, scheme="symmetric"), Sign(), TopK(density=0.2)]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("feedback", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("gather_below", [0, 2**16])
def test_sent_and_kept_is_had(codec: Codec, world: int, feedback: tuple[bool, bool], gather_below: int) -> None:
    """With both kinds of feedback nothing is lost. With one, what the other would have kept is.

    Gathered whole, all is the workers' own: nobody encodes a mean.
    """
    steps = 6
    inputs = [noise(world, 1000, seed=step) for step in range(steps)]
    algorithm = ScatterReduce(
        codec=codec,
        worker_feedback=feedback[0],
        server_feedback=feedback[1],
        gather_below=gather_below,
        residual="fp32",
    )
    outcomes = exchange(algorithm, inputs)
    had = torch.stack([torch.stack(tensors).double().sum(0) for tensors in inputs]).sum(0)
    sent = world * torch.stack([result.double() for result in outcomes[0].results]).sum(0)
    kept = torch.stack([outcome.state["residual"].double() for outcome in outcomes]).sum(0)
    lost = (sent + kept - had).abs().max()
    complete = all(feedback) or (feedback[0] and gather_below)
    assert lost < 1e-4 if complete else lost > 1e-3


def test_feedback_makes_up_for_coarse_codes() -> None:
    """The mean over many steps of one and the same gradient is right, and without feedback it is not."""
    tensors = noise(4, 512)
    mean = torch.stack(tensors).mean(0)
    errors = []
    for feedback in (True, False):
        algorithm = ScatterReduce(codec=Quantize(bits=2), worker_feedback=feedback, server_feedback=feedback, gather_below=0)
        results = exchange(algorithm, [tensors] * 40)[0].results
        errors.append((torch.stack(results).mean(0) - mean).norm() / mean.norm())
    assert errors[0] < 0.1 * errors[1]


def test_qsgd_is_right_on_average() -> None:
    tensors = noise(3, 256)
    results = exchange(QSGD(codec=Quantize(bits=4, scheme="symmetric", rounding="stochastic")), [tensors] * 400)[0].results
    mean = torch.stack(tensors).mean(0)
    scatter = torch.stack(results).std(0).mean() / 20
    assert (torch.stack(results).mean(0) - mean).abs().mean() < 2 * scatter


def test_bytes_on_the_wire() -> None:
    """Eight bits: a quarter of an all-reduce, and 8 bytes per block of 512."""
    payload = Quantize().encode(torch.zeros(2**18, device="meta"))
    row = torch.empty(4, payload.numel(), dtype=payload.dtype, device="meta")
    sent = AllToAll(row).traffic(4).bytes + AllGather(payload).traffic(4).bytes
    assert sent / (2 * 3 * 4 * 2**18) == pytest.approx(0.25 * (1 + 8 / 512), rel=1e-3)


def test_small_tensors_are_gathered_in_one_round() -> None:
    """The mean of what each worker's payload says; in three parts they are encoded a second time."""
    tensors = noise(3, 300)
    codec = Quantize(bits=4)
    once = exchange(ScatterReduce(codec=codec), [tensors])[0].results[0]
    said = [codec.decode(codec.encode(tensor), 300, tensor.dtype) for tensor in tensors]
    torch.testing.assert_close(once, torch.stack(said).mean(0))
    assert not exchange(ScatterReduce(codec=codec, gather_below=0), [tensors])[0].results[0].equal(once)


def test_what_is_not_finite_is_found_without_reading_the_result() -> None:
    """Every worker keeps what it kept before, whichever way the tensor goes."""
    for gather_below in (0, 2**16):
        for bad in (float("nan"), float("inf")):
            tensors = noise(3, 3000)
            tensors[1][1234] = bad
            algorithm = ScatterReduce(codec=Sign(), gather_below=gather_below)
            for outcome in exchange(algorithm, [noise(3, 3000), tensors]):
                assert not outcome.results[1].isfinite().all()
                assert outcome.state["residual"].isfinite().all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"codec": "int8"}, "codec must be a codec"),
        ({"codec": ErrorFeedback(Quantize())}, "give the codec alone"),
        ({"gather_below": -1}, "gather_below must be a number of bytes"),
        ({"residual": "fp8"}, "residual must be one of"),
    ],
)
def test_bad_input(fields: dict, message: str) -> None:
    for kind in (ScatterReduce, ByteGrad):
        with pytest.raises(ConfigurationError, match=message):
            kind(**fields)


def test_what_makes_longer_what_it_encodes_goes_without_a_memory() -> None:
    for feedback in ({}, {"worker_feedback": False}, {"server_feedback": False}):
        with pytest.raises(ConfigurationError, match="would grow from step to step"):
            ScatterReduce(codec=RandomK(unbiased=True), **feedback)
    ScatterReduce(codec=RandomK(unbiased=True), worker_feedback=False, server_feedback=False)


@pytest.mark.parametrize("feedback", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("gather_below", [0, 2**16])
def test_what_is_unsent_anywhere_is_sent_whichever_rank_keeps_it(feedback: tuple[bool, bool], gather_below: int) -> None:
    """After parts were cut elsewhere, or for a parameter that nobody used, a worker has residuals beyond its own part."""
    algorithm = ScatterReduce(worker_feedback=feedback[0], server_feedback=feedback[1], gather_below=gather_below)

    def body(rank: int) -> torch.Tensor:
        runner, bucket = own_runner(), bucket_of([(1000,)], torch.float32)
        bucket.renew()
        state = State(bucket.flat)
        state[RESIDUAL] = torch.ones(1000)
        state.commit()
        bucket.flat.zero_()
        return runner.run(lambda: flow_of(algorithm, bucket, state, runner, 0), "an exchange").clone()

    for mean in loopback(body, 2):
        torch.testing.assert_close(mean, torch.ones(1000), rtol=0, atol=1e-2)


@dataclass(frozen=True)
class Listing(Cast):
    """A codec that cannot be looked up."""

    scales: list[float] = field(default_factory=list)


@pytest.mark.parametrize("make", [ScatterReduce, ChunkSparse, LowPrecisionDecentralized, ErrorFeedback])
def test_a_codec_must_be_hashable(make: Callable[..., object]) -> None:
    with pytest.raises(ConfigurationError, match=r"Listing\(.*\) cannot be hashed .*: make it a frozen dataclass, with tuples"):
        make(codec=Listing())


@pytest.mark.parametrize("gather_below", [0, 2**16])
def test_a_sum_that_overflows_leaves_no_trace_either(gather_below: int) -> None:
    """Every payload is finite, and so might be their mean."""

    def body(rank: int) -> list[torch.Tensor]:
        model = torch.nn.Linear(20, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = replicate(model, optimizer, ScatterReduce(codec=Quantize(bits=4), gather_below=gather_below))
        unsent = []
        for gradient in (noise(1, 80, seed=rank)[0].view(4, 20), torch.full((4, 20), 3e38)):
            optimizer.zero_grad()
            (model.weight * gradient).sum().backward()
            optimizer.step()
            unsent.append(replica.state_dict()[f"rank{rank}"][0]["residual"]["weight"].clone())
        assert not model.weight.grad.isfinite().any()
        return unsent

    for before, after in loopback(body, 3):
        assert before.any()
        assert torch.equal(after, before)
