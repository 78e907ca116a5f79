"""A tensor is its memory, whatever object, name or strides it has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    DecentralizedSGD,
    DiLoCo,
    GossamerError,
    Gossip,
    GossipGraD,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    PushSum,
    QuantizedGossip,
    ScatterReduce,
    in_parts,
    loopback,
)
from gossamer.algorithms.base import Algorithm

GRADIENTS: list[Algorithm] = [AllReduce(), ScatterReduce(), PowerSGD(), Hierarchical(AllReduce(), ranks_per_node=2)]
WEIGHTS: list[Algorithm] = [
    Gossip(wire="fp32"),
    Gossip(),
    GossipGraD(history=False),
    QuantizedGossip(),
    DecentralizedSGD(),
    LocalSGD(every=1),
    PushSum(),
    LowPrecisionDecentralized(),
    DiLoCo(every=1, rate=1.0, momentum=0.0),
    in_parts(2, Gossip(wire="fp32")),
]


def batch(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def spread(models: list[list[Tensor]]) -> float:
    """The largest difference between two ranks' tensors."""
    return max((mine - first).abs().max().item() for each in models for mine, first in zip(each, models[0], strict=True))


# -- gradients ------------------------------------------------------------------------------------------------------


def clone_data(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.data = parameter.grad.data.clone()


def detach(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None
    parameter.grad.detach_()


def move_and_return(model: nn.Module) -> None:
    model.double()
    model.float()


def other_order(model: nn.Module) -> None:
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def each(change: Callable[[nn.Parameter], None]) -> Callable[[nn.Module], None]:
    return lambda model: [change(parameter) for parameter in model.parameters()] and None


@pytest.mark.parametrize("algorithm", GRADIENTS, ids=repr)
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(each(clone_data), id="grad.data replaced"),
        pytest.param(each(detach), id="grad.detach_()"),
        pytest.param(move_and_return, id="to another type and back"),
        pytest.param(other_order, id="to another memory format"),
    ],
)
@pytest.mark.parametrize("moment", ["before zero_grad", "before step"])
def test_gradients_are_exchanged_whatever_became_of_the_last_ones(
    algorithm: Algorithm, change: Callable[[nn.Module], None], moment: str
) -> None:
    """The replicas stay equal, and take the steps that they take without the change."""

    def body(rank: int, changed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(5):
            if changed and step == 2 and moment == "before zero_grad":
                change(model)
            optimizer.zero_grad()
            model(batch(rank, step, 5, 3, 3, 3)).square().mean().backward()
            if changed and step == 2 and moment == "before step":
                change(model)
            optimizer.step()
        replica.close()
        return [p.detach().clone() for p in model.parameters()]

    found = loopback(lambda rank: body(rank, True), 2)
    expected = loopback(lambda rank: body(rank, False), 2)
    assert spread(found) == 0.0
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0], expected[0], strict=True))


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_a_gradient_that_was_transposed_in_its_place_is_read_as_it_is_now() -> None:
    def body(rank: int) -> Tensor:
        model = nn.ParameterList([nn.Parameter(torch.zeros(2, 2))])
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        given = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
        (model[0] * given).sum().backward()
        assert model[0].grad is not None
        with replica.no_sync():
            model[0].grad = model[0].grad.t()
        (model[0] * 0).sum().backward()
        assert model[0].grad is not None
        found = model[0].grad.clone()
        replica.close()
        return found

    assert all(torch.equal(each, torch.tensor([[1.0, 3.0], [2.0, 4.0]])) for each in loopback(body, 2))


@pytest.mark.skipif(not hasattr(nn.Parameter, "grad_dtype"), reason="this torch has no Parameter.grad_dtype")
@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(), PowerSGD(rank=1)], ids=repr)
def test_gradients_have_the_type_that_their_parameter_asks_for(algorithm: Algorithm) -> None:
    """Gradients of 16-bit weights in full precision: 1 + 2⁻¹⁰ is no bfloat16 number."""

    def body(rank: int) -> Tensor:
        model = nn.Linear(4, 4, bias=False).bfloat16()
        model.weight.grad_dtype = torch.float32
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)
        for _ in range(3):
            model.weight.grad = torch.full((4, 4), 1 + 2**-10)
            (model.weight * 0).sum().backward()
        assert model.weight.grad is not None
        found = model.weight.grad.clone()
        replica.close()
        return found

    for found in loopback(body, 2):
        assert found.dtype == torch.float32
        assert torch.allclose(found, torch.full((4, 4), 1 + 2**-10), atol=1e-5)


