"""The vocabulary: what an operation costs, what it says, and that drivers know nothing else."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.comm import ops
from gossamer.comm.digraph import Digraph, RandomPush
from gossamer.comm.loopback import LocalPort, solo_runner
from gossamer.comm.operations import Traffic, result_like
from gossamer.comm.ops import all_gather, all_reduce, all_to_all, broadcast, decide, drive, permute
from gossamer.comm.runner import Meter
from gossamer.comm.topology import Permutation, shift
from gossamer.errors import ConfigurationError

worlds = st.integers(2, 200)


def fp32(numel: int) -> torch.Tensor:
    return torch.empty(numel, device="meta")


@given(worlds, st.integers(1, 10**6))
def test_all_reduce_is_a_ring(world: int, numel: int) -> None:
    traffic = ops.AllReduce(fp32(numel)).traffic(world)
    assert world * (traffic.bytes - 1) < 2 * (world - 1) * 4 * numel <= world * traffic.bytes
    assert traffic.rounds == 2 * (world - 1)


@settings(deadline=None)
@given(worlds, st.integers(1, 10**6))
def test_concurrent_messages_are_one_round(world: int, numel: int) -> None:
    assert ops.Permute(fp32(numel), shift(1, world)).traffic(world) == Traffic(4 * numel, 1)
    assert ops.AllGather(fp32(numel)).traffic(world) == Traffic(4 * numel * (world - 1), 1)
    assert ops.AllToAll(fp32(world * numel).view(world, -1)).traffic(world) == Traffic(4 * numel * (world - 1), 1)


def test_a_push_is_priced_at_the_rank_that_sends_or_receives_most() -> None:
    op = ops.Push(fp32(10), Digraph(((1,), (0, 2), (0, 3), (0,))))
    assert op.traffic(4) == Traffic(3 * 40, 1)
    assert [op.sent(4, rank) for rank in range(4)] == [Traffic(40, 1), Traffic(80, 1), Traffic(80, 1), Traffic(40, 1)]
    assert ops.Push(fp32(10), RandomPush(peers=30).at(0, 7)).traffic(7) == Traffic(6 * 40, 1)
    assert ops.Push(fp32(10), Digraph(((), ()))).traffic(2) == Traffic(0, 0)


def test_broadcast_is_priced_at_its_root() -> None:
    assert [ops.Broadcast(fp32(10)).traffic(world).rounds for world in (1, 2, 3, 4, 5, 8, 9)] == [0, 1, 2, 2, 3, 3, 4]
    assert ops.Broadcast(fp32(10)).traffic(8).bytes == 3 * 40


@pytest.mark.parametrize("world", range(1, 18))
@pytest.mark.parametrize("source", [0, 1])
def test_a_broadcast_is_sent_on_to_everyone_once(world: int, source: int) -> None:
    op = ops.Broadcast(fp32(10), source % world)
    sent = [op.sent(world, rank) for rank in range(world)]
    assert sum(each.bytes for each in sent) == 40 * (world - 1)
    assert sent[source % world] == op.traffic(world) == max(sent, key=lambda each: each.bytes)


def every_op(world: int) -> list[ops.Op]:
    x = torch.arange(4.0 * world).view(world, 4)
    return [
        ops.AllReduce(x.clone()),
        ops.AllReduce(x.clone(), "max"),
        ops.Permute(x.clone(), shift(1, world)),
        ops.AllToAll(x.clone()),
        ops.AllGather(x.clone()),
        ops.Broadcast(x.clone()),
    ]


@pytest.mark.parametrize("op", every_op(1), ids=str)
def test_alone_an_operation_costs_nothing_and_gives_itself(op: ops.Op) -> None:
    assert op.traffic(1) == Traffic(0, 0)
    runner, before = solo_runner(), op.tensor.clone()
    result = runner.run(lambda: ops.perform(op), "alone")
    assert torch.equal(result.reshape(before.shape), before)
    assert result.shape == (result_like(op, 1).shape)
    in_place = isinstance(op, ops.AllReduce | ops.Broadcast)
    assert (result.data_ptr() == op.tensor.data_ptr()) is in_place, "a write into what was sent would be one into this"
    assert runner.meters()[0].bytes == 0


def test_alone_a_message_arrives_where_it_should() -> None:
    into = torch.zeros(3)
    assert solo_runner().run(lambda: permute(torch.ones(3), shift(1, 1), into), "alone") is into
    assert torch.equal(into, torch.ones(3))


@pytest.mark.parametrize("make", [ops.AllReduce, ops.AllToAll, ops.AllGather, lambda x: ops.Permute(x, shift(1, 2))])
def test_what_lies_between_other_numbers_is_refused(make: Callable[[torch.Tensor], ops.Op]) -> None:
    """Gloo would sum those beside it."""
    matrix = torch.zeros(4, 6)
    for apart in (matrix[:, ::2], matrix.t(), matrix[:, :3]):
        with pytest.raises(ConfigurationError, match=r"\(float32\[\d, \d\].*\): the tensor is not contiguous"):
            make(apart)
    for together in (matrix[1:3], matrix[:0], torch.zeros(1, 3).t(), torch.zeros(())):
        make(together)


def test_a_rank_that_is_its_own_partner_sends_nothing() -> None:
    assert ops.Permute(fp32(10), shift(4, 4)).traffic(4) == Traffic(0, 0)
    bye = ops.Permute(fp32(10), Permutation((1, 0, 2)))
    assert [bye.sent(3, rank) for rank in range(3)] == [Traffic(40, 1), Traffic(40, 1), Traffic(0, 0)]
    assert bye.traffic(3) == Traffic(40, 1), "of the busiest"


@given(st.lists(st.sampled_from(range(6)), max_size=6), st.integers(1, 16))
def test_a_meter_adds_up(chosen: list[int], world: int) -> None:
    meter, picked = Meter(), [every_op(world)[i] for i in chosen]
    for op in picked:
        meter.count(op, world)
    assert meter.bytes == sum(op.traffic(world).bytes for op in picked)
    assert meter.messages == sum(op.traffic(world).rounds for op in picked)


def test_an_operation_says_what_must_agree() -> None:
    x = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert [str(op) for op in every_op(2)[:1]] == ["all_reduce(float32[2, 4])"]
    assert str(ops.AllReduce(x, "max")) == "all_reduce(bfloat16[2, 3], max)"
    assert str(ops.Permute(x, shift(1, 3))) == "permute(bfloat16[2, 3], to=[2, 0, 1])"
    assert str(ops.Broadcast(x, 1)) == "broadcast(bfloat16[2, 3], source=1)"
    assert ops.Permute(x, shift(1, 3)).peers(0, 3) == "rank 1 (sending to rank 2)"
    assert str(ops.Push(x, Digraph(((1, 2), (2,), (0,))))) == "push(bfloat16[2, 3], to=[[1, 2], [2], [0]])"
    assert ops.Push(x, Digraph(((1, 2), (2,), (0,)))).peers(2, 3) == "ranks [0, 1] (sending to [0])"


def test_short_forms_are_start_and_wait() -> None:
    x = torch.zeros(2, 2)
    for flow, op in [
        (all_reduce(x), ops.AllReduce),
        (permute(x, shift(1, 2)), ops.Permute),
        (all_to_all(x), ops.AllToAll),
        (all_gather(x), ops.AllGather),
        (broadcast(x), ops.Broadcast),
    ]:
        start = flow.send(None)
        assert isinstance(start, ops.Start)
        assert isinstance(start.op, op)
        wait = flow.send("a handle")
        assert isinstance(wait, ops.Wait)
        assert wait.handle == "a handle"
        with pytest.raises(StopIteration) as stop:
            flow.send("the result")
        assert stop.value.value == "the result"


def test_values_decide_where_there_are_values() -> None:
    def flow():
        return (yield decide("which", "default", lambda: "from data"))

    assert drive(flow(), LocalPort(Meter())) == "from data"


def test_a_driver_refuses_other_commands() -> None:
    def flow():
        yield "send this please"

    with pytest.raises(TypeError, match="send this please"):
        drive(flow(), LocalPort(Meter()))
