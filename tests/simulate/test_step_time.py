"""The clocked runner against closed forms, written out."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from gossamer import (
    AllReduce,
    ByteGrad,
    ChunkSparse,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LowPrecisionDecentralized,
    PushSum,
)  # fmt: skip
from gossamer.algorithms import Algorithm, after, by_size, in_parts
from gossamer.algorithms.base import Context
from gossamer.algorithms.cadence import Cadence, every
from gossamer.buckets import Bucket
from gossamer.comm import ops
from gossamer.comm.digraph import Digraph, OutNeighbours
from gossamer.comm.ops import Flow, Permute, all_reduce, decide, start, wait
from gossamer.comm.topology import Dissemination, Hypercube, Ring, ShiftOne, shift
from gossamer.engine.usage import USAGE
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, StepTime, step_time
from gossamer.simulate.sharing import crossing
from gossamer.state import State

from ..contracts.cases import plain

BANDWIDTH, LATENCY, BYTES, FORWARD = 1e9, 1e-3, 4_000_000, 0.03

OPTIMIZERS = [partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.9), AdamW]
"""They remember nothing, one and two tensors of each weight."""


def gathered(nbytes: float, world: int) -> float:
    """Seconds on the wire of a small all-reduce, for which everything is gathered; latency apart."""
    return 8 * (world - 1) * nbytes / BANDWIDTH


def tensors(*numels: int) -> nn.Module:
    """A model that is nothing but fp32 parameters of these sizes, on no device: ``0``, ``1`` … in forward order."""
    return nn.ParameterList(torch.empty(n, device="meta") for n in numels)


def layers(*numels: int) -> nn.Module:
    """The same, each in a module of its own, which a forward pass calls: ``0.0``, ``1.0`` …"""
    return nn.ModuleList(tensors(n) for n in numels)


def ring(nbytes: float, world: int) -> float:
    """Seconds on the wire of a ring all-reduce, latencies apart."""
    return 8 * 2 * (world - 1) / world * nbytes / BANDWIDTH


def run(model: nn.Module, algorithm: Algorithm, world: int, compute: Compute | None = None, **options) -> StepTime:
    link = Link(bandwidth=BANDWIDTH, latency=options.pop("latency", LATENCY))
    options = {"compute": compute or Compute(forward=FORWARD, backward=0.07)} | options
    return step_time(model, algorithm, world=world, link=link, **options)


def seconds(*args, **options) -> float:
    return run(*args, **options).step_seconds


def close(value: float, slack: float = 1e-6) -> object:
    """Equal but for the few bytes of the agreement on used parameters, which the closed forms leave out."""
    return pytest.approx(value, abs=slack, rel=1e-9)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [2, 3, 8, 64])
def test_one_bucket_and_nothing_to_overlap(world: int) -> None:
    result = run(tensors(10**6), AllReduce(), world)
    rounds = 2 * (world - 1)
    assert result.step_seconds == close(0.1 + ring(BYTES, world) + rounds * LATENCY)
    assert result.exposed_seconds == pytest.approx(result.step_seconds - 0.1)
    assert result.bytes_per_step == pytest.approx(2 * (world - 1) / world * BYTES, abs=10)
    assert result.messages_per_step == rounds
    assert result.wire_seconds == pytest.approx(8 * result.bytes_per_step / BANDWIDTH)


def test_a_world_of_one_only_computes() -> None:
    for algorithm in plain():
        result = run(nn.Linear(100, 10), algorithm, 1, Compute(forward=0.1, backward=0.2, optimizer=0.05))
        assert result.step_seconds == pytest.approx(0.35)
        assert result.bytes_per_step == 0


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_is_ready_early_is_hidden(lanes: int) -> None:
    """The first bucket (parameter 1, at 0.02 of 0.07 s) is gone before the second, small one comes."""
    compute = Compute(forward=0.03, backward=0.07, ready={"1": 0.02, "0": 0.07})
    assert ring(BYTES, 4) + 6 * LATENCY < 0.07
    model, algorithm = tensors(1000, 10**6), AllReduce(bucket_bytes=9)
    begin = 0.03 + max(0.07, 0.02 + ring(BYTES, 4) + (6 * LATENCY if lanes == 1 else 0))
    ends = begin + gathered(4000, 4) + LATENCY, 0.05 + ring(BYTES, 4) + 6 * LATENCY
    assert seconds(model, algorithm, 4, compute, lanes=lanes) == close(max(ends), slack=2e-4)


def test_the_wire_is_the_limit() -> None:
    """Two large buckets, the first one early: the wire is busy from then on, and latency counts once."""
    compute = Compute(forward=0.03, backward=0.07, ready={"1": 0.02, "0": 0.07})
    result = run(tensors(4 * 10**6, 4 * 10**6), AllReduce(bucket_bytes=9), 4, compute)
    assert result.step_seconds == close(0.03 + 0.02 + 2 * ring(4 * BYTES, 4) + 6 * LATENCY)
    assert result.bound_seconds == result.wire_seconds


def test_an_order_of_launch_is_kept() -> None:
    """A bucket that is ready late holds back those behind it in the plan: here none is, as the plan was learned."""
    compute = Compute(forward=0, backward=0.1, ready={"0": 0.01, "1": 0.1})
    late_first = Compute(forward=0, backward=0.1, ready={"0": 0.1, "1": 0.01})
    model, algorithm = tensors(10**6, 1000), AllReduce(bucket_bytes=9)
    assert seconds(model, algorithm, 4, compute) == close(0.1 + gathered(4000, 4) + LATENCY)
    assert seconds(model, algorithm, 4, late_first) == close(0.1 + ring(BYTES, 4) + 6 * LATENCY)


@pytest.mark.parametrize("lanes", [1, 2, 3, 4])
def test_lanes_overlap_latencies(lanes: int) -> None:
    """Five tiny buckets together (one of use): as many rounds one after the other as the fullest lane has buckets."""
    result = run(tensors(1, 1, 1, 1), AllReduce(bucket_bytes=1), 8, lanes=lanes)
    assert result.step_seconds == close(0.1 + -(-5 // lanes) * LATENCY, slack=1e-5)


LAYERS = Compute(
    forward=0.04, backward=0.08, optimizer=0.01,
    ready={"3.0": 0.02, "2.0": 0.04, "1.0": 0.06, "0.0": 0.08},
    needed={"0.0": 0.0, "1.0": 0.025, "2.0": 0.03, "3.0": 0.035},
)  # fmt: skip


def test_with_an_overlap_of_the_forward_pass_the_front_overtakes() -> None:
    """Of three large layers two are gone when backward ends: the small front one goes next, and all wait for it no longer."""
    model, algorithm = layers(1000, 625_000, 625_000, 625_000), AllReduce(bucket_bytes=9)
    assert ring(0.625 * BYTES, 4) == pytest.approx(0.03)
    joined, late = (run(model, algorithm, 4, LAYERS, overlap_forward=each, latency=0.0) for each in (False, True))
    assert joined.step_seconds == pytest.approx(0.13 + 0.03, abs=1e-3)
    assert late.step_seconds == pytest.approx(0.13 + 0.11 - 0.105, abs=1e-3)
    assert late.bytes_per_step == joined.bytes_per_step


def test_an_overlap_with_nothing_to_send_is_only_compute() -> None:
    result = run(layers(1000, 10, 10, 10), AllReduce(), 1, LAYERS, overlap_forward=True)
    assert result.step_seconds == pytest.approx(0.13)


def test_an_overlap_of_weights_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="moves weights"):
        run(tensors(1000), Gossip(), 4, overlap_forward=True)


def test_the_optimizer_waits_for_the_gradients() -> None:
    compute = Compute(forward=0.03, backward=0.07, optimizer=0.5)
    assert seconds(tensors(10**6), AllReduce(), 4, compute) == close(0.6 + ring(BYTES, 4) + 6 * LATENCY)


# -- weights ----------------------------------------------------------------------------------------------------------


def test_gossip_hides_behind_the_next_step() -> None:
    compute = Compute(forward=0.03, backward=0.07, optimizer=0.01)
    result = run(tensors(10**6), Gossip(wire="fp32"), 4, compute)
    assert (result.step_seconds, result.exposed_seconds) == (pytest.approx(0.11), 0)
    assert (result.bytes_per_step, result.messages_per_step) == (BYTES, 1)
    result = run(tensors(10**6), Gossip(wire="fp16"), 4, compute)
    assert (result.bytes_per_step, result.messages_per_step) == (BYTES / 2, 1)


def test_gossip_in_parts_sends_the_same_in_every_step() -> None:
    model, parts = tensors(1000, 10**6, 7), 4
    whole = run(model, Gossip(), 8)
    cut = [run(model, in_parts(parts, Gossip()), 8, steps=steps) for steps in (parts, 1)]
    assert cut[0].bytes_per_step == pytest.approx(whole.bytes_per_step / parts, rel=1e-6)
    assert cut[1].bytes_per_step == pytest.approx(whole.bytes_per_step / parts, rel=1e-5)


def test_of_algorithms_that_follow_each_other_the_last_one_is_priced() -> None:
    model = tensors(1000, 10**6)
    for before in (AllReduce(), Gossip(wire="fp32")):
        then = Gossip(wire="fp16")
        found, alone = run(model, after(50, then, before=before), 4), run(model, then, 4)
        assert (found.bytes_per_step, found.messages_per_step) == (alone.bytes_per_step, alone.messages_per_step)
        assert found.step_seconds == pytest.approx(alone.step_seconds)


@pytest.mark.parametrize("steps", [1, 8, 17])
def test_whole_cycles_are_priced(steps: int) -> None:
    model, sent = tensors(10**6), BYTES / 2
    assert run(model, Gossip(every=3), 4, steps=steps).bytes_per_step == pytest.approx(sent / 3)
    # Every sixteenth time a ring of all weights in full, and two hops of a number that says whether they differ.
    exact = 2 * 3 / 4 * BYTES + 2 * 4
    assert run(model, GossipPGA(), 4, steps=steps).bytes_per_step == pytest.approx((15 * sent + exact) / 16)
    assert run(tensors(999_999), in_parts(3, Gossip()), 4, steps=steps).bytes_per_step == pytest.approx(999_999 * 2 / 3)


WHOLE_CYCLES = {
    "parts meet all partners": (in_parts(8, Gossip(wire="fp32")), 16, 8, (1 + 2 + 4 + 8) / 4 / 8),
    "every": (Gossip(wire="fp32", every=8, topology=Hypercube()), 16, 8, 8 / 4 / 8),
    "a cycle that is no part of eight": (Gossip(wire="fp32", topology=Hypercube()), 32, 8, 2 * 8 / 5),
    "leaders": (Hierarchical(Gossip(wire="fp32", topology=Hypercube(), every=3)), 32, 4, 1 / 3),
}


@pytest.mark.parametrize("name", WHOLE_CYCLES)
def test_what_leaves_a_machine_is_that_of_whole_cycles_of_partners(name: str) -> None:
    """Of a machine of 8, hops of 1, 2 and 4 among the ranks send 1, 2 and 4 messages to other machines, and longer ones 8; of a
    hypercube only the hops of 8 and more leave it, with 8 messages."""
    algorithm, world, per_node, messages = WHOLE_CYCLES[name]
    result = run(tensors(2**16), algorithm, world, ranks_per_node=per_node)
    assert result.wire_seconds == pytest.approx(messages * 8 * 4 * 2**16 / BANDWIDTH, rel=1e-3)


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: after(5, each)], ids=["alone", "after"])
def test_an_algorithm_that_says_who_shares_a_machine_need_not_be_told(wrap: Callable[[Algorithm], Algorithm]) -> None:
    """Else what stays inside a machine would be charged to the slow link."""
    said, told = (Hierarchical(Gossip(wire="fp32"), ranks_per_node=number) for number in (4, None))
    assert run(tensors(2**16), wrap(said), 16) == run(tensors(2**16), wrap(told), 16, ranks_per_node=4)
    apart = run(tensors(2**16), wrap(said), 16, ranks_per_node=1)
    assert apart.wire_seconds > 2 * run(tensors(2**16), wrap(said), 16).wire_seconds


def test_who_shares_a_machine_is_asked_of_the_part_whose_time_lasts() -> None:
    eight, two = Hierarchical(Gossip(), ranks_per_node=8), Hierarchical(ranks_per_node=2)
    assert after(5, eight, before=two).traits.ranks_per_node == 8
    assert after(5, None, before=two).traits.ranks_per_node == after(5, Gossip(), before=two).traits.ranks_per_node == 2
    assert by_size(100, small=two, large=AllReduce()).traits.ranks_per_node == 2
    assert by_size(100, small=two, large=Hierarchical(ranks_per_node=4)).traits.ranks_per_node is None, "they disagree"


def test_byes_are_counted_over_whole_cycles() -> None:
    """Of three ranks, rank 0 has nobody to meet in every second exchange."""
    for algorithm in (in_parts(8, Gossip(topology=ShiftOne())), Gossip(every=8, topology=ShiftOne())):
        assert run(tensors(2**16), algorithm, 3).bytes_per_step == pytest.approx(2 * 2**16 / 8 / 2)


@pytest.mark.parametrize("lag", [1, 2, 3])
@pytest.mark.parametrize("steps", [1, 8, 11])
def test_where_exchanges_may_lag_whole_ones_are_counted(lag: int, steps: int) -> None:
    """Steps of 0.11 s. One of 0.25 s spans as many as it may, and the first one, in full width, is four times as long."""
    compute, numel = Compute(forward=0.03, backward=0.07, optimizer=0.01), 249_000_000 // 32
    spans = min(lag + 1, 3)
    assert run(tensors(numel), Gossip(wire="fp32", lag=lag), 4, compute, steps=steps).bytes_per_step == pytest.approx(
        4 * numel / spans
    )
    first_is_long = LowPrecisionDecentralized(topology=Ring(directed=True), lag=lag)
    found, later = (run(tensors(numel), first_is_long, 4, compute, steps=n) for n in (steps, 240))
    assert found.step_seconds == pytest.approx(later.step_seconds, rel=1e-3)


def test_buffers_that_hold_infinities_stay_at_home_as_in_training() -> None:
    model = tensors(1000)
    without = run(model, Gossip(), 4)
    model.register_buffer("mask", torch.full((500,), -torch.inf))
    assert run(model, Gossip(), 4) == without
    model.register_buffer("mean", torch.zeros(500))
    assert run(model, Gossip(), 4).bytes_per_step == 3000


def test_with_momentum_correction_vectors_travel_as_with_an_optimizer_that_lends_its_momentum() -> None:
    """Not exactly, so that the numbers of use go on their own, in a round for each doubling of the workers."""
    model = nn.Linear(4096, 8, device="meta")
    plain, corrected = (run(model, ChunkSparse(momentum_correction=on), 16) for on in (False, True))
    assert corrected.messages_per_step == plain.messages_per_step + 4


# EagerDiLoCo is under way for a whole period, and takes none of one step.
@pytest.mark.parametrize(
    "algorithm",
    [a for a in plain() if a.subject == "weights" and hasattr(a, "every") and not isinstance(a, EagerDiLoCo)],
    ids=repr,
)
def test_what_first_exchanges_cost_is_not_priced(algorithm: Algorithm) -> None:
    """Some are in full precision. Every fourth step, or a fourth in every step, sends a fourth, and the line shows no more."""
    model = tensors(2**16, 2**16)  # of which a fourth is no small bucket
    always = run(model, replace(algorithm, every=1), 8)
    others = [replace(algorithm, every=4)]
    others += [] if isinstance(algorithm, GossipPGA) else [in_parts(4, replace(algorithm, every=1))]
    for other in others:
        assert run(model, other, 8).bytes_per_step == pytest.approx(always.bytes_per_step / 4, rel=0.02)
    slow = {"compute": Compute(forward=0, backward=0), "latency": 0}
    assert seconds(model, replace(algorithm, every=4), 8, **slow) <= 1.05 * seconds(
        model, replace(algorithm, every=1), 8, **slow
    )


def test_the_rank_that_receives_most_sets_the_pace_of_a_directed_graph() -> None:
    """Rank 0 receives from all three others; nobody sends to more than two. One number travels beside the weights."""
    uneven = PushSum(topology=OutNeighbours(((1,), (0, 2), (0, 3), (0,))))
    result = run(tensors(10**6), uneven, 4)
    assert result.wire_seconds == pytest.approx(3 * 8 * (BYTES + 8) / BANDWIDTH)
    assert result.bytes_per_step == BYTES + 8, "of rank 0"


def test_a_profile_names_parameters_whose_pieces_travel() -> None:
    model = tensors(1000, 10**6, 7)
    compute = Compute.uniform(model, forward=0.03, backward=0.07)
    assert seconds(model, in_parts(4, Gossip()), 8, compute, steps=4) == pytest.approx(0.1)


@pytest.mark.parametrize("history", [0, 1, 2])
def test_what_the_optimizer_remembers_travels_with_the_weights(history: int) -> None:
    model, remembering = tensors(1000, 10**6), {"optimizer": OPTIMIZERS[history]}
    sent = run(model, GossipGraD(), 8, **remembering).bytes_per_step
    assert sent == (1 + history) * run(model, Gossip(), 8).bytes_per_step
    assert run(model, GossipGraD(history=False), 8, **remembering).bytes_per_step == run(model, Gossip(), 8).bytes_per_step
    parts = by_size(10**5, small=GossipGraD(), large=Gossip())
    assert run(model, parts, 8, **remembering).bytes_per_step == 2 * (10**6 + 1000 * (1 + history))
    cut = in_parts(4, GossipGraD())
    assert run(model, cut, 8, **remembering, steps=4).bytes_per_step == pytest.approx(sent / 4)


def test_what_is_applied_late_may_take_the_whole_step() -> None:
    """An exchange of 0.105 s beside 0.11 s of compute, of which the optimizer takes 0.01 s."""
    compute, numel = Compute(forward=0.03, backward=0.07, optimizer=0.01), 13_000_000 // 4
    sent = 8 * 4 * numel / BANDWIDTH + LATENCY
    assert sent == pytest.approx(0.105)
    for late, expected, exposed in ((False, sent + 0.01, sent - 0.1), (True, 0.11, 0)):
        result = run(tensors(numel), GossipGraD(wire="fp32", history=False, late=late), 4, compute)
        assert result.step_seconds == pytest.approx(expected)
        assert result.exposed_seconds == pytest.approx(exposed)
    slow = run(tensors(10**8), GossipGraD(wire="fp32", history=False, late=True), 4, compute)
    assert slow.step_seconds == pytest.approx(8 * 4e8 / BANDWIDTH + LATENCY), "then the wire is the limit, all the time"


@pytest.mark.parametrize("lag", [0, 1, 2, 3])
def test_what_may_lag_is_waited_for_later(lag: int) -> None:
    """An exchange of 0.25 s beside steps of 0.11 s: it spans three updates, or as many as it may."""
    compute, numel = Compute(forward=0.03, backward=0.07, optimizer=0.01), 249_000_000 // 32
    result = run(tensors(numel), Gossip(wire="fp32", lag=lag), 4, compute, steps=24)
    spans = min(lag + 1, 3)
    assert result.bytes_per_step == pytest.approx(4 * numel / spans)
    assert result.exposed_seconds == pytest.approx(max(0.0, 0.25 - 0.11 * (spans - 1) - 0.1) / spans)


def test_what_may_lag_does_not_where_the_wire_is_fast() -> None:
    model = tensors(10**6)
    assert asdict(run(model, Gossip(lag=3), 4)) == pytest.approx(asdict(run(model, Gossip(), 4)))
    assert asdict(run(model, Gossip(lag=1, every=2), 4)) == pytest.approx(asdict(run(model, Gossip(every=2), 4)))


def test_a_period_counts_exchanges_and_not_steps_where_they_may_lag() -> None:
    """Every second exchange is that of all workers, whatever steps they are at."""
    compute, numel = Compute(forward=0.03, backward=0.07, optimizer=0.01), 249_000_000 // 32
    lagging = run(tensors(numel), GossipPGA(wire="fp32", period=2, lag=9), 2, compute, steps=60)
    # Among two, both kinds send each weight once; an all-reduce in two messages and a question, gossip in one message.
    assert lagging.bytes_per_step == pytest.approx(4 * numel / 3)
    assert lagging.messages_per_step == pytest.approx((3 + 1) / 6)
    assert lagging.exposed_seconds == 0


def test_gossip_on_a_slow_wire() -> None:
    """The exchange has forward and backward to hide behind, not the optimizer."""
    compute = Compute(forward=0.03, backward=0.07, optimizer=0.01)
    result = run(tensors(10**8), Gossip(wire="fp32"), 4, compute)
    assert result.step_seconds == pytest.approx(8 * 4e8 / BANDWIDTH + LATENCY + 0.01)


def test_gossip_costs_the_same_in_any_world() -> None:
    times = [asdict(run(tensors(10**8, 10), Gossip(), world)) for world in (2, 3, 8, 100)]
    assert times[1:] == [pytest.approx(times[0])] * 3
    assert seconds(tensors(10**6), AllReduce(), 100) > 2 * seconds(tensors(10**6), AllReduce(), 8)


# -- flows of every shape ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Messages(Algorithm, register=False):
    """Sends the bucket five times, concurrently or one after the other."""

    together: bool

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        handles = []
        for _ in range(5):
            handles.append((yield start(Permute(bucket.flat, shift(1, ctx.world)))))
            if not self.together:
                yield wait(handles[-1])
        for handle in reversed(handles):
            result = yield wait(handle)
        return result


def test_outstanding_operations_share_a_latency() -> None:
    wire = 5 * 8 * BYTES / BANDWIDTH
    assert seconds(tensors(10**6), Messages(together=True), 2) == close(0.1 + wire + LATENCY)
    assert seconds(tensors(10**6), Messages(together=False), 2) == close(0.1 + wire + 5 * LATENCY)


def test_an_overlap_waits_for_the_numbers_of_use_before_the_first_update() -> None:
    """Two hops, while the bucket takes one."""
    model, algorithm = tensors(1000), Messages(together=True)
    result = run(model, algorithm, 4, Compute(forward=0.04, backward=0.08, optimizer=0.01), overlap_forward=True, latency=0.1)
    assert result.step_seconds == close(0.13 + 2 * 0.1, slack=1e-3)


def test_nobody_waits_for_the_numbers_of_use_in_a_bucket() -> None:
    assert LAYERS.needed_at(["3.0", USAGE]) == LAYERS.needed_at(["3.0"]) == 0.035
    assert LAYERS.needed_at([USAGE]) == LAYERS.forward


@dataclass(frozen=True, kw_only=True)
class LowRank(Algorithm, register=False):
    """Communicates like PowerSGD of rank 1: twice inside one exchange."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        matrix = bucket.flat.view(1000, -1)
        p = yield from all_reduce(matrix @ matrix[0])
        q = yield from all_reduce(matrix.t() @ p)
        return torch.outer(p, q).view(-1)


