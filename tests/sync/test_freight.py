"""What an optimizer carries in its own pass is what would be added before it and sent after it, to the bit."""

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import gossamer
from contracts.cases import weights
from gossamer import (
    DecentralizedSGD,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    QuantizedGossip,
    after,
    by_size,
    in_parts,
    loopback,
)
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.difference import Difference
from gossamer.buckets import Bucket, make_layout
from gossamer.comm.topology import Ring
from gossamer.optim import GossipAdamW
from gossamer.optim.carrying import Array, Legs
from gossamer.optim.loops import BLOCK
from gossamer.replica import Replica
from gossamer.sync import landing
from gossamer.sync.ahead import Ahead
from gossamer.sync.freight import Freight, Load, Manifest
from gossamer.sync.weights import WeightSync

WORLD, STEPS = 4, 7

Built = Callable[[], nn.Module]
Step = Callable[[nn.Module, GossipAdamW, int], None]


class Awkward(nn.Module):
    """Weights of odd sizes, one that is channels-last, one that is never used, one that is now and then; running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Conv2d(3, 5, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm, self.out = nn.BatchNorm2d(5), nn.Linear(5 * 16, 3)
        self.unused, self.rare = nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(BLOCK + 13))
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        out: Tensor = self.out(self.norm(self.image(x)).flatten(1))
        return out + self.rare.sum() if self.passes % 3 == 0 else out


def plain() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 2 * BLOCK // 48 + 1), nn.Tanh(), nn.Linear(2 * BLOCK // 48 + 1, 3))


def mixed() -> nn.Module:
    """Of several types."""
    model = Awkward()
    model.rare.data = model.rare.data.double()
    model.unused.data = model.unused.data.bfloat16()
    return model


def one_step(model: nn.Module, optimizer: GossipAdamW, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    model(torch.randn(4, 3, 4, 4, generator=generator)).square().mean().backward()
    optimizer.step()


def with_closure(model: nn.Module, optimizer: GossipAdamW, seed: int) -> None:
    """Gradients are computed inside the step, on weights that averages were added to."""

    def loss() -> Tensor:
        optimizer.zero_grad()
        error: Tensor = model(torch.randn(4, 3, 4, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
        error.backward()
        return error

    optimizer.step(loss)


def groups_of(model: nn.Module) -> list[dict[str, object]]:
    """Two, with rates of their own."""
    first, *others = model.parameters()
    return [{"params": others}, {"params": [first], "lr": 0.02}]


def trained(
    algorithm: Algorithm,
    build: Built,
    step: Step = one_step,
    during: Callable[[nn.Module, GossipAdamW, Replica, int], None] = lambda *_: None,
) -> list[Tensor]:
    """All that workers have in the end."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(5)
        model = build()
        optimizer = GossipAdamW(groups_of(model), lr=0.01)
        replica = gossamer.replicate(model, optimizer, algorithm, buffers="average")
        for number in range(STEPS):
            step(model, optimizer, 100 * rank + number)
            during(model, optimizer, replica, number)
        replica.close()
        return torch.cat([weights(model).double(), *(buffer.double().flatten() for buffer in model.buffers())])

    return loopback(body, WORLD)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of how many stretches optimizers took care."""
    counts: list[int] = []
    take = Freight.take

    def counted(self: Freight, addresses: Array) -> Legs:
        legs = take(self, addresses)
        counts.append(int((legs.last - legs.first).sum()))
        return legs

    monkeypatch.setattr(Freight, "take", counted)
    return counts


def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on nothing is carried."""
    monkeypatch.setattr(WeightSync, "_loaded", lambda *_: None)


CARRIED = [
    Gossip(),
    Gossip(ahead=1.0),
    Gossip(every=2, ahead=0.7),
    Gossip(bucket_bytes=300, ahead=1.0),
    in_parts(2, Gossip(ahead=1.0)),
    in_parts(3, Gossip()),
    GossipGraD(ahead=1.0, history=False),
    by_size(500, small=LocalSGD(every=2), large=Gossip(ahead=1.0)),
]
OTHERS = [
    GossipPGA(period=3, ahead=1.0),
    after(3, Gossip(ahead=1.0), before=DecentralizedSGD()),
    Gossip(topology=Ring(), ahead=1.0),
    Gossip(wire="fp16"),
    Gossip(wire="fp32", ahead=1.0),
    GossipGraD(),
    GossipGraD(late=True, history=False),
    QuantizedGossip(ahead=1.0),
    Hierarchical(Gossip(ahead=1.0), ranks_per_node=2),
]


