"""Buckets fill during backward, leave in the plan's order, and end as the gradients."""

import gc
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, after, loopback
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.cadence import Cadence, every
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_reduce
from gossamer.errors import ConfigurationError
from gossamer.state import State

LOG: list[tuple[int, int, tuple[str, ...]]] = []


@dataclass(frozen=True, kw_only=True)
class Logged(Algorithm, register=False):
    """An exact all-reduce that records in which order buckets leave."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.rank == 0:
            LOG.append((ctx.step, bucket.index, bucket.layout.names))
        return (yield from all_reduce(bucket.flat / ctx.world))


class Reversed(nn.Module):
    """The layer defined first is used last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.unused = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x))


def make(algorithm: Algorithm, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, Any, gossamer.Replica]:
    model = model or Reversed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, gossamer.replicate(model, optimizer, algorithm, **options)


def test_the_order_is_learned_in_the_first_step() -> None:
    def body(rank: int) -> list[list[str]]:
        model, _, replica = make(Logged(bucket_bytes=1))
        plans = []
        for _ in range(3):
            model(torch.ones(1, 3)).sum().backward()
            plans.append([name for bucket in replica.state_dict()["plan"]["buckets"] for name in bucket])
        return plans

    LOG.clear()
    plans = loopback(body, 2)
    assert plans[0] == plans[1]
    assert plans[0] == [["last.weight", "first.weight", "unused.weight"]] * 3
    order = [[names[0] for step, _, names in LOG if step == wanted] for wanted in range(3)]
    assert order[0] == ["unused.weight", "first.weight", "last.weight"], "reverse order of definition, until it is known"
    assert order[1] == order[2] == ["last.weight", "first.weight", "unused.weight"]


def test_every_rank_uses_the_order_of_rank_0() -> None:
    """Ranks whose graphs differ see other orders; the plan is one."""

    class Either(nn.Module):
        def __init__(self, swap: bool) -> None:
            super().__init__()
            self.a, self.b, self.swap = nn.Linear(3, 3), nn.Linear(3, 3), swap

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(x)) if self.swap else self.b(self.a(x))

    def body(rank: int) -> Any:
        model, optimizer, replica = make(AllReduce(bucket_bytes=1), Either(swap=rank == 1))
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + step + 1.0)).sum().backward()
            optimizer.step()
        return replica.state_dict()["plan"], torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    (plan0, weights0), (plan1, weights1) = loopback(body, 2)
    assert plan0 == plan1
    assert torch.equal(weights0, weights1)


