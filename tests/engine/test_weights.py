"""Weights leave after a step; what comes is added before the next one."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import DESLOC, Gossip, GossipGraD, LocalSGD, UsageError, in_parts, loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_reduce
from gossamer.engine.history import keep_squares_valid
from gossamer.optim import MasterWeights
from gossamer.state import State


def make(rank: int, learning_rate: float = 1.0) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
    with torch.no_grad():
        model.weight.fill_(float(rank))
    return model, optimizer, replica


def step(model: nn.Module, optimizer: torch.optim.Optimizer, slope: float) -> float:
    optimizer.zero_grad()
    (model.weight * slope).sum().backward()
    optimizer.step()
    return model.weight.item()


def test_when_the_average_is_applied() -> None:
    """Two ranks at 0 and 1: nothing before the first step; the mean of what was sent, then the next update, in full."""

    def body(rank: int) -> list[float]:
        model, optimizer, replica = make(rank)
        seen = [step(model, optimizer, 0.0), step(model, optimizer, -1.0)]
        replica.close()
        return [*seen, model.weight.item()]

    assert loopback(body, 2) == [[0.0, 1.5, 1.5], [1.0, 1.5, 1.5]]


def test_the_gradient_is_taken_where_the_weights_were_sent() -> None:
    """During forward and backward the model holds its own weights, not yet the average."""

    def body(rank: int) -> None:
        model, optimizer, _ = make(rank)
        step(model, optimizer, 0.0)
        assert model.weight.item() == rank
        model(torch.ones(1, 1)).sum().backward()
        assert model.weight.item() == rank
        optimizer.step()
        assert model.weight.item() != rank

    loopback(body, 2)


def test_the_mean_moves_with_the_mean_update() -> None:
    def body(rank: int) -> float:
        model, optimizer, replica = make(rank)
        for number in range(10):
            step(model, optimizer, float(rank * (number % 3)))
        with replica.consensus():
            return model.weight.item()

    world = 5
    updates = sum(number % 3 for number in range(10))
    expected = sum(rank - rank * updates for rank in range(world)) / world
    assert all(abs(found - expected) < 1e-4 for found in loopback(body, world))


def test_frozen_parameters_do_not_travel() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model[0].requires_grad_(False)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        before = replica.metrics()["bytes_sent"]
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        replica.close()
        assert replica.metrics()["bytes_sent"] - before == 5 * 4

    loopback(body, 2)


def test_gradients_stay_local() -> None:
    def body(rank: int) -> None:
        model, _, _ = make(rank)
        (model.weight * rank).sum().backward()
        assert model.weight.grad.item() == rank

    loopback(body, 3)


def test_consensus_leaves_everything_as_it_was() -> None:
    def body(rank: int) -> None:
        model, optimizer, replica = make(rank)
        step(model, optimizer, 0.0)
        with replica.consensus() as same:
            assert same is model
            assert model.weight.item() == 1.0
        assert model.weight.item() == rank
        assert step(model, optimizer, 0.0) in (0.5, 1.0, 1.5), "the mean of two"

    loopback(body, 3)


def test_consensus_may_be_nested_and_left_by_an_error_and_saves_the_average() -> None:
    """In the middle of an exchange; what that brings is added afterwards, as if nothing had been."""

    def look(model: nn.Module, replica: gossamer.Replica) -> None:
        with replica.consensus():
            with replica.consensus():
                assert model.state_dict()["weight"].item() == 0.0
            assert model.weight.item() == 0.0, "the mean of 0, 1 and 2, less 1"
            raise KeyError

    def body(rank: int) -> tuple[list[float], list[float]]:
        seen: list[list[float]] = []
        for looks in (False, True):
            model, optimizer, replica = make(rank)
            step(model, optimizer, 1.0)
            if looks:
                with pytest.raises(KeyError):
                    look(model, replica)
            seen.append([model.weight.item(), step(model, optimizer, 1.0), step(model, optimizer, 0.5)])
        return seen[0], seen[1]

    for without, with_looks in loopback(body, 3):
        assert without == with_looks


def test_no_update_inside_consensus() -> None:
    def body(rank: int) -> None:
        model, optimizer, replica = make(rank)
        step(model, optimizer, 1.0)
        with replica.consensus():
            step(model, optimizer, 1.0)

    with pytest.raises(UsageError, match=r"optimizer.step\(\) inside replica.consensus\(\)"):
        loopback(body, 2)


@pytest.mark.parametrize("action", ["state_dict", "load_state_dict"])
def test_no_state_inside_consensus(action: str) -> None:
    """It would be saved beside weights that it is not of."""

    def body(rank: int) -> None:
        model, optimizer, replica = make(rank)
        step(model, optimizer, 1.0)
        state = replica.state_dict()
        with replica.consensus(), pytest.raises(UsageError, match=rf"{action}\(\) inside consensus\(\)"):
            replica.state_dict() if action == "state_dict" else replica.load_state_dict(state)
        replica.load_state_dict(state)

    loopback(body, 2)


@pytest.mark.parametrize(
    ("optimizer_of", "algorithm", "told"),
    [
        (torch.optim.AdamW, Gossip(), True),
        (torch.optim.AdamW, gossamer.AllReduce(), False),
        (torch.optim.SGD, Gossip(), False),
        (gossamer.optim.GossipAdamW, Gossip(), False),
    ],
    ids=repr,
)
def test_adam_where_weights_travel_is_told_of_once(
    optimizer_of: type[torch.optim.Optimizer], algorithm: gossamer.Algorithm, told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(rank: int) -> None:
        model = nn.Linear(2, 1)
        optimizer = optimizer_of(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        replica.close()

    loopback(body, 3)
    texts = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert ["gossamer.optim.GossipAdamW learns faster" in text for text in texts] == [True] * told


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_final_model_may_be_the_average(dtype: torch.dtype) -> None:
    """With what was under way when the run ended, the buffers, and the exact weights of an optimizer that keeps them."""

    def body(rank: int) -> list[float]:
        model = nn.BatchNorm1d(1).to(dtype)
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"), buffers="local")
        (model.weight.sum() * rank * 2**-7).backward()
        optimizer.step()
        model.running_mean.fill_(rank)
        replica.close(average=True)
        return [model.weight.item(), optimizer.exact_weight(model.weight).item(), model.running_mean.item()]

    for weight, exact, running_mean in loopback(body, 4):
        assert exact == 1 - 1.5 * 2**-7
        assert weight == torch.tensor(exact, dtype=dtype).item()
        assert running_mean == 1.5


def test_without_being_asked_everyone_keeps_their_own() -> None:
    def body(rank: int) -> float:
        model, _, replica = make(rank)
        replica.close()
        return model.weight.item()

    assert loopback(body, 3) == [0.0, 1.0, 2.0]


def test_the_average_of_many_replicas_in_sixteen_bits_is_summed_in_more() -> None:
    """Summed in bfloat16 every addend would be rounded at the size of the sum."""

    def body(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters()), Gossip())
        with torch.no_grad():
            model.weight.fill_(1 + rank / 128)
        with replica.consensus():
            return model.weight.item()

    assert loopback(body, 9) == [1 + 4 / 128] * 9


def test_the_consensus_distance() -> None:
    """Weights of 0, 1 and 2: their mean is 1, and the root mean square of the distance from it is √(2/3)."""

    def body(rank: int) -> tuple[float, float]:
        model, optimizer, replica = make(rank)
        apart = replica.consensus_distance()
        for _ in range(12):
            step(model, optimizer, 0.0)
        assert model.weight.item() == pytest.approx(1, abs=0.1)
        return apart, replica.consensus_distance()

    for before, later in loopback(body, 3):
        assert before == pytest.approx((2 / 3) ** 0.5)
        assert 0 < later < 0.01 * before


def test_what_is_frozen_from_the_start_is_not_averaged() -> None:
    """It may be a hundred times what is trained; what is frozen later was trained, and differs."""

    def body(rank: int) -> list[float]:
        model = nn.ParameterDict({name: nn.Parameter(torch.zeros(1)) for name in ("base", "trained", "later")})
        model["base"].requires_grad_(False)
        replica = gossamer.replicate(model, torch.optim.SGD([model["trained"], model["later"]], lr=0.1), Gossip())
        model["later"].requires_grad_(False)
        with torch.no_grad():
            for value, parameter in ((100.0, model["base"]), (rank, model["trained"]), (2 * rank, model["later"])):
                parameter.fill_(float(value))
        distance = replica.consensus_distance()
        with replica.consensus():
            inside = [model[name].item() for name in ("base", "trained", "later")]
        replica.close(average=True)
        assert inside == [model[name].item() for name in ("base", "trained", "later")]
        return [distance, *inside]

    for rank, found in enumerate(loopback(body, 3)):
        assert found == pytest.approx([(2 / 3) ** 0.5, 100.0, 1.0, 2.0]), rank


def test_gradient_algorithms_have_no_consensus_distance() -> None:
    def body(rank: int) -> float:
        model = nn.Linear(2, 2)
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return replica.consensus_distance()

    assert loopback(body, 2) == [0.0, 0.0]


@pytest.mark.parametrize("world", [4, 6])
def test_every_optimizer_meets_all_partners_however_many_backward_passes_there_are(world: int) -> None:
    """Two optimizers that take turns, as in a GAN: each counts its own steps."""

    def body(rank: int) -> list[float]:
        models = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in models]
        replica = gossamer.replicate(models, optimizers, Gossip(wire="fp32"))
        with torch.no_grad():
            for each in models:
                each.weight.fill_(float(rank))
        for _ in range(24):
            for each, optimizer in zip(models, optimizers, strict=True):
                step(each, optimizer, 0.0)
        replica.close()
        return [each.weight.item() for each in models]

    for found in loopback(body, world):
        assert found == pytest.approx([(world - 1) / 2] * 2, rel=1e-2)


def test_passes_that_add_up_to_one_step_send_all_parts() -> None:
    def body(rank: int) -> list[float]:
        model = nn.Linear(1, 2, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, gossamer.in_parts(2, Gossip(wire="fp32")))
        with torch.no_grad():
            model.weight.fill_(float(rank))
        for _ in range(8):
            optimizer.zero_grad()
            for _ in range(2):
                (model.weight * 0).sum().backward()
            optimizer.step()
        replica.close()
        return model.weight.flatten().tolist()

    assert loopback(body, 2) == [[0.5, 0.5]] * 2


def test_the_number_of_steps_is_saved_with_the_weights() -> None:
    """Otherwise a resumed rank would go on with other partners than one that was not interrupted."""

    def body(rank: int) -> list[float]:
        models = nn.ModuleList([nn.Linear(1, 1, bias=False) for _ in range(2)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in models]
        replica = gossamer.replicate(models, optimizers, Gossip(wire="fp32"))

        def train(count: int) -> None:
            for _ in range(count):
                for each, optimizer in zip(models, optimizers, strict=True):
                    step(each, optimizer, float(rank))

        train(3)
        state, weights = replica.state_dict(), [p.detach().clone() for p in models.parameters()]
        train(5)
        first = [p.item() for p in models.parameters()]
        with torch.no_grad():
            for p, before in zip(models.parameters(), weights, strict=True):
                p.copy_(before)
        replica.load_state_dict(state)
        train(5)
        assert [p.item() for p in models.parameters()] == first
        replica.close()
        return first

    loopback(body, 4)


@pytest.mark.parametrize("begins", [0, 3])
def test_after_a_change_all_partners_are_met_too(begins: int) -> None:
    def body(rank: int) -> list[float]:
        models = nn.ModuleList([nn.Linear(1, 2, bias=False) for _ in range(2)])
        optimizers = [torch.optim.SGD(each.parameters(), lr=1.0) for each in models]
        then = gossamer.in_parts(2, Gossip(wire="fp32"))
        replica = gossamer.replicate(models, optimizers, gossamer.after(begins, then))
        with torch.no_grad():
            for each in models:
                each.weight.fill_(float(rank))
        for _ in range(12):
            for each, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                (each.weight * 0).sum().backward()
                optimizer.step()
        replica.close()
        return [number for each in models for number in each.weight.flatten().tolist()]

    for found in loopback(body, 4):
        assert found == pytest.approx([1.5] * 4)


def test_what_comes_during_an_update_reaches_a_model_of_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Late enough for the hook before the update, and there for the one after it: added to the exact weights, and not undone
    because the model is not."""

    def body(rank: int) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False).bfloat16()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32", lag=2))
        sync, there = replica._weights[0], [True]
        arrived = type(sync.exchange).arrived.fget
        monkeypatch.setattr(type(sync.exchange), "arrived", property(lambda exchange: there[0] and arrived(exchange)))
        with torch.no_grad():
            model.weight.fill_(float(rank))
        optimizer.register_step_pre_hook(lambda *_: there.__setitem__(0, True))
        seen = []
        for _ in range(4):
            there[0] = False
            seen.append(step(model, optimizer, 0.0))
        replica.close()
        return seen[-1], model.weight.item()

    assert loopback(body, 2) == [(0.5, 0.5)] * 2