def test_an_exchange_that_communicates_twice() -> None:
    sent = ring(4 * 1000, 4) + ring(4 * 5000, 4)
    assert seconds(tensors(5 * 10**6), LowRank(), 4) == close(0.1 + sent + 2 * 6 * LATENCY)


@dataclass(frozen=True, kw_only=True)
class Finishing(AllReduce, register=False):
    """Sends as much again once the step's buckets are through."""

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None]:
        state["norms"] = state["norms"] + 1
        yield from all_reduce(torch.cat([bucket.flat for bucket in buckets]))


def test_what_belongs_to_the_step_comes_after_its_buckets_beside_the_next_forward() -> None:
    """It is waited for at the first gradient of the next backward pass, which is there when that begins."""
    compute = Compute(forward=FORWARD, backward=0.07, ready={"1": 0.0})
    assert seconds(tensors(10**6, 0), Finishing(), 4, compute) == close(0.1 - FORWARD + 2 * (ring(BYTES, 4) + 6 * LATENCY))


@dataclass(frozen=True, kw_only=True)
class Seldom(Finishing, register=False):
    """The same, in every second step."""

    @property
    def cadence(self) -> Cadence:
        return every(2)


@dataclass(frozen=True, kw_only=True)
class Mixed(AllReduce, register=False):
    """The first parameter by one algorithm, the others by another."""

    def route(self, name: str, tensor: torch.Tensor) -> Algorithm:
        return Seldom() if name == "0" else AllReduce()