# -- weights --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One memory under several names."""

    def __init__(self, names: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6, bias=False) for _ in range(names)])
        for layer in self.layers[1:]:
            layer.weight.data = self.layers[0].weight.data

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def distances(replica: gossamer.Replica, model: nn.Module, optimizer: Any, steps: int = 10) -> list[float]:
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        found.append(replica.consensus_distance())
    return found


@pytest.mark.parametrize(
    ("algorithm", "names"),
    [(algorithm, names) for algorithm in WEIGHTS for names in (2, 3)],
    ids=repr,
)
def test_weights_that_are_tied_by_memory_meet_like_any_others(algorithm: Algorithm, names: int) -> None:
    def body(rank: int, names: int) -> tuple[list[float], float]:
        model = Tied(names)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        with torch.no_grad():
            model.layers[0].weight.add_(0.1 * rank)
        mean = model.layers[0].weight.mean().item() - 0.1 * rank + 0.1 * 1.5
        found = distances(replica, model, optimizer)
        with replica.consensus():
            inside = model.layers[0].weight.mean().item()
        replica.close(average=True)
        assert inside == pytest.approx(mean, abs=2e-3)
        assert model.layers[0].weight.mean().item() == pytest.approx(mean, abs=2e-3)
        assert len({layer.weight.data_ptr() for layer in model.layers}) == 1
        return found, mean

    tied, _ = loopback(lambda rank: body(rank, names), 4)[0]
    plain, _ = loopback(lambda rank: body(rank, 1), 4)[0]
    assert tied == pytest.approx(plain, rel=0.2, abs=1e-3)
    assert tied[-1] < 0.1 * 0.1


def test_a_transposed_view_is_the_same_memory() -> None:
    """An autoencoder whose decoder is its encoder, transposed."""

    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 6, bias=False))
        model[1].weight.data = model[0].weight.data.t()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        with torch.no_grad():
            model[0].weight.add_(rank)
        found = distances(replica, model, optimizer, 6)
        replica.close()
        return found

    assert loopback(body, 4)[0][-1] < 1e-5


def test_a_partial_overlap_is_refused_with_both_names() -> None:
    def body(rank: int) -> None:
        model = nn.ParameterDict({"flat": nn.Parameter(torch.zeros(8))})
        model["part"] = nn.Parameter(model["flat"].data[2:6])
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), Gossip())

    with pytest.raises(gossamer.ConfigurationError, match=r"'flat'.*'part'"):
        loopback(body, 2)


def test_columns_of_one_matrix_do_not_overlap() -> None:
    """Their ranges of addresses do; their elements do not."""

    def body(rank: int) -> list[float]:
        whole = torch.zeros(6, 12)
        model = nn.ParameterDict({"left": nn.Parameter(whole[:, :6]), "right": nn.Parameter(whole[:, 6:])})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        (model["left"].sum() * rank + model["right"].sum()).backward()
        optimizer.step()
        replica.close(average=True)
        return [model["left"].mean().item(), model["right"].mean().item()]

    assert loopback(body, 4) == [[-1.5, -1.0]] * 4


class WithBuffers(nn.Module):
    """A buffer, and another name of it, or of a part."""

    def __init__(self, part: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.zeros(4))
        self.register_buffer("also", self.table[:part])

    def forward(self, x: Tensor, add: float) -> Tensor:
        self.table += add
        return self.layer(x)


@pytest.mark.parametrize("algorithm", [Gossip(wire="fp32"), LocalSGD(every=1), DecentralizedSGD()], ids=repr)
def test_buffers_under_two_names_are_averaged_once(algorithm: Algorithm) -> None:
    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = WithBuffers(4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(12):
            optimizer.zero_grad()
            model(torch.ones(1, 2), float(rank) if step == 0 else 0.0).sum().backward()
            optimizer.step()
        replica.close()
        return list(model.table.tolist())

    for found in loopback(body, 4):
        assert found == pytest.approx([1.5] * 4, abs=0.1)


def test_a_buffer_that_is_a_part_of_another_is_refused_with_both_names() -> None:
    def body(rank: int) -> None:
        model = WithBuffers(2)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), Gossip())

    with pytest.raises(gossamer.ConfigurationError, match=r"'table'.*'also'"):
        loopback(body, 2)


def test_weights_that_are_untied_later_are_noticed() -> None:
    """As ``model.to(…)`` does it: from then on the second would never travel."""

    def body(rank: int) -> None:
        model = Tied(2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip())
        distances(replica, model, optimizer, 2)
        model.layers[1].weight.data = model.layers[1].weight.data.clone()
        distances(replica, model, optimizer, 2)

    with pytest.raises(GossamerError, match=r"layers\.0\.weight.*layers\.1\.weight"):
        loopback(body, 2)


