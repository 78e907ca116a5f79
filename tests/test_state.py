"""State is written in transactions, survives another layout of the buckets, and a checkpoint."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer import loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.traits import Traits
from gossamer.bucket_plan import make_plan
from gossamer.buckets import Bucket
from gossamer.comm.loopback import solo_runner
from gossamer.comm.ops import Flow, all_reduce
from gossamer.engine.exchange import Exchange
from gossamer.engine.statistics import Statistics
from gossamer.engine.weights import WeightSync
from gossamer.state import State, Unsettled

from .contracts.cases import Oddities, batch, same_bits, train_step, weights

names = st.sampled_from("abc")
words = st.sampled_from(["commit", "rollback", "forget"])
actions = st.lists(st.one_of(st.tuples(names, st.integers(1, 9)), words), max_size=40)


@given(actions)
def test_a_state_is_two_dictionaries(actions: list[Any]) -> None:
    """Against the obvious model: what is kept, and what would be kept after a commit. Memory is used again as algorithms do."""
    unsettled: Unsettled = set()
    state, kept, draft = State(torch.zeros(2), unsettled), {}, {}
    for action in actions:
        if action == "commit":
            for ledger in list(unsettled):  # as exchanges do, which leave most states alone
                ledger.commit()
            kept = dict(draft)
        elif action == "rollback":
            state.rollback()
            draft = dict(kept)
        elif action == "forget":
            state.rollback()
            state.forget()
            draft = {}
        else:
            name, value = action
            state[name] = state.fresh(name, torch.zeros(2)).fill_(value)
            draft[name] = float(value)
        assert set(state) == set(draft)
        assert {name: float(value[0]) for name, value in state.items()} == draft
        assert {name: float(value[0]) for name, value in state.flats.kept.items()} == kept
        assert all(torch.equal(state[name], torch.full((2,), draft.get(name, 0.0))) for name in "abc")
        assert all((name in state) == (name in draft) for name in "abc")


def test_zeros_are_like_the_bucket_and_not_shared() -> None:
    state = State(torch.ones(3, dtype=torch.bfloat16))
    state["a"].add_(1)
    assert torch.equal(state["a"], torch.zeros(3, dtype=torch.bfloat16))


def test_memory_is_used_again_only_when_nobody_looks_at_it() -> None:
    state = State(torch.zeros(100))
    written = []
    for number in range(4):
        state["a"] = state.fresh("a", torch.zeros(100)).fill_(number)
        written.append(state["a"].data_ptr())
        state.commit()
    assert written[0] == written[2]
    assert written[1] == written[3] != written[0]
    view = state["a"][:3]
    for number in range(4, 7):
        state["a"] = state.fresh("a", torch.zeros(100)).fill_(number)
        state.commit()
    assert torch.equal(view, torch.full((3,), 3.0))
    assert state.fresh("a", torch.zeros(50)).shape == (50,)
    assert state.fresh("b", torch.zeros(2, dtype=torch.float64)).dtype == torch.float64


@pytest.mark.parametrize(("device", "kept"), [("cpu", True), ("meta", False)])
def test_memory_of_a_device_is_not_held_for_what_is_written_next(device: str, kept: bool) -> None:
    """Its allocator has some immediately, for activations too."""
    state = State(torch.zeros(100, device=device))
    state["a"] = torch.zeros(100, device=device)
    state.commit()
    before = weakref.ref(state["a"])
    for _ in range(2):
        state["a"] = torch.zeros(100, device=device)
        assert before() is not None, "there is a way back to it"
        state.rollback()
        assert state["a"] is before()
    state["a"] = torch.zeros(100, device=device)
    state.commit()
    assert (before() is not None) == kept


def test_an_aborted_write_leaves_what_is_kept() -> None:
    state = State(torch.zeros(10))
    for number in (1, 2):
        state["a"] = state.fresh("a", torch.zeros(10)).fill_(number)
        state.commit()
    state["a"] = state.fresh("a", torch.zeros(10)).fill_(3)
    state.rollback()
    assert torch.equal(state["a"], torch.full((10,), 2.0))


# -- algorithms that remember -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Remembering(Algorithm, register=False):
    """Keeps an fp32 running mean per element, and a count per step; fails on demand."""

    fails_at: int = -1
    where: str = "exchange"

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        smooth = (1 + ctx.step / 8) * (
            state["smooth"] if "smooth" in state else torch.zeros_like(bucket.flat, dtype=torch.float32)
        )
        state["smooth"] = smooth / 2 + bucket.flat.float() / 2
        if self.where == "exchange" and ctx.step == self.fails_at and bucket.index == 1:
            raise ConnectionError("exchange failed")
        mean = yield from all_reduce(state["smooth"] / ctx.world)
        return (mean if self.subject == "gradients" else 1e-3 * mean).to(bucket.flat.dtype)

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None]:
        state["steps"] = state["steps"] + 1
        if self.where == "finish" and ctx.step == self.fails_at:
            raise ConnectionError("finish failed")
        total = yield from all_reduce(state["steps"].clone())
        for bucket in buckets:
            if self.subject == "gradients":
                bucket.flat.mul_(1 / (1 + total / ctx.world))


@dataclass(frozen=True, kw_only=True)
class RememberingWeights(Remembering, register=False):
    @property
    def traits(self) -> Traits:
        return Traits(subject="weights")


both = pytest.mark.parametrize("cls", [Remembering, RememberingWeights])


def training(algorithm: Algorithm, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
    torch.manual_seed(seed)
    model = Oddities(other=torch.bfloat16)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    return model, optimizer, gossamer.replicate(model, optimizer, algorithm)


@both
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("saved_at", [0, 1, 3])
def test_everything_remembered_is_in_a_checkpoint(cls: type[Algorithm], world: int, saved_at: int) -> None:
    """Loaded over a replica that has trained something else, too."""
    algorithm = cls(bucket_bytes=200)

    def save(rank: int) -> tuple[Tensor, list[dict[str, Any]]]:
        model, optimizer, replica = training(algorithm)
        for step in range(6):
            if step == saved_at:
                parts = [replica.state_dict(), model.state_dict(), optimizer.state_dict()]
                saved = copy.deepcopy(parts)
            train_step(model, optimizer, batch(step, rank))
        replica.close()
        return weights(model), saved

    runs = loopback(save, world)

    def resume(rank: int) -> Tensor:
        model, optimizer, replica = training(algorithm, seed=1)
        for step in range(2):
            train_step(model, optimizer, batch(100 + step, rank))
        for part, saved in zip((model, optimizer, replica), (runs[rank][1][i] for i in (1, 2, 0)), strict=True):
            part.load_state_dict(saved)
        for step in range(saved_at, 6):
            train_step(model, optimizer, batch(step, rank))
        replica.close()
        return weights(model)

    for (through, _), resumed in zip(runs, loopback(resume, world), strict=True):
        assert same_bits(through, resumed)


@both
@pytest.mark.parametrize("where", ["exchange", "finish"])
def test_an_aborted_step_leaves_all_state_as_it_was(cls: type[Algorithm], where: str) -> None:
    def body(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
        model, optimizer, replica = training(cls(bucket_bytes=200, fails_at=3, where=where))
        for step in range(4):
            before = replica.state_dict()
            try:
                train_step(model, optimizer, batch(step, rank))
                replica.state_dict()  # weights are awaited here
            except ConnectionError:
                return before, replica.state_dict()
        raise AssertionError("nothing failed")

    for before, after in loopback(body, 1):
        pending = before["rank0"][0].pop("(pending)", {})
        after["rank0"][0].pop("(pending)", None)
        assert before["rank0"][0].keys() == {"smooth"}
        assert pending or cls is Remembering
        for name, tensor in before["rank0"][0]["smooth"].items():
            assert same_bits(tensor, after["rank0"][0]["smooth"][name])
        ((of_the_step,),) = before["rank0"][1]
        assert of_the_step.endswith(": steps")
        assert before["rank0"][1] == after["rank0"][1] == [{of_the_step: {"": torch.tensor(float(before["step"]))}}]


def test_state_survives_another_layout_of_the_buckets() -> None:
    parameters = {name: p for name, p in Oddities(other=torch.bfloat16).named_parameters() if p.requires_grad}
    exchange = Exchange(solo_runner(), Remembering())
    exchange.adopt(make_plan(parameters, Remembering(bucket_bytes=200)))
    for index, state in enumerate(exchange.states):
        state["smooth"] = torch.randn(exchange.buckets[index].flat.shape)
        state.commit()
    before = {name: tensor.clone() for name, tensor in exchange.states.by_name()["smooth"].items()}
    for order in (list(parameters), sorted(parameters)):
        for size in (1, 100, 10**6):
            exchange.adopt(make_plan({name: parameters[name] for name in order}, Remembering(bucket_bytes=size)))
            after = exchange.states.by_name()["smooth"]
            assert before.keys() == after.keys()
            assert all(same_bits(before[name], after[name]) for name in before)
            assert all(after[name].stride() == parameters[name].stride() for name in before if after[name].numel() > 1)


def test_weight_states_of_any_dtype_are_put_back() -> None:
    parameters = dict(Oddities(dtype=torch.bfloat16).named_parameters())
    runner = solo_runner()
    syncs = [WeightSync(runner, RememberingWeights(), parameters, Statistics(runner)) for _ in range(2)]
    for bucket, state in zip(syncs[0].exchange.buckets, syncs[0].exchange.states, strict=True):
        state["smooth"] = torch.rand(bucket.flat.shape, dtype=torch.float32)
        state.commit()
    syncs[1].load_state_by_name(syncs[0].state_by_name(), {})
    for one, other in zip(syncs[0].exchange.states, syncs[1].exchange.states, strict=True):
        assert same_bits(one["smooth"], other["smooth"])


@pytest.mark.parametrize("where", ["exchange", "finish"])
def test_an_aborted_exchange_of_weights_is_forgotten(where: str) -> None:
    runner, parameters = solo_runner(), dict(Oddities().named_parameters())
    sync = WeightSync(runner, RememberingWeights(bucket_bytes=200, fails_at=2, where=where), parameters, Statistics(runner))

    def step(number: int) -> list[Tensor]:
        sync.launch(number)
        sync.apply_due()
        return [state["smooth"].clone() for state in sync.exchange.states]

    before = step(1)
    with pytest.raises(ConnectionError, match=where):
        step(2)
    assert all(same_bits(state["smooth"], kept) for state, kept in zip(sync.exchange.states, before, strict=True))
    sync.apply_due()
    assert all(not same_bits(after, kept) for after, kept in zip(step(3), before, strict=True) if kept.any())
    (of_the_step,) = sync.exchange.states.of_steps.values()
    assert of_the_step["steps"] == 2