def test_what_belongs_to_a_step_is_left_out_where_nothing_is_exchanged() -> None:
    sent = run(tensors(10**6, 10**6), Mixed(), 4).bytes_per_step - run(tensors(10**6, 10**6), AllReduce(), 4).bytes_per_step
    assert sent == pytest.approx(0.0, abs=100), "twice as much for the first one, in half of the steps"


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("warmup", [0, 1])
def test_what_a_first_exchange_sends_more_is_not_in_the_window(delay: int, warmup: int) -> None:
    found = run(tensors(10**6), DiLoCo(every=4, delay=delay), 4, steps=4, warmup=warmup)
    assert found.bytes_per_step == close(2 * 3 / 4 * BYTES / 4, 100), "one average in four steps"


@dataclass(frozen=True, kw_only=True)
class Deciding(Algorithm, register=False):
    """Communicates only if it decides to, which needs a value."""

    default: bool

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if (yield decide("is it large", self.default, lambda: bool(bucket.flat.norm() > 1))):
            yield from all_reduce(bucket.flat.clone())
        return bucket.flat


def test_decisions_take_the_default() -> None:
    assert run(tensors(10**6), Deciding(default=False), 4).bytes_per_step < 10
    assert run(tensors(10**6), Deciding(default=True), 4).bytes_per_step > BYTES


