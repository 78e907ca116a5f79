"""GossipAdamW: AdamW alone; where weights are averaged, it divides by the size of the mean gradient."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from contracts.cases import weights
from gossamer import AllReduce, Gossip, Hierarchical, by_size, loopback
from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim import GossipAdamW, MasterWeights, gossip_adamw, loops
from gossamer.optim.gossip_adamw import tell_how_many


def model_of(width: int = 5, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(width, 3).to(dtype)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def stays_beside_adamw(steps: int, averaged_over: int, **options: Any) -> None:
    ours, theirs = model_of(), model_of()
    mine = GossipAdamW(ours.parameters(), averaged_over=averaged_over, **options)
    reference = torch.optim.AdamW(theirs.parameters(), **options)
    for step in range(steps):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        mine.step()
        reference.step()
        assert torch.allclose(weights(ours), weights(theirs), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_alone_it_is_adamw(decay: float) -> None:
    stays_beside_adamw(10, averaged_over=1, lr=0.02, betas=(0.8, 0.95), eps=1e-3, weight_decay=decay)


@pytest.mark.parametrize("beta", [0.0, 1e-17])
def test_without_momentum_it_is_adamw_for_any_number_of_workers(beta: float) -> None:
    """A worker that remembers no gradient has nothing to tell noise from."""
    stays_beside_adamw(5, averaged_over=4, lr=0.02, betas=(beta, 0.99))


def test_the_published_formula() -> None:
    """The docstring's, written down a second time, in float64."""
    model, p, lr, b1, b2, eps = model_of(dtype=torch.float64), 4, 0.02, 0.9, 0.99, 1e-8
    optimizer = GossipAdamW(model.parameters(), lr, betas=(b1, b2), eps=eps, weight_decay=0.1, averaged_over=p)
    w, m, v = model.weight.detach().clone(), torch.zeros(3, 5).double(), torch.zeros(3, 5).double()
    for t in range(1, 12):
        give_gradients(model, t)
        g = model.weight.grad
        m = b1 * m + (1 - b1) * g
        hat = m / (1 - b1**t)
        c = (1 - b1) / (1 + b1) * (1 + b1**t) / (1 - b1**t)
        a = 1 if t == 1 else max(0, (1 / p - c) / (1 - c))
        v = b2 * v + (1 - b2) * (a * g**2 + (1 - a) * hat**2)
        w = w - lr * (hat / ((v / (1 - b2**t)).sqrt() + eps) + 0.1 * w)
        optimizer.step()
        assert torch.allclose(model.weight, w, rtol=1e-10)


def test_weights_that_are_moved_or_turned_are_followed() -> None:
    """They are not looked at anew in every step; an assignment to ``.data`` need not be told."""
    ours, theirs = nn.Parameter(torch.arange(16.0).view(4, 4)), nn.Parameter(torch.arange(16.0).view(4, 4))
    mine, reference = GossipAdamW([ours], lr=0.1), torch.optim.AdamW([theirs], lr=0.1)
    for step in range(8):
        for parameter in ours, theirs:
            parameter.grad = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            if step == 3:
                parameter.data = parameter.data.clone()
            if step == 5:
                parameter.data = parameter.data.t()
        if step == 6:
            for each, parameter in (mine, ours), (reference, theirs):
                each.state[parameter]["exp_avg"] = each.state[parameter]["exp_avg"].flip(0)
        mine.step()
        reference.step()
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_model_that_was_moved_is_not_sought_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """``cuda()`` keeps the parameters, and gives them memory elsewhere (here: none)."""
    before, model = model_of(), nn.Linear(5, 3, device="meta")
    earlier, optimizer = GossipAdamW(before.parameters(), lr=0.1), GossipAdamW(model.parameters(), lr=0.1)
    give_gradients(before, 0)
    earlier.step()
    (known,) = earlier._places.values()
    optimizer._places[id(model.weight)] = known
    passes: list[Any] = []
    monkeypatch.setattr(gossip_adamw, "_in_one_pass", lambda *arguments: passes.append(arguments))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    optimizer.step()
    assert not passes
    assert not optimizer._places


def test_no_copies_of_16_bit_weights_are_kept() -> None:
    model = model_of(dtype=torch.bfloat16)
    optimizer = GossipAdamW(model.parameters(), lr=0.1)
    for step in range(4):
        give_gradients(model, step)
        optimizer.step()
    assert not optimizer._places


