"""Laws: what must hold for an algorithm or a codec, each in a few lines. The batteries run them over every member."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import computed
from gossamer.codecs import Codec, ErrorFeedback, Sparse
from gossamer.codecs.contraction import contraction
from gossamer.comm.operations import alone, result_like
from gossamer.comm.ops import AllReduce, Broadcast, Decide, Op, drive
from gossamer.state import State

from .cases import bucket_of, exchange, gossip, kept, noise, same_bits, shares_memory, stacked

# -- of every algorithm ---------------------------------------------------------------------------------------------------


def result_is_like_the_bucket(algorithm: Algorithm, world: int, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
    """Shape and dtype are kept for every size."""
    numel = sum(math.prod(shape) for shape in shapes)
    for outcome in exchange(algorithm, [noise(world, numel, dtype)]):
        assert outcome.results[0].shape == (numel,)
        assert outcome.results[0].dtype == dtype


def meta_tensors_suffice(algorithm: Algorithm, world: int) -> None:
    """The flow runs without values."""
    bucket = bucket_of([(7,), (3, 5)], torch.float32, "meta")
    flow = algorithm.exchange(bucket, State(bucket.flat), Context(1, 0, tuple(range(world))))
    result = computed(drive(flow, MetaPort(world)), torch.float32)
    assert (result.device.type, result.shape, result.dtype) == ("meta", (22,), torch.float32)


class MetaPort:
    """Answers every operation with a tensor of the right shape."""

    def __init__(self, world: int) -> None:
        self.world = world

    def start(self, op: Op, group: object = None) -> Op:
        return op

    def wait(self, handle: Op) -> Tensor:
        if self.world == 1:
            return alone(handle)
        return handle.tensor if isinstance(handle, AllReduce | Broadcast) else result_like(handle, self.world)

    def decide(self, decision: Decide) -> object:
        return decision.default


def nothing_stays_nothing(algorithm: Algorithm, world: int) -> None:
    """Zeros bring zeros, without a division by zero, for several steps."""
    zeros = [[torch.zeros(37)] * world] * 3
    for outcome in exchange(algorithm, zeros):
        assert all(torch.count_nonzero(result) == 0 for result in outcome.results)


def a_huge_value_stays_finite(algorithm: Algorithm, world: int) -> None:
    """One outlier on all ranks together does not overflow on the way, whatever the wire."""
    for dtype in (torch.float32, torch.float16):
        tensors = [t * 1e-3 for t in noise(world, 65, dtype)]
        for tensor in tensors:
            tensor[13] = 6e4
        for outcome in exchange(algorithm, [tensors, tensors]):
            assert all(result.isfinite().all() for result in outcome.results)
            assert all(outcome.state[key].isfinite().all() for key in outcome.state)


def an_abandoned_exchange_loses_nothing(algorithm: Algorithm, world: int) -> None:
    """State is transactional: abandoned after any number of commands and done again, everything comes out the same."""
    inputs = [noise(world, 37, seed=step) for step in range(3)]
    undisturbed = exchange(algorithm, inputs)
    for commands in range(6):
        for with_abort, without in zip(exchange(algorithm, inputs, abort_after=commands), undisturbed, strict=True):
            assert all(map(same_bits, with_abort.results, without.results))


def the_same_again_gives_the_same_bits(algorithm: Algorithm, world: int) -> None:
    """State included, and whatever the global generator says: it is the user's, and lanes must not draw from it."""
    inputs = [noise(world, 37, seed=step) for step in range(3)]
    outcomes = []
    for seed in (1, 2):
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(seed)
            outcomes.append(exchange(algorithm, inputs))
    for once, again in zip(*outcomes, strict=True):
        assert all(map(same_bits, once.results, again.results))
        assert kept(once.state).keys() == kept(again.state).keys()
        assert all(same_bits(once.state[key], again.state[key]) for key in once.state)


# -- of algorithms over gradients -----------------------------------------------------------------------------------------