@dataclass(frozen=True, kw_only=True)
class Babbling(Algorithm, register=False):
    """Yields what is no command."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        return (yield "send this please")


def test_other_commands_are_refused() -> None:
    with pytest.raises(TypeError, match="send this please"):
        seconds(tensors(1), Babbling(), 2)


@dataclass(frozen=True, kw_only=True)
class Cycling(AllReduce, register=False):
    """Communicates every fourth step, as local SGD does."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        return (yield from super().exchange(bucket, state, ctx)) if ctx.step % 4 == 0 else bucket.flat


def test_the_mean_is_over_steps() -> None:
    assert seconds(tensors(10**6), Cycling(), 8, steps=4) == close(0.1 + (ring(BYTES, 8) + 14 * LATENCY) / 4)


# -- laws -------------------------------------------------------------------------------------------------------------

sizes = st.lists(st.integers(0, 300_000), min_size=1, max_size=6)
links = st.builds(Link, bandwidth=st.floats(1e7, 1e11), latency=st.floats(0, 0.01))


@pytest.mark.parametrize("algorithm", plain(), ids=repr)
@settings(max_examples=8, deadline=None)
@given(sizes, st.integers(1, 9), links, st.floats(1.01, 10), st.integers(1, 3))
def test_more_bandwidth_never_hurts_and_no_step_beats_the_bound(
    algorithm: Algorithm, numels: list[int], world: int, link: Link, factor: float, lanes: int
) -> None:
    """With a line for every rank. Where ranks share one, a faster line may let another message go first, and the step take
    a message longer."""
    model = nn.ModuleList([tensors(*numels), nn.Linear(64, 64, device="meta")])  # some methods are for matrices
    compute = Compute.uniform(model, forward=0.01, backward=0.02, optimizer=0.001)
    faster = Link(bandwidth=link.bandwidth * factor, latency=link.latency)
    slow, fast = (
        step_time(model, algorithm, world=world, link=each, compute=compute, lanes=lanes, ranks_per_node=1)
        for each in (link, faster)
    )
    assert fast.step_seconds <= slow.step_seconds + 8 * 100 / link.bandwidth
    assert fast.bytes_per_step == slow.bytes_per_step
    for result in (slow, fast):
        assert result.step_seconds >= result.bound_seconds * (1 - 1e-9)
        assert result.step_seconds == pytest.approx(result.compute_seconds + result.exposed_seconds)