def test_the_root_of_a_centred_variance_can_be_taken() -> None:
    """Rounded and averaged apart, the mean of squares may fall below the square of the mean."""
    tensors = {"square_avg of w": torch.tensor([1.0084, 4.0]), "grad_avg of w": torch.tensor([1.0061, 1.0])}
    keep_squares_valid(tensors)
    assert (tensors["square_avg of w"] - tensors["grad_avg of w"] ** 2 >= 0).all()
    assert tensors["square_avg of w"][1] == 4.0


@dataclass(frozen=True, kw_only=True)
class Strided(Algorithm, register=False):
    """Returns, and remembers, tensors between whose elements others lie."""

    whole: bool = False

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        own, beside = bucket.flat, torch.full_like(bucket.flat, 99)
        mean = yield from all_reduce(torch.stack([own, beside], 1) / ctx.world)
        difference = (mean - torch.stack([own, own], 1))[:, 0]
        state["seen"] = difference.contiguous() if self.whole else difference
        return difference.contiguous() if self.whole else difference


def test_a_result_need_not_lie_without_gaps() -> None:
    def body(rank: int, whole: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Strided(whole=whole))
        for _ in range(4):
            optimizer.zero_grad()
            ((rank + 1) * model(torch.ones(1, 5))).sum().backward()
            optimizer.step()
        kept = replica.state_dict()[f"rank{rank}"][0]["seen"]
        replica.close()
        return [*(p.detach() for p in model.parameters()), *kept.values()]

    for one, other in zip(loopback(lambda rank: body(rank, False), 2), loopback(lambda rank: body(rank, True), 2), strict=True):
        assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_a_weight_may_have_the_name_of_a_sum_of_squares() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sum, self.other = nn.Parameter(-torch.ones(3)), nn.Parameter(-torch.ones(3))

    def body(rank: int) -> None:
        model = Named()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        replica = gossamer.replicate(model, optimizer, GossipGraD())
        for _ in range(4):
            optimizer.zero_grad()
            ((model.sum + model.other) * (rank + 1)).sum().backward()
            optimizer.step()
        assert model.sum.equal(model.other)
        assert (model.sum < -0.9).all()
        replica.close()

    loopback(body, 2)