def all_ranks_hold_the_same_bits(algorithm: Algorithm, world: int, dtype: torch.dtype) -> None:
    """Otherwise the replicas would drift apart."""
    outcomes = exchange(algorithm, [noise(world, 37, dtype, seed=step) for step in range(3)])
    for step in range(3):
        assert all(same_bits(outcome.results[step], outcomes[0].results[step]) for outcome in outcomes)


def non_finite_values_reach_all_ranks_and_no_state(algorithm: Algorithm, world: int, poison: float) -> None:
    """A GradScaler must see them on every rank, and the next step must be clean."""
    good, bad = noise(world, 37, seed=1), noise(world, 37, seed=2)
    bad[-1][5] = poison
    for outcome in exchange(algorithm, [good, bad, good]):
        assert not outcome.results[1].isfinite().all()
        assert outcome.results[2].isfinite().all()
        assert all(outcome.state[key].isfinite().all() for key in outcome.state)


def the_result_is_the_mean(algorithm: Algorithm, world: int, dtype: torch.dtype) -> None:
    """Within the rounding of the sum on the wire; with a full-precision wire in fp64, within 1e-14."""
    tensors = noise(world, 101, dtype)
    exact = torch.stack([t.double() for t in tensors])
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(getattr(algorithm, "wire", ""), dtype)
    precision = max(torch.finfo(wire).eps, torch.finfo(dtype).eps)
    bound = exact.abs().mean(0) * precision * (world + 1) + 1e-7 * (wire == torch.float16)
    error = (exchange(algorithm, [tensors])[0].results[0].double() - exact.mean(0)).abs()
    assert (error <= bound).all()


def among_one_nothing_is_kept_back(algorithm: Algorithm, dtype: torch.dtype) -> None:
    """The gradient to the bit; and whatever was unsent before, when there were others, all together."""
    gradients = [noise(1, 37, dtype, seed=step) for step in range(3)]
    (outcome,) = exchange(algorithm, gradients)
    assert all(map(same_bits, outcome.results, (gradient for (gradient,) in gradients)))
    state = exchange(algorithm, [noise(4, 37, dtype, seed=step) for step in range(3)])[0].state
    bucket, ctx = bucket_of([(37,)], dtype), Context(3, 0, (0,))
    bucket.flat.copy_(gradients[0][0])
    had = algorithm.hand_over(bucket.flat, state, ctx).double()
    result = drive(algorithm.exchange(bucket, state, ctx), MetaPort(1))
    torch.testing.assert_close(result.double(), had, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    state.commit()
    nothing = torch.zeros_like(bucket.flat)
    assert not algorithm.hand_over(nothing, state, ctx).any()


# -- of algorithms over weights -------------------------------------------------------------------------------------------


def the_mean_of_the_weights_is_kept(algorithm: Algorithm, world: int) -> None:
    """What some ranks gain others lose, at every step of a cycle, however coarse the wire."""
    for step_inputs in ([noise(world, 37, torch.float64, seed=seed)] * 5 for seed in range(2)):
        outcomes = exchange(algorithm, step_inputs)
        for step in range(5):
            assert stacked(outcomes, step).sum(0).abs().max() < 1e-13 * world


def equal_weights_are_left_alone(algorithm: Algorithm, world: int, dtype: torch.dtype) -> None:
    """The identity relaxation: replicas that agree are not moved by a single bit."""
    tensors = noise(1, 37, dtype) * world
    for outcome in exchange(algorithm, [tensors] * 4):
        assert all(torch.count_nonzero(result) == 0 for result in outcome.results)


def weights_come_closer(algorithm: Algorithm, world: int) -> None:
    """Applied step after step, the deltas bring the replicas to a consensus, as close as the wire's precision allows."""
    tensors = noise(world, 37)
    assert spread(gossip(algorithm, tensors, 40)) < 0.02 * spread(tensors)


def a_non_finite_weight_is_seen_by_others(algorithm: Algorithm, world: int) -> None:
    """A replica that broke is not hidden."""
    for broken in ("nan", "inf"):
        tensors = noise(world, 37)
        tensors[0][5] = float(broken)
        outcomes = exchange(algorithm, [tensors] * 5)
        assert any(not result.isfinite().all() for outcome in outcomes[1:] for result in outcome.results)


def spread(tensors: Sequence[Tensor]) -> float:
    """Mean distance from the mean."""
    return float(torch.stack(tensors).std(0, unbiased=False).mean())


# -- of every codec -------------------------------------------------------------------------------------------------------


def decoding_is_within_the_bound(codec: Codec, tensor: Tensor) -> None:
    """For finite values within range, element by element; the tensor itself is not written."""
    before = tensor.clone()
    decoded = codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype)
    assert same_bits(tensor, before)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)
    assert ((decoded.double() - tensor.double()).abs() <= codec.error_bound(tensor).double()).all()


