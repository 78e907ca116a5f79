"""LARS and LAMB beside the published formulas in float64, and as torch optimizers."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import ConfigurationError, UsageError, loopback
from gossamer.optim import LAMB, LARS, warmup

Make = Callable[..., torch.optim.Optimizer]
BOTH = pytest.mark.parametrize(
    "make", [lambda p, **o: LARS(p, 2.0, **o), lambda p, **o: LAMB(p, 0.05, **o)], ids=["LARS", "LAMB"]
)


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    source = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (7,), (2, 3, 4), ()]
    return [nn.Parameter(torch.randn(shape, generator=source, dtype=torch.float64).to(dtype)) for shape in shapes]


def gradients(step: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=source, dtype=torch.float64) for p in weights()]


def run(optimizer: torch.optim.Optimizer, steps: int, begin: int = 0) -> list[Tensor]:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(begin, begin + steps):
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [p.detach() for p in parameters]


def lars_reference(lr: float, m: float, wd: float, eta: float, eps: float, adapt: Callable[[Tensor], bool]) -> list[Tensor]:
    """Algorithm 1 of arXiv 1708.03888."""
    result = []
    for index, parameter in enumerate(weights()):
        w, v = parameter.detach().clone(), 0.0
        for step in range(10):
            g, adapted = gradients(step)[index], adapt(parameter)
            beta = wd if adapted else 0.0
            local = eta * w.norm() / (g.norm() + beta * w.norm() + eps) if adapted else 1.0
            v = m * v + lr * local * (g + beta * w)
            w = w - v
        result.append(w)
    return result


def lamb_reference(
    lr: float, betas: tuple[float, float], wd: float, eps: float, correct: bool, clip: Any, adapt: Any
) -> list[Tensor]:
    """Algorithm 2 of arXiv 1904.00962."""
    result = []
    for index, parameter in enumerate(weights()):
        w, m, v = parameter.detach().clone(), torch.zeros(()), torch.zeros(())
        for step in range(10):
            g, adapted = gradients(step)[index], adapt(parameter)
            m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
            a, b = (1 - betas[0] ** (step + 1), 1 - betas[1] ** (step + 1)) if correct else (1.0, 1.0)
            u = (m / a) / ((v / b) ** 0.5 + eps) + (wd * w if adapted else 0.0)
            ratio = min(max(float(w.norm() / u.norm()), clip[0]), clip[1]) if adapted else 1.0
            w = w - lr * ratio * u
        result.append(w)
    return result


BY_DIMENSION = {None: lambda p: p.dim() > 1, True: lambda p: True, False: lambda p: False}


@pytest.mark.parametrize("adapt", [None, True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_lars_is_the_published_formula(adapt: bool | None, momentum: float, decay: float) -> None:
    optimizer = LARS(weights(), 3.0, momentum=momentum, weight_decay=decay, trust=0.02, eps=1e-3, adapt=adapt)
    expected = lars_reference(3.0, momentum, decay, 0.02, 1e-3, BY_DIMENSION[adapt])
    for ours, theirs in zip(run(optimizer, 10), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("adapt", [None, True, False])
@pytest.mark.parametrize("correct", [True, False])
@pytest.mark.parametrize("clip", [None, (0.5, 0.8)])
def test_lamb_is_the_published_formula(adapt: bool | None, correct: bool, clip: Any) -> None:
    options = {"betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.05}
    optimizer = LAMB(weights(), 0.03, **options, bias_correction=correct, trust_clip=clip, adapt=adapt)
    expected = lamb_reference(0.03, (0.8, 0.95), 0.05, 1e-3, correct, clip or (0.0, 1e9), BY_DIMENSION[adapt])
    for ours, theirs in zip(run(optimizer, 10), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_lamb_without_adaption_is_adam() -> None:
    ours = run(LAMB(weights(), 0.01, eps=1e-8, adapt=False), 10)
    theirs = run(torch.optim.Adam(weights(), 0.01), 10)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in zip(ours, theirs, strict=True))


@BOTH
def test_a_matrix_of_zeros_can_be_left(make: Make) -> None:
    parameter = nn.Parameter(torch.zeros(3, 3))
    parameter.grad = torch.ones(3, 3)
    make([parameter], weight_decay=0.1).step()
    assert parameter.isfinite().all()
    assert (parameter < 0).all()


@BOTH
def test_no_gradient_leaves_a_matrix_where_it_is(make: Make) -> None:
    parameter = nn.Parameter(torch.ones(3, 3))
    parameter.grad = torch.zeros(3, 3)
    make([parameter]).step()
    assert torch.equal(parameter, torch.ones(3, 3))


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_precision_follows_float64(make: Make, dtype: torch.dtype) -> None:
    """Half-precision weights are computed in float32: they differ from float64 by roundings of the result only."""
    optimizer = make(weights(dtype), weight_decay=0.01)
    for ours, theirs in zip(run(optimizer, 4), run(make(weights(), weight_decay=0.01), 4), strict=True):
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(ours.double(), theirs, rtol=8 * eps, atol=16 * eps)
    state = [value for entry in optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]
    assert state
    assert all(value.dtype == torch.float32 for value in state)


@BOTH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_reloaded_state_goes_on_bit_for_bit(make: Make, dtype: torch.dtype) -> None:
    straight = run(make(weights(dtype)), 6)
    first = make(weights(dtype))
    half_way = run(first, 3)
    second = make([nn.Parameter(w.clone()) for w in half_way])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(run(second, 3, begin=3), straight, strict=True))


@BOTH
def test_a_loaded_state_is_a_copy(make: Make) -> None:
    first = make(weights())
    run(first, 2)
    saved = copy.deepcopy(first.state_dict())
    second = make(weights())
    second.load_state_dict(first.state_dict())
    run(second, 2)
    for key, entry in first.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(saved["state"][key][n])) for n, v in entry.items())


@BOTH
def test_groups_have_options_of_their_own(make: Make) -> None:
    a, b = weights()[0], nn.Parameter(weights()[0].detach().clone())
    optimizer = make([{"params": [a]}, {"params": [b], "lr": 0.0}])
    for parameter in (a, b):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(a, weights()[0])
    assert torch.equal(b, weights()[0])


@BOTH
def test_a_parameter_without_gradient_stays(make: Make) -> None:
    parameters = weights()
    parameters[0].grad = torch.ones_like(parameters[0])
    optimizer = make(parameters)
    optimizer.step()
    assert torch.equal(parameters[1], weights()[1])
    assert parameters[1] not in optimizer.state
    optimizer.zero_grad()
    assert parameters[0].grad is None


@BOTH
def test_it_learns_a_tiny_problem(make: Make) -> None:
    """A closure, a schedule and two layers; the loss falls to a hundredth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
    x = torch.randn(64, 6)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2]], 1)
    options = {"trust": 0.01} if isinstance(make(weights()), LARS) else {}
    optimizer = make(model.parameters(), **options)
    schedule = warmup(optimizer, 10, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 290))

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses = []
    for _ in range(300):
        losses.append(optimizer.step(closure).item())
        schedule.step()
    assert losses[-1] < losses[0] / 100


