"""DDPHook: where it runs and where it is refused; what its bucket answers. Real hooks: tests/processes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, DDPHook, Gossip, Hierarchical, loopback
from gossamer.algorithms import Algorithm, after, by_size
from gossamer.algorithms.ddp_hook import HookBucket
from gossamer.buckets import Bucket, make_layout, make_plan
from gossamer.comm.runner import solo_runner
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, step_time
from gossamer.sync.exchange import Exchange


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
    handed = HookBucket(bucket.holding(torch.arange(10.0)), is_last=True)
    assert handed.index() == 3
    assert handed.is_last()
    assert [list(view.shape) for view in handed.gradients()] == [[2, 3], [4]]
    handed.gradients()[1].zero_()
    assert handed.buffer().tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    handed.set_buffer(torch.ones(10))
    assert handed.gradients()[0].sum() == 6
    with pytest.raises(ConfigurationError, match="asks for the parameters"):
        handed.parameters()


@pytest.mark.parametrize("turn", [1, -1], ids=["in order", "reversed"])
def test_each_hook_has_one_last_bucket_whatever_shares_the_step_with_it(turn: int) -> None:
    """ChunkSparse has buckets of two labels, and so has the hook whose time comes after it."""
    tensors = {name: torch.empty(64, 64) for name in "abc"} | {name: torch.empty(64) for name in "xyz"}
    hook, other = DDPHook(averaging, bucket_bytes=1), DDPHook(averaging, bucket_bytes=1)

    def last_buckets(algorithm: Algorithm) -> list[list[str]]:
        exchange = Exchange(solo_runner(), replace(algorithm, bucket_bytes=64))
        exchange.adopt(make_plan(tensors, exchange.algorithm))
        exchange.arrange(range(6)[::turn])
        last = [[b for b in exchange.buckets if any(leaf is which for leaf in b.last_of)] for which in (hook, other)]
        return [[bucket.segments[0].name for bucket in buckets] for buckets in last]

    last, last_large = ("z", "c") if turn > 0 else ("a", "a")
    assert last_buckets(after(3, hook, before=ChunkSparse(chunk=16, bucket_bytes=64))) == [[last], []]
    assert last_buckets(after(3, hook, before=other)) == [[last], [last]]
    inside = Hierarchical(Gossip(), inner=hook, ranks_per_node=2).part("gradients")
    assert inside is not None
    assert inside.serial
    assert last_buckets(inside) == [[last], []]
    assert last_buckets(by_size(1000, small=hook, large=hook)) == [[last], []]
    assert last_buckets(by_size(1000, small=AllReduce(bucket_bytes=1), large=hook)) == [[last_large], []]
    assert last_buckets(by_size(1000, small=hook, large=other)) == [["z" if turn > 0 else "x"], [last_large]]


@pytest.mark.parametrize("hook", [None, "mean", 3])
def test_a_hook_is_a_function(hook: object) -> None:
    with pytest.raises(ConfigurationError, match="hook must be a function"):
        DDPHook(hook)