# -- profiles ---------------------------------------------------------------------------------------------------------


def test_uniform_profile_goes_backwards_in_proportion_to_size() -> None:
    compute = Compute.uniform(tensors(10, 30, 60), forward=1, backward=10)
    assert compute.ready == pytest.approx({"2": 6.0, "1": 9.0, "0": 10.0})


def test_layered_profile() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5)))
    compute = Compute.layered(model, {"0": (1, 2), "1": (0.5, 0.25), "2": (1, 1), "2.1": (2, 4)}, optimizer=3)
    assert compute.ready == {"2.1.weight": 4, "2.1.bias": 4, "2.0.weight": 5, "2.0.bias": 5, "0.weight": 7.25, "0.bias": 7.25}
    assert (compute.forward, compute.backward, compute.seconds) == (4.5, 7.25, 14.75)
    assert compute.needed == {
        "0.weight": 0,
        "0.bias": 0,
        "2.0.weight": 1.5,
        "2.0.bias": 1.5,
        "2.1.weight": 2.5,
        "2.1.bias": 2.5,
    }
    assert set(Compute.layered(model, {"": (1, 2)}).ready.values()) == {2}
    with pytest.raises(ConfigurationError, match=r"'2\.0\.weight' belongs to none"):
        Compute.layered(model, {"0": (1, 2)})