@BOTH
@pytest.mark.parametrize("algorithm", [gossamer.AllReduce(), gossamer.Gossip()], ids=repr)
def test_replicas_stay_alike(make: Make, algorithm: gossamer.Algorithm) -> None:
    """Bit-identical after an all-reduce; with gossip, after the average of all."""

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = make(model.parameters())
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(5):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).square().mean().backward()
            optimizer.step()
        with replica.consensus():
            return [p.detach().clone() for p in model.parameters()]

    ranks = loopback(body, 3)
    assert all(torch.equal(a, b) for rank in ranks[1:] for a, b in zip(ranks[0], rank, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda: LARS(weights(), -1.0),
        lambda: LARS(weights(), "0.1"),
        lambda: LARS(weights(), 1.0, momentum=1.0),
        lambda: LARS(weights(), 1.0, trust=float("nan")),
        lambda: LARS(weights(), 1.0, adapt="yes"),
        lambda: LARS([{"params": weights(), "weight_decay": -0.1}], 1.0),
        lambda: LAMB(weights(), betas=(0.9, 1.0)),
        lambda: LAMB(weights(), trust_clip=(2.0, 1.0)),
        lambda: LAMB(weights(), trust_clip=10.0),
        lambda: LAMB(weights(), trust_clip=("0", "1")),
        lambda: LAMB(weights(), eps=-1.0),
    ],
)
def test_options_out_of_range_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ConfigurationError, match="must be"):
        make()


@BOTH
def test_sparse_gradients_are_refused(make: Make) -> None:
    table = nn.Embedding(4, 3, sparse=True)
    optimizer = make(table.parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        optimizer.step()


def rates(schedule: torch.optim.lr_scheduler.LRScheduler, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


def test_a_warm_up_rises_linearly_and_stays() -> None:
    optimizer = LARS(weights(), 8.0)
    assert rates(warmup(optimizer, 3), optimizer, 6) == pytest.approx([2, 4, 6, 8, 8, 8])


def test_another_schedule_follows_from_its_beginning() -> None:
    optimizer = LARS(weights(), 8.0)
    after = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    assert rates(warmup(optimizer, 3, after), optimizer, 8) == pytest.approx([2, 4, 6, 8, 8, 4, 4, 2])


@pytest.mark.parametrize("steps", [0, 2.5, True])
def test_a_warm_up_of_no_number_of_steps_is_refused(steps: Any) -> None:
    with pytest.raises(ConfigurationError, match="at least one step"):
        warmup(LARS(weights(), 1.0), steps)