@pytest.mark.parametrize("p", [2, 4, 16, 64])
def test_it_divides_by_the_size_of_the_mean_gradient(p: int) -> None:
    """Gradients of which some are signal and some are noise: √v̂ beside the root mean square of the mean of p workers."""
    signal, steps, alike = torch.tensor([1.0, 0.3, 0.0]), 2000, 50
    parameter = nn.Parameter(torch.zeros(alike, 3))
    optimizer = GossipAdamW([parameter], lr=0.0, averaged_over=p)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        parameter.grad = signal + torch.randn(alike, 3, generator=generator)
        optimizer.step()
    found = (optimizer.state[parameter]["exp_avg_sq"].mean(0) / (1 - 0.999**steps)).sqrt()
    # But not below the noise that a worker's own momentum has.
    noise = max(1 / p, 0.1 / 1.9)
    assert torch.allclose(found, (signal**2 + noise).sqrt(), rtol=0.02)


def test_early_too_it_divides_by_the_size_of_the_mean_gradient() -> None:
    """After few updates, when the momentum has averaged little: the root mean square over many elements."""
    p, steps, parameter = 4, 12, nn.Parameter(torch.zeros(20000))
    optimizer = GossipAdamW([parameter], lr=0.0, averaged_over=p)
    generator = torch.Generator().manual_seed(0)
    squares = torch.zeros(steps)
    for step in range(steps):
        parameter.grad = torch.randn(20000, generator=generator)
        before = optimizer.state[parameter]["exp_avg_sq"].mean() if step else 0.0
        optimizer.step()
        squares[step] = (optimizer.state[parameter]["exp_avg_sq"].mean() - 0.999 * before) / 0.001
    assert squares[0] == pytest.approx(1.0, rel=0.05), "the gradient's own: nothing is averaged yet"
    assert squares[1] < 0.6
    assert torch.allclose(squares[4:], torch.tensor(1 / p), rtol=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_pass_and_several_come_to_the_same(dtype: torch.dtype) -> None:
    """Tensors whose elements do not stand in a row are updated in several passes."""
    start = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    parameters = nn.Parameter(start.clone()), nn.Parameter(start.clone(memory_format=torch.channels_last))
    optimizers = [GossipAdamW([parameter], 0.1, weight_decay=0.2, averaged_over=4) for parameter in parameters]
    for step in range(5):
        gradient = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(step)).to(dtype)
        for parameter, optimizer in zip(parameters, optimizers, strict=True):
            parameter.grad = torch.empty_like(parameter).copy_(gradient)
            optimizer.step()
    assert not parameters[1].is_contiguous()
    assert torch.allclose(parameters[0], parameters[1], rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_tensors_count_their_own_updates() -> None:
    """Among them one that had no gradient at first, and one without elements."""
    torch.manual_seed(0)
    starts = [torch.randn(7), torch.randn(3, 2), torch.randn(0), torch.randn(5)]
    together = [nn.Parameter(start.clone()) for start in starts]
    alone = [nn.Parameter(start.clone()) for start in starts]
    optimizer = GossipAdamW(together, 0.1, averaged_over=4)
    others = [GossipAdamW([parameter], 0.1, averaged_over=4) for parameter in alone]
    for step in range(6):
        for one, other in zip(together, alone, strict=True):
            one.grad = None if one.numel() == 5 and step < 3 else torch.randn_like(one)
            other.grad = None if one.grad is None else one.grad.clone()
        for each in (optimizer, *others):
            each.step()
    for one, other, start in zip(together, alone, starts, strict=True):
        assert torch.equal(one, other)
        assert not one.numel() or not torch.equal(one, start)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_remembered_follows_a_model_that_changes_its_precision(saved: torch.dtype) -> None:
    model = model_of(dtype=torch.float64)
    optimizer = GossipAdamW(model.parameters(), 0.02)
    give_gradients(model, 0)
    optimizer.step()
    before = {p: {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)} for p in model.parameters()}
    model.float()
    for parameter, state in before.items():
        optimizer.state[parameter].update({name: tensor.to(saved) for name, tensor in state.items()})
    give_gradients(model, 1)
    optimizer.step()
    for parameter, state in before.items():
        kept = optimizer.state[parameter]["exp_avg"]
        assert kept.dtype == torch.float32
        assert parameter.grad is not None
        assert torch.allclose(kept, 0.9 * state["exp_avg"].float() + 0.1 * parameter.grad, rtol=1e-2, atol=1e-3)
        assert parameter.isfinite().all()


def test_what_is_remembered_of_another_shape_is_refused() -> None:
    model = model_of()
    optimizer = GossipAdamW(model.parameters(), 0.02)
    give_gradients(model, 0)
    optimizer.step()
    optimizer.state[model.weight]["exp_avg"] = torch.zeros(2)
    give_gradients(model, 1)
    with pytest.raises(RuntimeError, match="size"):
        optimizer.step()