def decoding_is_a_function_of_the_payload(codec: Codec, tensor: Tensor) -> None:
    """The same bits from a copy of the payload, wherever that lies in memory; decoding leaves it alone."""
    payload = codec.encode(tensor)
    copy = torch.cat([payload[:0], payload.new_zeros(1), payload])[1:]
    assert same_bits(codec.decode(payload, tensor.numel(), tensor.dtype), codec.decode(copy, tensor.numel(), tensor.dtype))
    assert same_bits(payload, copy)


def the_same_seed_gives_the_same_payload(codec: Codec, tensor: Tensor) -> None:
    """And no global generator is drawn from."""
    before = torch.get_rng_state()
    assert same_bits(codec.encode(tensor, seed=2**63 + 5), codec.encode(tensor.clone(), seed=2**63 + 5))
    assert torch.equal(torch.get_rng_state(), before)


def the_payload_is_fresh_contiguous_and_no_longer(codec: Codec, tensor: Tensor) -> None:
    """It may be sent while the tensor changes, and it does not cost more than the tensor (and a few words).

    Where an element travels alone it has an index, and half precision travels in fp32: at full density, up to three
    times the bytes of fp32. That is for tiny tensors, of which at least one element is sent; long ones become shorter.
    """
    payload = codec.encode(tensor)
    assert payload.is_contiguous()
    assert payload.numel() == 0 or payload.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    assert payload.nbytes <= 3 * max(tensor.nbytes, 4 * tensor.numel()) + 16
    long = tensor.new_empty(2**16, device="meta")
    most = 12 * codec.density * long.numel() if isinstance(codec, Sparse) else long.nbytes
    assert codec.encode(long).nbytes <= most + 16


def every_dtype_decodes(codec: Codec, tensor: Tensor) -> None:
    """The caller chooses the type of the result."""
    payload = codec.encode(tensor)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert codec.decode(payload, tensor.numel(), dtype).dtype == dtype