def test_frozen_parameters_do_not_travel() -> None:
    model = tensors(10, 1000)
    model[1].requires_grad_(False)
    assert run(model, Gossip(wire="fp32"), 2, Compute.uniform(model, forward=1, backward=1)).bytes_per_step == 40


@pytest.mark.parametrize(
    "make",
    [
        lambda: Link(bandwidth=0),
        lambda: Link(bandwidth=float("nan")),
        lambda: Link(bandwidth="200mbit"),
        lambda: Link(bandwidth=True),
        lambda: Link(latency=-1),
        lambda: Link(latency="1ms"),
        lambda: Link(latency=float("inf")),
        lambda: Compute(forward=-1, backward=0),
        lambda: Compute(forward=float("nan"), backward=0),
        lambda: Compute(forward="0", backward=0),
        lambda: Compute(forward=0, backward=1, ready={"0": 2}),
        lambda: Compute(forward=0, backward=1, ready={"0": "1"}),
        lambda: run(tensors(1), AllReduce(), 0),
        lambda: run(tensors(1), AllReduce(), 2, lanes=0),
        lambda: run(tensors(1), AllReduce(), 2, steps=0),
        lambda: run(tensors(1), AllReduce(), 2, warmup=-1),
        lambda: run(tensors(1), AllReduce(), 2, Compute(forward=0, backward=1, ready={"1": 1})),
        lambda: run(tensors(1), AllReduce(), 2, buffers="none"),
    ],
)
def test_nonsense_is_refused(make) -> None:
    with pytest.raises(ConfigurationError):
        make()