def asked(algorithm: Any, world: int, steps: int, optimizer_of: Any = GossipAdamW) -> list[int]:
    """What the optimizer was told in each step."""

    def body(rank: int) -> list[int]:
        model = model_of()
        optimizer = optimizer_of(model.parameters())
        replica = gossamer.replicate(model, optimizer, algorithm)
        told = []
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(2, 5)).sum().backward()
            optimizer.step()
            told.append(optimizer.param_groups[0]["averaged_over"])
        replica.close()
        return told

    return loopback(body, world)[-1]


@pytest.mark.parametrize(
    ("algorithm", "told"),
    [
        (AllReduce(), [1, 1, 1]),
        (Gossip(), [4, 4, 4]),
        (gossamer.DecentralizedSGD(every=2), [4, 4, 4]),
        (gossamer.after(2, Gossip()), [1, 1, 4]),
        (gossamer.after(1, AllReduce(), before=Gossip()), [4, 1, 1]),
        (by_size(20, small=gossamer.DecentralizedSGD(), large=Gossip()), [4, 4, 4]),
        (Hierarchical(Gossip(), ranks_per_node=2), [2, 2, 2]),
        (Hierarchical(ranks_per_node=2), [1, 1, 1]),
    ],
    ids=repr,
)
def test_it_is_told_how_many_gradients_the_mean_update_is_made_of(algorithm: Any, told: list[int]) -> None:
    assert asked(algorithm, 4, 3) == told


def test_master_weights_pass_it_on() -> None:
    def masters(params: Any) -> MasterWeights:
        return MasterWeights(GossipAdamW, params)

    assert asked(Gossip(), 2, 2, masters) == [2, 2]


def test_workers_with_small_batches_keep_up_with_an_all_reduce() -> None:
    """Least squares with noise far above the signal: beside AdamW on mean gradients, AdamW under gossip falls behind."""

    def left(kind: Any, algorithm: Any) -> float:
        def body(rank: int) -> float:
            parameter = nn.Parameter(torch.ones(200))
            model = nn.Module()
            model.w = parameter
            optimizer = kind(model.parameters(), lr=2e-3, weight_decay=0.0)
            replica = gossamer.replicate(model, optimizer, algorithm)
            generator = torch.Generator().manual_seed(rank)
            for _ in range(300):
                optimizer.zero_grad()
                target = 8 * torch.randn(200, generator=generator)
                (model.w - target).square().sum().div(2).backward()
                optimizer.step()
            with replica.consensus():
                result = float(model.w.detach().abs().mean())
            replica.close()
            return result

        return loopback(body, 16)[0]

    exact, plain, ours = left(torch.optim.AdamW, AllReduce()), left(torch.optim.AdamW, Gossip()), left(GossipAdamW, Gossip())
    assert plain > exact + 0.1
    assert ours < exact + (plain - exact) / 2, (exact, plain, ours)


def test_it_resumes_where_it_was() -> None:
    whole, halves = model_of(), model_of()
    optimizer = GossipAdamW(whole.parameters(), averaged_over=3)
    first = GossipAdamW(halves.parameters(), averaged_over=3)
    for step in range(6):
        give_gradients(whole, step)
        optimizer.step()
        give_gradients(halves, step)
        if step == 3:
            saved = first.state_dict()
            first = GossipAdamW(halves.parameters())
            first.load_state_dict(saved)
            assert first.param_groups[0]["averaged_over"] == 3
        first.step()
    assert torch.equal(weights(whole), weights(halves))


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"averaged_over": 0}], ids=repr
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        GossipAdamW(model_of().parameters(), **options)


@pytest.mark.parametrize("masters", [False, True])
def test_afterwards_it_is_as_if_it_had_never_been_told(masters: bool) -> None:
    def body(rank: int) -> list[int]:
        model = model_of()
        groups = [{"params": [model.weight]}, {"params": [model.bias], "averaged_over": 3}]
        optimizer = MasterWeights(GossipAdamW, groups) if masters else GossipAdamW(groups)
        replica = gossamer.replicate(model, optimizer, Gossip())
        give_gradients(model, 0)
        (0 * model(torch.ones(2, 5)).sum()).backward()
        optimizer.step()
        during = [group["averaged_over"] for group in optimizer.param_groups]
        again = copy.deepcopy(optimizer.state_dict())
        optimizer.load_state_dict(again)  # a run that is resumed after a step
        replica.close()
        optimizer.step()
        assert [key for group in optimizer.param_groups for key in group if "gossamer" in key] == []
        return during + [group["averaged_over"] for group in optimizer.param_groups]

    assert loopback(body, 4) == [[4, 4, 1, 3]] * 4