def non_finite_stays_visible(codec: Codec, tensor: Tensor, poison: float) -> None:
    """At least one value decodes to something that is not finite."""
    poisoned = tensor.clone()
    poisoned[tensor.numel() // 2] = poison
    assert not codec.decode(codec.encode(poisoned), tensor.numel(), tensor.dtype).isfinite().all()


def meta_payloads_have_the_real_shape(codec: Codec, tensor: Tensor) -> None:
    """What the clocked runner prices is what travels."""
    real, meta = codec.encode(tensor), codec.encode(tensor.to("meta"))
    assert (meta.shape, meta.dtype, meta.device.type) == (real.shape, real.dtype, "meta")
    decoded = codec.decode(meta, tensor.numel(), tensor.dtype)
    assert (decoded.shape, decoded.dtype) == (tensor.shape, tensor.dtype)


def sent_and_kept_is_what_it_had(codec: Codec, tensor: Tensor) -> None:
    """Up to one rounding of each number involved; the rest is like the tensor, and nothing that was given is written."""
    for residual in (None, tensor.flip(0) * 0.3):
        given = [t.clone() for t in (tensor, residual) if t is not None]
        payload, rest = codec.encode_rest(tensor, residual, seed=3)
        assert all(same_bits(a, b) for a, b in zip((t for t in (tensor, residual) if t is not None), given, strict=True))
        assert (rest.shape, rest.dtype) == (tensor.shape, tensor.dtype)
        assert not any(shares_memory(rest, t) for t in (tensor, residual, payload) if t is not None)
        assert residual is not None or same_bits(payload, codec.encode(tensor, seed=3))
        sent, had = codec.decode(payload, tensor.numel(), torch.float64), sum(t.double() for t in given)
        info, within = torch.finfo(tensor.dtype), sent.to(tensor.dtype).isfinite()
        slack = 2 * info.eps * (sum(t.double().abs() for t in given) + sent.abs()) + 2 * info.tiny * info.eps
        assert ((sent + rest.double() - had).abs() <= slack)[within].all()


def adding_is_decoding_and_adding(codec: Codec, tensor: Tensor) -> None:
    """To the bit, into totals of other types too."""
    payload = codec.encode(tensor)
    for dtype in (torch.float64, torch.float32, tensor.dtype):
        total = noise(1, tensor.numel(), dtype, seed=9)[0]
        expected = total + codec.decode(payload, tensor.numel(), dtype)
        codec.add_decoded(payload, total)
        assert same_bits(total, expected)


def the_norm_is_that_of_what_is_decoded(codec: Codec, tensor: Tensor) -> None:
    """Up to the order in which squares are added."""
    payload = codec.encode(tensor)
    expected = torch.linalg.vector_norm(codec.decode(payload, tensor.numel(), torch.float64))
    for dtype in (torch.float64, torch.float32):
        torch.testing.assert_close(codec.norm(payload, tensor.numel(), dtype), expected.to(dtype))


def the_rest_stays_finite(codec: Codec, tensor: Tensor, poison: float) -> None:
    """With and without a residual, which stays as it was where the tensor is not finite."""
    place = tensor.numel() // 2
    poisoned = tensor.clone()
    poisoned[place] = poison
    residual = torch.full_like(tensor, 0.25)
    for before, kept_there in ((None, 0.0), (residual, 0.25)):
        payload, rest = codec.encode_rest(poisoned, before)
        assert not codec.decode(payload, tensor.numel(), tensor.dtype).isfinite().all()
        assert rest.isfinite().all()
        assert rest[place] == kept_there


def the_mean_over_seeds_is_the_tensor(codec: Codec, tensor: Tensor, seeds: int = 1500) -> None:
    """For codecs that claim it: within six standard errors, element by element."""
    draws = torch.stack([codec.decode(codec.encode(tensor, seed), tensor.numel(), torch.float64) for seed in range(seeds)])
    error = (draws.mean(0) - tensor.double()).abs()
    slack = 1e-5 * (tensor.double().abs().amax() + draws.std(0))
    assert (error <= 6 * draws.std(0) / seeds**0.5 + slack).all()


def the_rest_may_take_the_place_of_the_tensor(codec: Codec, tensor: Tensor) -> None:
    """Written over what was encoded, payload and rest are the same."""
    for residual in (None, tensor.flip(0) / 64):
        payload, rest = codec.encode_rest(tensor, residual, seed=3)
        place = tensor.clone()
        assert same_bits(codec.encode_keeping(place, residual, 3, place), payload)
        assert same_bits(place, rest)


def error_feedback_loses_nothing(codec: Codec, tensor: Tensor, steps: int = 6) -> None:
    """Over several steps: the sum of what was decoded, and the residual, are the sum of what was given."""
    if contraction(codec) <= 0:
        return  # refused, because what is remembered would grow
    memory = codec if isinstance(codec, ErrorFeedback) else ErrorFeedback(codec, residual="fp32")
    gradient = tensor / pad(tensor.abs(), (0, 1), value=1.0).amax()  # so that no sum overflows
    state, sent, largest = State(gradient), torch.zeros_like(gradient).double(), gradient.double().abs()
    for step in range(steps):
        payload = memory.send(gradient, state, "residual", seed=step)
        decoded = memory.decode(payload, tensor.numel(), torch.float64)
        sent, largest = sent + decoded, torch.stack([largest, decoded.abs(), state["residual"].double().abs()]).amax(0)
    info = torch.finfo(min(tensor.dtype, state["residual"].dtype, key=lambda dtype: 1 / torch.finfo(dtype).eps))
    slack = steps * (4 * info.eps * largest + info.smallest_normal * info.eps + 2.0**-24)
    assert ((sent + state["residual"].double() - steps * gradient.double()).abs() <= slack).all()