def test_an_error_in_a_step_is_told_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Longer(Gossip, register=False):
        def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
            yield from all_reduce(bucket.flat.clone())
            return torch.zeros(bucket.flat.numel() + 1)

    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, Longer())
    told: list[str] = []
    monkeypatch.setattr(replica._runner, "alarm", told.append)
    step(model, optimizer, 1.0)
    with pytest.raises(gossamer.ConfigurationError, match="returned shape"):
        step(model, optimizer, 1.0)
    assert any("returned shape" in text for text in told)


def test_a_resumed_run_exchanges_the_history_that_it_did_before() -> None:
    """What a layer that is used late remembers is each worker's own, after a checkpoint too."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.early, self.late = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor, late: bool) -> Tensor:
            return self.late(self.early(x)) if late else self.early(x)

    def run(rank: int, steps: range, saved: Any, everywhere: bool) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = Late()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        if saved is not None:
            optimizer.load_state_dict(saved[1])
        replica = gossamer.replicate(model, optimizer, GossipGraD())
        if saved is not None:
            model.load_state_dict(saved[0])
            replica.load_state_dict(saved[2])
        for number in steps:
            optimizer.zero_grad()
            x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * number + rank))
            model(x, late=number >= 2 and (everywhere or rank == 0)).square().sum().backward()
            optimizer.step()
        state = copy.deepcopy((model.state_dict(), optimizer.state_dict(), replica.state_dict()))
        replica.close()
        return state, [p.detach().clone() for p in model.parameters()]

    for everywhere in (True, False):
        whole = loopback(lambda rank: run(rank, range(8), None, everywhere)[1], 2)
        saved = loopback(lambda rank: run(rank, range(4), None, everywhere)[0], 2)
        again = loopback(lambda rank: run(rank, range(4, 8), saved[rank], everywhere)[1], 2)
        for one, other in zip(whole, again, strict=True):
            assert all(a.equal(b) for a, b in zip(one, other, strict=True))


def test_history_is_followed_from_the_first_step_that_is_taken() -> None:
    """An optimizer that leaves a step out by itself, because a ``GradScaler`` has found an overflow, remembers nothing yet."""

    def body(rank: int) -> list[list[str] | None]:
        model = nn.Linear(2, 2).half()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.01, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        replica = gossamer.replicate(model, optimizer, GossipGraD(), scaler=scaler)
        found = []
        for slope in (10.0, 1e-3):
            optimizer.zero_grad()
            scaler.scale((model(torch.ones(1, 2).half()).float() * slope).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            found.append(replica._weights[0].history_names)
        replica.close()
        return found

    assert loopback(body, 2) == [[None, ["momentum_buffer of weight", "momentum_buffer of bias"]]] * 2


def test_what_is_under_way_when_history_is_first_followed_is_added() -> None:
    """Weights cut into parts are cut anew where the history is added to them, and results of before are of the old parts."""

    def trained(algorithm: Algorithm) -> Tensor:
        def body(rank: int) -> Tensor:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).half()
            optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.01, momentum=0.5)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=1000)
            replica = gossamer.replicate(model, optimizer, algorithm, scaler=scaler)
            for slope in (1e3, *[rank + 1.0] * 9):
                optimizer.zero_grad()
                gradient = sum(parameter.float().sum() for parameter in model.parameters()) * slope
                scaler.scale(gradient).backward()
                scaler.step(optimizer)
                scaler.update(2.0**8)
            replica.close()
            return torch.cat([parameter.detach().float().flatten() for parameter in model.parameters()])

        return torch.stack(loopback(body, 2))

    found = trained(in_parts(2, DESLOC(every=1, first=1, second=1, delay=2, dense=0)))
    alone = trained(LocalSGD(every=1000, dense=0))
    torch.testing.assert_close(found.mean(0), alone.mean(0), rtol=0, atol=2e-3)
    assert found.std(0).max() < 0.5 * alone.std(0).min()
