"""DDPHook: where it runs and where it is refused; what its bucket answers. Real hooks: tests/processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, DDPHook, Hierarchical, loopback
from gossamer.algorithms import Algorithm, after, by_size
from gossamer.algorithms.ddp_hook import HookBucket
from gossamer.buckets import Bucket, make_layout
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, step_time


def averaging(state: Any, bucket: Any) -> Tensor:
    """A hook; never called here."""
    raise AssertionError


def step(algorithm: Algorithm) -> Tensor:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, algorithm)
    model(torch.ones(1, 3)).sum().backward()
    replica.close()
    return model.weight.grad


WAYS = [
    DDPHook(averaging),
    after(0, DDPHook(averaging)),
    by_size(0, small=AllReduce(), large=DDPHook(averaging)),
    Hierarchical(DDPHook(averaging), ranks_per_node=1),
]


@pytest.mark.parametrize("algorithm", WAYS, ids=repr)
def test_loopback_refuses_it_by_name(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigurationError, match=r"averaging.* communicates by itself .*: loopback cannot run it"):
        loopback(lambda rank: step(algorithm), 2)
    assert algorithm.serial


@pytest.mark.parametrize("algorithm", WAYS, ids=repr)
def test_simulation_refuses_it_by_name(algorithm: Algorithm) -> None:
    model, link = nn.Linear(3, 2, device="meta"), Link(bandwidth=1e9, latency=1e-3)
    with pytest.raises(ConfigurationError, match=r"averaging.* communicates by itself .*: simulation cannot run it"):
        step_time(model, algorithm, world=4, link=link, compute=Compute(forward=0.01, backward=0.02))


@pytest.mark.parametrize("made", [Hierarchical(DDPHook(averaging)), Hierarchical(after(3, DDPHook(averaging)))], ids=repr)
def test_it_is_refused_where_only_some_ranks_would_run_it(made: Hierarchical) -> None:
    with pytest.raises(ConfigurationError, match=r"averaging.* communicates by itself with all ranks, and inside Hierarchical"):
        replace(made, ranks_per_node=2).check(4)
    inner = Hierarchical(inner=DDPHook(averaging), ranks_per_node=2)
    with pytest.raises(ConfigurationError, match="with all ranks"):
        inner.check(4)
    inner.check(2)  # all of them are on one machine
    replace(made, ranks_per_node=1).check(4)


def test_alone_nothing_is_asked_of_it() -> None:
    assert torch.equal(step(DDPHook(averaging)), torch.ones(2, 3))


def test_its_bucket_looks_like_ddp_s() -> None:
    bucket = Bucket(3, make_layout({"a": torch.empty(2, 3), "b": torch.empty(4)}))
    handed = HookBucket(bucket.holding(torch.arange(10.0)))
    assert handed.index() == 3
    assert [list(view.shape) for view in handed.gradients()] == [[2, 3], [4]]
    handed.gradients()[1].zero_()
    assert handed.buffer().tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    handed.set_buffer(torch.ones(10))
    assert handed.gradients()[0].sum() == 6
    with pytest.raises(ConfigurationError, match="asks for the parameters"):
        handed.parameters()


@pytest.mark.parametrize("hook", [None, "mean", 3])
def test_a_hook_is_a_function(hook: object) -> None:
    with pytest.raises(ConfigurationError, match="hook must be a function"):
        DDPHook(hook)