DEAF = PushSum(topology=OutNeighbours(((1,), (0,), (0,))))
"""Nobody sends to rank 2."""


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"algorithm": AllReduce}, r"algorithm must be an instance of Algorithm; got .*: write AllReduce\(\)"),
        ({"world": 2.5}, r"world must be a whole number, at least 1; got 2\.5"),
        ({"warmup": "1"}, "warmup must be a whole number, at least 0; got '1'"),
        ({"link": 200e6}, r"link must be an instance of Link; got 200000000\.0: write for example Link\("),
        ({"compute": 0.1}, "compute must be an instance of Compute"),
        ({"model": tensors(1).state_dict()}, "model must be an instance of Module"),
        ({"inside": 1e9, "ranks_per_node": 2}, "inside must be an instance of Link"),
        ({"inside": Link()}, "with ranks_per_node=1 no two share one"),
        ({"compute": Compute(forward=1, backward=1, needed={"1": 1})}, r"compute\.needed names parameters .*: 1"),
        ({"algorithm": DEAF, "world": 3}, "does not connect 3 ranks"),
        ({"algorithm": Hierarchical(DEAF), "world": 6, "ranks_per_node": 2}, "does not connect 3 ranks"),
    ],
)
def test_what_cannot_be_priced_is_refused_with_the_reason(options: dict, complaint: str) -> None:
    given = {"model": tensors(1), "algorithm": AllReduce(), "world": 2, "link": Link()}
    with pytest.raises(ConfigurationError, match=complaint):
        step_time(**given | {"compute": Compute(forward=1, backward=1)} | options)


