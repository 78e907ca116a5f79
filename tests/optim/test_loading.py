"""Loading: with all bits, after the hooks that change a state and before hooks that look at what was loaded."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from gossamer.optim import LAMB, GossipAdamW, MasterWeights, OneBitAdam, QAdam


def master_adamw(parameters: Any) -> MasterWeights:
    return MasterWeights(AdamW, parameters)


@pytest.mark.parametrize("make", [OneBitAdam, QAdam, GossipAdamW, LAMB, master_adamw])
def test_hooks_around_a_load(make: Callable[[Any], Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    weight.grad = torch.full_like(weight, 0.3)
    first, second = make([weight]), make([weight])
    first.step()
    saved = copy.deepcopy(first.state_dict())
    seen = []

    def doubled(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        state = {key: {**entry, "exp_avg": 2 * entry["exp_avg"]} for key, entry in state_dict["state"].items()}
        return {**state_dict, "state": state}

    second.register_load_state_dict_pre_hook(doubled)
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state[weight]["exp_avg"]))
    second.load_state_dict(saved)
    assert len(seen) == 1
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], 2 * saved["state"][0]["exp_avg"])
    second.load_state_dict(saved)
    assert len(seen) == 2, "once per load, also in the second one"
    assert (len(second._optimizer_load_state_dict_pre_hooks), len(second._optimizer_load_state_dict_post_hooks)) == (1, 1)


@pytest.mark.parametrize("make", [OneBitAdam, GossipAdamW, LAMB])
def test_what_is_loaded_is_a_copy(make: Callable[[Any], Optimizer]) -> None:
    weight = nn.Parameter(torch.ones(8))
    weight.grad = torch.full_like(weight, 0.3)
    first, second = make([weight]), make([weight])
    first.step()
    saved = first.state_dict()
    second.load_state_dict(saved)
    before = second.state[weight]["exp_avg"].clone()
    saved["state"][0]["exp_avg"].zero_()
    assert torch.equal(second.state[weight]["exp_avg"], before)