def test_buckets_leave_while_backward_goes_on() -> None:
    """When the last gradient comes, every bucket before its own is under way."""
    model, optimizer, replica = make(AllReduce(bucket_bytes=1), nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    sync, under_way = replica._gradients, []
    assert sync is not None
    model[0].weight.register_post_accumulate_grad_hook(lambda p: under_way.append(sync.exchange.launched))
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
    assert all(count >= 6 for count in under_way[1:]), under_way


def test_gradients_keep_the_strides_of_their_parameters() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    make(AllReduce(), model)
    for _ in range(3):
        model(torch.ones(1, 3, 4, 4)).sum().backward()
        assert model.weight.grad.stride() == model.weight.stride()
        assert not model.weight.grad.is_contiguous()


def test_the_gradient_is_the_mean_and_stays_it_under_accumulation() -> None:
    def body(rank: int) -> None:
        model, _, replica = make(AllReduce(bucket_bytes=1), nn.Linear(1, 1, bias=False))

        def backward(slope: float) -> float:
            (model.weight * slope).sum().backward()
            return model.weight.grad.item()

        assert backward(4.0 * rank) == 4.0
        assert backward(8.0 * rank) == 4.0 + 8.0, "what was communicated, and the mean of what was added"
        model.zero_grad(set_to_none=False)
        with replica.no_sync():
            assert backward(2.0 * rank) == 2.0 * rank
            assert backward(2.0 * rank) == 4.0 * rank
        assert backward(2.0 * rank) == 6.0
        model.zero_grad()
        assert model.weight.grad is None
        assert backward(1.0) == 1.0
        assert replica.step == 4

    loopback(body, 3)


@pytest.mark.parametrize("to_none", [True, False])
def test_parameters_that_backward_does_not_reach(to_none: bool) -> None:
    def body(rank: int) -> None:
        model, _, _ = make(AllReduce())
        model(torch.ones(1, 3)).sum().backward()
        assert model.unused.weight.grad is None, "unused on every rank"
        model.zero_grad(set_to_none=to_none)
        (model.first(torch.ones(1, 3)) if rank else model.unused(torch.ones(1, 3))).sum().backward()
        assert torch.equal(model.unused.weight.grad, torch.full((3, 3), 1 / 3)), "used on rank 0 only"
        assert torch.equal(model.first.weight.grad, torch.full((3, 3), 2 / 3))
        if to_none:
            assert model.last.weight.grad is None
        else:
            assert model.last.weight.grad.eq(0).all()

    loopback(body, 3)


def test_nothing_of_a_step_is_kept_until_the_next() -> None:
    """No ticket, and no tensor beside the gradients themselves (once the order is learned)."""

    @dataclass(frozen=True, kw_only=True)
    class Traced(Algorithm, register=False):
        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            share = bucket.flat / ctx.world
            shares.append(weakref.ref(share))
            mean = yield from all_reduce(share.clone())
            return mean * 1.0

    shares: list[Any] = []
    model, optimizer, replica = make(Traced(bucket_bytes=1))
    sync = replica._gradients
    assert sync is not None
    for number in range(4):
        optimizer.zero_grad()
        first = [weakref.ref(bucket.flat) for bucket in sync.exchange.buckets]
        model(torch.ones(1, 3)).sum().backward()
        if number == 0:
            continue
        assert not sync.exchange.launched
        gc.collect()
        assert [reference() for reference in first] == [None] * len(first), "the flat tensors that went on the wire"
        assert [reference() for reference in shares] == [None] * len(shares)
        flats = {bucket.flat.untyped_storage().data_ptr() for bucket in sync.exchange.buckets}
        assert {p.grad.untyped_storage().data_ptr() for p in model.parameters() if p.grad is not None} <= flats
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Remembers(Algorithm, register=False):
    """Counts its steps per element, and per step of the whole."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        state["count"] = state["count"] + 1
        return (yield from all_reduce(bucket.flat / ctx.world))

    def finish(self, buckets: Any, states: Any, state: State, ctx: Context) -> Flow[None]:
        total = yield from all_reduce(torch.ones(1))
        state["finished"] = state["finished"] + total / ctx.world


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_reaches_no_state_of_any_rank(bad: float) -> None:
    def body(rank: int) -> None:
        model, optimizer, replica = make(Remembers(bucket_bytes=1))
        for step in range(4):
            model.zero_grad()
            (model(torch.ones(1, 3)).sum() * (bad if step == 2 and rank == 1 else 1)).backward()
            assert model.first.weight.grad.isfinite().all() == (step != 2)
            if step != 2:
                optimizer.step()
        state = replica.state_dict()
        assert all(count.eq(3).all() for count in state[f"rank{rank}"][0]["count"].values())
        assert [kept[""] for key, kept in state[f"rank{rank}"][1][0].items() if key.endswith(": finished")] == [3]

    loopback(body, 2)


def test_two_models_of_one_process_do_not_mix() -> None:
    def body(rank: int) -> tuple[float, float]:
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        replicas = [make(AllReduce(), model)[2] for model in models]
        ((models[0].weight * rank).sum() + (models[1].weight * 10 * rank).sum()).backward()
        assert [replica.step for replica in replicas] == [1, 1]
        return models[0].weight.grad.item(), models[1].weight.grad.item()

    assert loopback(body, 3) == [(1.0, 10.0)] * 3


def test_buckets_go_when_weights_take_over() -> None:
    """What is unsent has been handed over; from then on a copy of the gradients would be kept for nothing."""

    def body(rank: int) -> list[int]:
        model = nn.Linear(16, 16, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm = after(2, Gossip(), before=ScatterReduce())
        replica = gossamer.replicate(model, optimizer, algorithm)
        found = []
        for step in range(6):
            if step == 5:
                replica.load_state_dict(replica.state_dict())
            optimizer.zero_grad()
            model(torch.ones(1, 16) * (rank + 1)).sum().backward()
            optimizer.step()
            assert replica._gradients is not None
            exchange = replica._gradients.exchange
            found.append(sum(b.flat.numel() for b in exchange.buckets) + sum(len(s.items()) for s in exchange.states))
        return found

    for found in loopback(body, 2):
        assert found == [257, 257, 256, 0, 0, 0]


def test_buckets_come_back_if_gradients_travel_again() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Sometimes(Algorithm, register=False):
        @property
        def cadence(self) -> Cadence:
            return every(3)

        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            return (yield from all_reduce(bucket.flat / ctx.world))

    def body(rank: int) -> list[float]:
        model, optimizer, _ = make(after(1, Sometimes()), nn.Linear(2, 1, bias=False))
        found = []
        for _ in range(7):
            optimizer.zero_grad()
            (model.weight.sum() * rank).backward()
            found.append(model.weight.grad[0, 0].item())
        return found

    assert loopback(body, 3)[2] == [1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 1.0]


def test_a_gradient_that_cannot_travel_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(10, 3))
    _, _, replica = make(AllReduce(), model)
    model[0].sparse = True  # where replicate() has not seen it
    told: list[str] = []
    monkeypatch.setattr(replica._runner, "alarm", told.append)
    with pytest.raises(ConfigurationError, match="sparse gradient"):
        model(torch.tensor([1, 2])).sum().backward()
    assert any("sparse gradient" in text for text in told)