def test_buffers_that_must_not_be_averaged_are_refused_as_in_training() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    given = {"world": 2, "link": Link(), "compute": Compute(forward=1, backward=1)}
    with pytest.raises(ConfigurationError, match="take buffers='local'"):
        step_time(model, PushSum(), **given)
    assert step_time(model, PushSum(), buffers="local", **given).step_seconds > 0


def test_what_stays_on_a_machine_is_not_bound_by_the_link_between_machines() -> None:
    """Of 16 ranks on two machines two leaders exchange; all ask for use, whose four hops cross 1, 2, 4 and 8 times."""
    found = run(tensors(1000, 1_000_000), Hierarchical(AllReduce()), 16, ranks_per_node=8)
    wire = ring(BYTES + 4000, 2) + 8 * 2 * (1 + 2 + 4 + 8) / BANDWIDTH
    assert found.bound_seconds == pytest.approx(0.1)
    assert found.wire_seconds == pytest.approx(wire)
    # The four hops share the line with the bucket, whose two messages follow each other, and end before it.
    assert found.step_seconds == close(0.1 + wire + 2 * LATENCY)


@pytest.mark.parametrize(
    ("algorithm", "messages"),
    [
        (AllReduce(), 2 * 15 / 16),  # a ring: one rank of each machine sends to another machine
        (Gossip(wire="fp32", topology=Dissemination()), (1 + 2 + 4 + 8) / 4),
        (Gossip(wire="fp32", topology=Hypercube()), 8 / 4),  # partners 1, 2 and 4 places away are on the same machine
    ],
    ids=repr,
)
def test_ranks_of_one_machine_share_its_link(algorithm: Algorithm, messages: float) -> None:
    found = run(tensors(1_000_000), algorithm, 16, ranks_per_node=8)
    assert found.wire_seconds == pytest.approx(messages * 4 * 1_000_000 * 8 / BANDWIDTH, rel=1e-3)


def test_parts_for_everyone_come_from_every_rank_of_a_machine() -> None:
    matrix = nn.ParameterList([torch.empty(2000, 2000, device="meta")])
    alone, shared = (run(matrix, ByteGrad(), 16, ranks_per_node=number) for number in (1, 8))
    # Eight ranks pass a part to each of eight others; alone, one to each of fifteen.
    assert shared.wire_seconds / alone.wire_seconds == pytest.approx(8 * 8 / 15, rel=1e-3)


@pytest.mark.parametrize("machines", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]])
def test_what_crosses_the_link_of_a_machine(machines: list[int]) -> None:
    """Beside messages counted one by one."""
    world, data = len(machines), torch.empty(len(machines), 3, device="meta")

    def most(messages: list[tuple[int, int]]) -> int:
        ways = messages, [(b, a) for a, b in messages]
        return max(sum(machines[a] == m != machines[b] for a, b in way) for way in ways for m in machines)

    everyone = [(a, b) for a in range(world) for b in range(world)]
    assert crossing(ops.AllToAll(data), machines) == 12 * most(everyone)
    assert crossing(ops.AllGather(data), machines) == 12 * world * most(everyone)
    ring = [(a, (a + 1) % world) for a in range(world)]
    assert crossing(ops.AllReduce(data), machines) == ops.AllReduce(data).traffic(world).bytes * most(ring)
    for hop in range(world):
        along = [(a, (a + hop) % world) for a in range(world)]
        assert crossing(ops.Permute(data, shift(hop, world)), machines) == 12 * world * most(along)
    star = Digraph((tuple(range(1, world)), *[()] * (world - 1)))
    assert crossing(ops.Push(data, star), machines) == 12 * world * most([(0, b) for b in range(1, world)])
    heard = Digraph(((), *[(0,)] * (world - 1)))
    assert crossing(ops.Push(data, heard), machines) == 12 * world * most([(a, 0) for a in range(1, world)])
    for source in range(world):
        has, tree = [source], []
        while len(has) < world:  # each rank that has it sends it on
            tree += [(a, (a + len(has)) % world) for a in has[: world - len(has)]]
            has = [(source + place) % world for place in range(min(world, 2 * len(has)))]
        assert crossing(ops.Broadcast(data, source), machines) == 12 * world * most(tree)
