"""Momentum on loan: what is left in the optimizer when it is given back."""

import torch
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import ChunkSparse
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