@pytest.mark.parametrize("build", [plain, Awkward, mixed])
@pytest.mark.parametrize("algorithm", [*CARRIED, *OTHERS], ids=repr)
def test_carried_or_not_is_the_same(
    algorithm: Algorithm, build: Built, taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    carried = trained(algorithm, build)
    assert (sum(taken) > 0) == (algorithm in CARRIED), "it is this that is tested"
    apart(monkeypatch)
    for one, other in zip(carried, trained(algorithm, build), strict=True):
        assert torch.equal(one, other)


def test_everything_is_carried_where_it_can_be(taken: list[int]) -> None:
    trained(in_parts(2, Gossip(ahead=1.0)), plain)
    assert len(taken) == 2 * WORLD * STEPS
    assert all(taken[2 * WORLD :]), "by both groups of every worker, in every step"


def test_nothing_is_carried_where_gradients_are_computed_in_the_step(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    carried = trained(Gossip(ahead=1.0), plain, with_closure)
    assert not taken
    apart(monkeypatch)
    for one, other in zip(carried, trained(Gossip(ahead=1.0), plain, with_closure), strict=True):
        assert torch.equal(one, other)


def test_weights_that_move_are_followed(taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever assigns to ``.data`` leaves the old memory to others."""

    def move(model: nn.Module, optimizer: GossipAdamW, replica: Replica, number: int) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()

    for algorithm in Gossip(ahead=1.0), in_parts(2, Gossip(ahead=1.0)):
        carried = trained(algorithm, plain, during=move)
        with monkeypatch.context() as patch:
            apart(patch)
            for one, other in zip(carried, trained(algorithm, plain, during=move), strict=True):
                assert torch.equal(one, other)


def test_a_step_that_an_error_ends_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What had come for weights that were not updated is added to them, at the latest by the next step."""

    def fail(model: nn.Module, optimizer: GossipAdamW, replica: Replica, number: int) -> None:
        if number not in (2, 4):
            return
        model(torch.ones(4, 3, 4, 4)).sum().backward()
        change = optimizer.change
        monkeypatch.setattr(optimizer, "change", _once(change))
        with pytest.raises(RuntimeError, match="amid a step"):
            optimizer.step()
        monkeypatch.setattr(optimizer, "change", change)
        if number == 2:
            replica.wait_for_exchanges()
        else:
            with replica.consensus():
                pass

    carried = trained(in_parts(2, Gossip(ahead=1.0)), plain, during=fail)
    apart(monkeypatch)
    for one, other in zip(carried, trained(in_parts(2, Gossip(ahead=1.0)), plain, during=fail), strict=True):
        assert torch.equal(one, other)


def _once(change: Callable[..., None]) -> Callable[..., None]:
    """The first group is updated, the second one raises."""
    calls: list[int] = []

    def changed(*arguments: object) -> None:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("amid a step")
        change(*arguments)

    return changed


class Unwanted:
    """Cargo that nobody should take."""

    def take(self, addresses: Array) -> Legs:
        raise AssertionError

    unload = take


def test_a_copy_carries_nothing() -> None:
    def body(rank: int) -> None:
        model = plain()
        optimizer = GossipAdamW(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, Gossip())
        copies = []
        for number in range(3):
            one_step(model, optimizer, number)
            optimizer.cargo = Unwanted()
            copies.append(copy.deepcopy(optimizer))
            optimizer.cargo = None
        assert optimizer.cargo is None
        assert [each.cargo for each in copies] == [None] * 3
        replica.close()

    loopback(body, 2)


def test_a_hook_of_others_sees_and_changes_what_it_did(taken: list[int]) -> None:
    """Weights that are kept within bounds are within bounds where they are averaged."""

    def body(rank: int) -> float:
        torch.manual_seed(rank)
        model = plain()
        optimizer = GossipAdamW(model.parameters(), lr=0.1)

        def clamp(*_: object) -> None:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.0625, 0.0625)

        optimizer.register_step_post_hook(clamp)
        replica = gossamer.replicate(model, optimizer, Gossip())
        for number in range(5):
            one_step(model, optimizer, 10 * rank + number)
        replica.close()
        return float(weights(model).abs().max())

    assert max(loopback(body, 2)) <= 0.0625
    assert not taken


def test_running_variances_stay_positive(taken: list[int]) -> None:
    """They are added without the optimizer, and as carefully as ever."""

    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = GossipAdamW(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, Gossip(), buffers="average")
        lowest = []
        for step in range(8):
            for _ in range(20):  # moves the variance as far as it goes
                error = model(torch.randn(16, 3) * (30.0 if (step + rank) % 2 else 0.1)).square().mean()
            optimizer.zero_grad()
            error.backward()
            optimizer.step()
            lowest.append(float(model[0].running_var.min()))
        replica.close()
        return [*lowest, float(model[0].running_var.min())]

    assert min(map(min, loopback(body, 2))) >= 0
    assert sum(taken)


def test_a_loaded_state_knows_nothing_of_a_step_that_an_error_ended() -> None:
    def body(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(rank)
        model = plain()
        optimizer = GossipAdamW(groups_of(model), lr=0.05)
        replica = gossamer.replicate(model, optimizer, Gossip())
        for number in range(3):
            one_step(model, optimizer, 10 * rank + number)
        saved, state = copy.deepcopy(model.state_dict()), replica.state_dict()
        one_step(model, optimizer, 10 * rank + 3)
        model(torch.ones(4, 3, 4, 4)).sum().backward()
        change = optimizer.change
        optimizer.change = _once(change)  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="amid a step"):
            optimizer.step()
        optimizer.change = change  # type: ignore[method-assign]
        model.load_state_dict(saved)
        wanted = weights(model).clone()
        replica.load_state_dict(state)
        found = weights(model).clone()
        replica.close()
        assert optimizer.cargo is None
        return wanted, found

    for wanted, found in loopback(body, 2):
        assert torch.equal(wanted, found)


def test_weights_that_share_their_memory_are_not_carried(taken: list[int]) -> None:
    def build() -> nn.Module:
        model = plain()
        model.register_parameter("again", nn.Parameter(torch.zeros(3)))
        model.again.data = model[3].bias.data
        return model

    trained(Gossip(), build)
    assert not taken


def test_nothing_is_remembered_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that is ahead needs no copy of the weights then."""
    remembered: list[Bucket] = []
    monkeypatch.setattr(Ahead, "remember", lambda self, bucket, members: remembered.append(bucket))
    trained(in_parts(2, Gossip(ahead=1.0)), plain)
    trained(Gossip(ahead=1.0), lambda: nn.Sequential(nn.BatchNorm2d(3), plain()))  # whose buffers are sent as they are
    assert not remembered


@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("by", [None, 0.0, 1.0])
@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, 3 * BLOCK + 5])
def test_one_pass_is_three(size: int, by: float | None, theirs: bool) -> None:
    """What is added, the update, and what is written, of stretches that begin and end anywhere."""
    torch.manual_seed(size)
    one = nn.Parameter(torch.randn(2 * size + 3))
    bounds = [0, size // 2, size // 2 + size, 2 * size + 3]
    other = nn.Parameter(one.detach().clone())
    messages = []
    for parameter in one, other:
        torch.manual_seed(7)
        optimizer = GossipAdamW([parameter], lr=0.01, averaged_over=4)
        members = [parameter.detach()[begin:end] for begin, end in pairwise(bounds)]
        bucket = Bucket(0, make_layout({str(i): members[i] for i in (0, 1, 2)}, message=torch.bfloat16))
        mine, came = torch.randn(2, bucket.flat.numel()).bfloat16()
        mine[size // 3], came[size // 3] = float("nan"), float("inf")
        difference = Difference(mine, [came], 0.3) if theirs else None
        ahead = Ahead()
        parameter.grad = torch.randn(parameter.shape)
        if parameter is one:
            manifest = Manifest()
            rows = manifest.rows(bucket, members, [parameter] * 3)
            assert rows is not None
            optimizer.cargo = freight = Freight([Load(bucket, members, rows, difference, by)], manifest, ahead)
            optimizer.step()
            assert freight.lay_out() == (set() if by is None else {0})
        else:
            if difference is not None:
                landing.add(members, difference, bucket)
            ahead.remember(bucket, members)
            optimizer.step()
            if by is not None:
                ahead.lay_out(bucket, members, by)
        messages.append(bucket.flat)
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(*messages, rtol=0, atol=0, equal_nan=True)