# -- strides --------------------------------------------------------------------------------------------------------


def convolution(last: bool) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3)
    return model.to(memory_format=torch.channels_last) if last else model  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(), Gossip(), LocalSGD(every=1), PushSum()], ids=repr)
def test_ranks_whose_weights_lie_in_another_order_are_told_before_they_train(algorithm: Algorithm) -> None:
    def body(rank: int) -> None:
        model = convolution(rank == 1)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)

    with pytest.raises(gossamer.DisagreementError, match=r"rank 0: weight: .*rank 1: weight: "):
        loopback(body, 2)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(wire="fp32"), LocalSGD(every=1)], ids=repr)
def test_strides_of_one_element_are_no_difference(algorithm: Algorithm) -> None:
    """A convolution of 1 × 1 fills its memory in the same order in both formats."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Conv2d(3, 4, 1)
        if rank == 1:
            model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 2, 3, 4, 4)).square().mean().backward()
            optimizer.step()
        replica.close(average=True)
        return model.weight.detach().clone(memory_format=torch.contiguous_format)

    found = loopback(body, 2)
    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(wire="fp32"),
        LocalSGD(every=1),
        QuantizedGossip(),
        in_parts(2, Gossip(wire="fp32")),
        in_parts(3, LocalSGD(every=1)),
    ],
    ids=repr,
)
def test_weights_that_change_their_order_amid_a_run_are_averaged_right_or_named(algorithm: Algorithm, everywhere: bool) -> None:
    """All ranks hold the same values and nothing trains: an exchange that moves a weight has taken one for another."""

    def body(rank: int) -> float:
        model = convolution(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        before = model.weight.detach().clone()
        for step in range(6):
            if step == 3 and (everywhere or rank == 1):
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer.zero_grad()
            model(torch.ones(1, 3, 5, 5)).sum().backward()
            optimizer.step()
        replica.close()
        return (model.weight - before).abs().max().item()

    named = ""
    try:
        moved = loopback(body, 2)
    except GossamerError as error:
        named = str(error)
    assert "'weight'" in named and "rank" in named if named else max(moved) < 1e-3


# -- storage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(), ScatterReduce()], ids=repr)
def test_the_storage_of_buffers_and_parameters_can_still_be_resized(algorithm: Algorithm) -> None:
    """Torch refuses that for ever once numpy has seen it; observers of quantization resize theirs."""

    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("empty", torch.zeros(0))
        model.register_buffer("full", torch.ones(3))
        optimizer = gossamer.optim.GossipAdamW(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, buffers="local")
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        replica.state_dict()
        replica.close()
        for tensor in (model.empty, model.full, model.weight.detach()):
            tensor.resize_(5)

    loopback(body, 2)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
@pytest.mark.parametrize("other", ["2.weight", "2.bias"])
def test_an_overlap_on_one_rank_alone_is_told_by_name(other: str, algorithm: Algorithm) -> None:
    def train(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        if rank == 1:
            place = model.get_parameter(other)
            place.data = model.get_parameter("0.weight").data.view(-1)[: place.numel()].view(place.shape)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)

    with pytest.raises(GossamerError, match=r"rank 1: parameter '0\.weight'.*shares its memory.*clone\(\)"):
        loopback(train, 2)


# -- views that cannot be written -----------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[], Tensor]] = {
    "expand": lambda: torch.randn(1, 4).expand(5, 4),
    "unfold": lambda: torch.randn(6).unfold(0, 4, 1),
    "conj": lambda: torch.randn(5, 4, dtype=torch.cfloat).conj(),
    "neg": lambda: torch.randn(5, 4, dtype=torch.cfloat).conj().imag,
}


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trainable"])
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
@pytest.mark.parametrize("view", VIEWS)
def test_a_parameter_that_cannot_be_written_is_refused_by_name(view: str, algorithm: Algorithm, frozen: bool) -> None:
    def train(rank: int) -> None:
        model = nn.Linear(4, 2)
        model.scale = nn.Parameter(VIEWS[view](), requires_grad=not frozen)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)

    with pytest.raises(gossamer.ConfigurationError, match=r"parameter 'scale' is .*register it as scale"):
        loopback(train, 2)


@pytest.mark.parametrize("view", VIEWS)
def test_a_buffer_that_cannot_be_written_is_refused_by_name(view: str) -> None:
    def train(rank: int) -> None:
        model = nn.Linear(4, 2)
        model.register_buffer("scale", VIEWS[view]())
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce())

    with pytest.raises(gossamer.ConfigurationError, match=r"buffer 'scale' is .*register it as scale"):
        loopback(train, 2)