@pytest.mark.parametrize("masters", [False, True])
def test_what_is_saved_trains_alone(masters: bool) -> None:
    """It is not that of a mean of several: alone, it would be divided by too little."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return MasterWeights(GossipAdamW, model.parameters()) if masters else GossipAdamW(model.parameters())

    def body(rank: int) -> tuple[int, int]:
        model, again = model_of(), model_of()
        optimizer, alone = make(model), make(again)
        gossamer.replicate(model, optimizer, Gossip())
        for step in range(2):
            model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            alone.load_state_dict(optimizer.state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
        assert [key for group in alone.param_groups for key in group if "gossamer" in key] == []
        return alone.param_groups[0]["averaged_over"], optimizer.param_groups[0]["averaged_over"]

    assert loopback(body, 4) == [(1, 1)] * 4


def test_autograd_notices_an_update_in_one_pass() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    optimizer = GossipAdamW(model.parameters())
    loss = model(torch.ones(2, 3)).sum()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_one_pass_is_for_tensors_without_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nn.Parameter(torch.ones(4, 3, 5, 5))
    turned = nn.Parameter(torch.ones(2, 3, 5, 5).contiguous(memory_format=torch.channels_last))
    optimizer = GossipAdamW([whole, turned])
    for parameter in (whole, turned):
        parameter.grad = torch.ones_like(parameter)
    seen: list[int] = []
    monkeypatch.setattr(loops, "adamw", lambda addresses, sizes, *rest: seen.extend(sizes.tolist()))
    optimizer.step()
    assert seen == [whole.numel()]
    assert torch.equal(whole, torch.ones_like(whole)), "left to the loop"
    assert not torch.equal(turned, torch.ones_like(turned))


def test_a_sparse_gradient_is_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="GossipAdamW needs all of it"):
        GossipAdamW(table.parameters()).step()


def test_16_bits_are_computed_in_float32() -> None:
    model = model_of(dtype=torch.bfloat16)
    optimizer = GossipAdamW(model.parameters(), averaged_over=2)
    give_gradients(model, 0)
    before: Tensor = weights(model)
    optimizer.step()
    assert optimizer.state[model.weight]["exp_avg_sq"].dtype == torch.float32
    assert not torch.equal(weights(model), before)


def test_it_goes_on_from_a_state_of_adamw() -> None:
    """Which knows neither how many gradients are averaged, nor that steps are whole numbers here."""
    model, twin = model_of(), model_of()
    before, after = torch.optim.AdamW(model.parameters(), lr=0.01), torch.optim.AdamW(twin.parameters(), lr=0.01)
    for seed in range(2):
        for each, optimizer in ((model, before), (twin, after)):
            give_gradients(each, seed)
            optimizer.step()
    ours = GossipAdamW(model.parameters(), lr=0.5)
    ours.load_state_dict(before.state_dict())
    assert (ours.param_groups[0]["averaged_over"], ours.param_groups[0]["lr"]) == (1, 0.01)
    for each, optimizer in ((model, ours), (twin, after)):
        give_gradients(each, 7)
        optimizer.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-6)
        assert ours.state[one]["step"] == 3


def test_a_copy_of_a_told_one_trains_alone() -> None:
    model = model_of()
    optimizer = GossipAdamW(model.parameters(), averaged_over=2)
    tell_how_many(optimizer, lambda: 4)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert twin.param_groups[0]["averaged_over"] == 2
    assert optimizer.param_groups[0]["averaged_over"] == 4


def test_what_is_remembered_of_as_many_numbers_in_another_shape_is_refused() -> None:
    weight = nn.Parameter(torch.ones(4, 6))
    weight.grad = torch.ones(4, 6)
    optimizer = GossipAdamW([weight])
    optimizer.step()
    optimizer.state[weight]["exp_avg"] = torch.zeros(6, 4)
    with pytest.raises(RuntimeError):
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.9,), (0.9, 0.99, 0.999), 0.9, "ab"])
def test_betas_are_two_numbers(betas: Any) -> None:
    with pytest.raises(ConfigurationError, match="betas"):
        GossipAdamW(model_of().parameters(), betas=betas)


@pytest.mark.parametrize("lr", [None, [0.1], "0.1"])
def test_a_learning_rate_is_a_number(lr: Any) -> None:
    with pytest.raises(ConfigurationError, match="lr must be"):
        GossipAdamW(model_of().parameters(), lr=lr)
