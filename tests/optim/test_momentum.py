"""Momentum on loan: what is left in the optimizer when it is given back."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import ChunkSparse, ConfigurationError
from gossamer.optim.momentum import lend_momentum, return_momentum

DECAYING = "momentum of the weight decay"


def made() -> tuple[nn.Parameter, SGD]:
    weight = nn.Parameter(torch.ones(8))
    weight.grad = torch.ones(8)
    return weight, SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1)


def test_nothing_accumulated_is_left_after_close() -> None:
    weight, optimizer = made()
    model = nn.ParameterList([weight])
    replica = gossamer.replicate(model, optimizer, ChunkSparse(momentum_correction=True))
    model[0].sum().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    replica.close()
    assert DECAYING in saved["state"][0], "what was saved before stays as it is"
    assert DECAYING not in optimizer.state[weight]
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_what_was_loaded_stays_until_a_step_is_taken() -> None:
    """After a failure between, the next attempt goes on with it."""
    weight, optimizer = made()
    lend_momentum([optimizer])
    optimizer.step()
    saved = optimizer.state_dict()
    return_momentum([optimizer])

    optimizer.load_state_dict(saved)
    lend_momentum([optimizer])
    return_momentum([optimizer])
    assert DECAYING in optimizer.state[weight]
    lend_momentum([optimizer])
    optimizer.step()
    return_momentum([optimizer])
    assert DECAYING not in optimizer.state[weight]


def test_what_is_saved_meanwhile_trains_without_gossamer() -> None:
    """With another algorithm, with plain DDP, or alone: as if nothing had ever been lent."""
    _, optimizer = made()
    lend_momentum([optimizer])
    saved = copy.deepcopy(optimizer.state_dict())
    _, alone = made()
    assert saved["param_groups"] == alone.state_dict()["param_groups"]
    assert optimizer.param_groups[0]["momentum"] == 0.0
    return_momentum([optimizer])
    alone.load_state_dict(saved)
    alone.step()
    assert alone.param_groups[0]["momentum"] == 0.9


def test_what_is_loaded_meanwhile_is_lent_again() -> None:
    _, optimizer = made()
    lend_momentum([optimizer])
    for saved in (optimizer.state_dict(), made()[1].state_dict()):
        optimizer.load_state_dict(saved)
        assert [optimizer.param_groups[0][name] for name in ("momentum", "weight_decay")] == [0.0, 0.0]
        optimizer.step()
    other = made()[1].state_dict()
    other["param_groups"][0]["momentum"] = 0.5
    optimizer.load_state_dict(other)
    with pytest.raises(ConfigurationError, match="a loaded state with another momentum"):
        optimizer.step()


def test_a_state_that_was_saved_as_lent_is_taken_as_it_is() -> None:
    """As earlier versions did."""
    _, optimizer = made()
    saved = optimizer.state_dict()
    lent = {"momentum": 0.0, "weight_decay": 0.0, "momentum lent to gossamer": 0.9, "weight decay lent to gossamer": 0.1}
    saved["param_groups"][0] |= lent
    optimizer.load_state_dict(saved)
    assert lend_momentum([optimizer]) == 0.9
    return_momentum([optimizer])
    assert [optimizer.param_groups[0][name] for name in ("momentum", "weight_decay")] == [0.9, 0.1]


def test_a_schedule_that_cycles_the_momentum_is_named() -> None:
    _, optimizer = made()
    lend_momentum([optimizer])
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    with pytest.raises(ConfigurationError, match="cycle_momentum=False"):
        optimizer.step()


def decayed(optimizer: SGD, weight: nn.Parameter, steps: int, with_closure: bool, decay: float = 0.1) -> torch.Tensor:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (weight**2).sum()
        loss.backward()
        return loss

    for step in range(steps):
        if step == 2:
            optimizer.param_groups[0]["weight_decay"] = decay
        if with_closure:
            assert optimizer.step(closure).item() > 0
        else:
            closure()
            optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("with_closure", [False, True])
@pytest.mark.parametrize("decay", [0.1, 0.3])
def test_the_weight_decay_acts_as_without_a_loan(with_closure: bool, decay: float) -> None:
    """Once, wherever the gradients come from; and as a schedule sets it meanwhile, here without a momentum of gradients."""
    weight, optimizer = made()
    velocity, expected = torch.zeros(8), torch.ones(8)
    for step in range(5):
        velocity = 0.9 * velocity + (0.1 if step < 2 else decay) * expected
        expected = expected - 0.1 * (velocity + 2 * expected)
    lend_momentum([optimizer])
    found = decayed(optimizer, weight, 5, with_closure, decay)
    # With a closure the gradient is that of the weights before their decay, and so it is without one.
    assert torch.allclose(found, expected)
    return_momentum([optimizer])
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_an_overflow_that_is_a_plain_number() -> None:
    """As a GradScaler hands it over where no parameter has a gradient."""
    weight = nn.Parameter(torch.ones(8))
    optimizer = SGD([weight], lr=0.1, momentum=0.9, weight_decay=0.1, fused=True)
    lend_momentum([optimizer])
    optimizer.grad_scale, optimizer.found_inf = None, 0
    optimizer.step()
    assert torch.equal(weight.detach(), torch.ones(8))
    return_momentum([optimizer])
