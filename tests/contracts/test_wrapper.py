"""A wrapper in five lines that passes everything through is the algorithm inside it, for every algorithm and combination."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from gossamer import loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.state import State

from . import laws
from .cases import algorithms, batch, make_training, same_bits, train_step, weights
from .traces import load, subjects, trace

SUBJECTS, RECORDED = subjects(), load()


@dataclass(frozen=True, kw_only=True)
class PassThrough(Algorithm, register=False):
    inner: Algorithm

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        return (yield from self.inner.exchange(bucket, state, ctx))


ALONE = algorithms()


def battery(algorithm: Algorithm, world: int) -> None:
    """The laws of one exchange."""
    laws.meta_tensors_suffice(algorithm, world)
    laws.nothing_stays_nothing(algorithm, world)
    laws.the_same_again_gives_the_same_bits(algorithm, world)
    if algorithm.subject == "gradients":
        laws.all_ranks_hold_the_same_bits(algorithm, world, torch.float32)
        laws.non_finite_values_reach_all_ranks_and_no_state(algorithm, world, float("nan"))
        laws.among_one_nothing_is_kept_back(algorithm, torch.float32)


def trained(algorithm: Algorithm, world: int) -> list[Tensor]:
    """Every rank's weights after some steps."""

    def body(rank: int) -> Tensor:
        model, optimizer, replica = make_training(algorithm)
        assert replica is not None
        for step in range(7):
            train_step(model, optimizer, batch(step, rank))
        replica.close(average=True)
        return weights(model)

    return loopback(body, world)


@pytest.mark.parametrize("algorithm", ALONE, ids=repr)
def test_it_passes_the_battery(algorithm: Algorithm) -> None:
    around = PassThrough(inner=algorithm)
    assert (around.traits, around.cadence) == (algorithm.traits, algorithm.cadence)
    assert around.bucket_bytes == algorithm.bucket_bytes
    battery(around, 4)


@pytest.mark.parametrize("name", SUBJECTS)
def test_it_sends_what_is_inside_sends_and_trains_to_the_same_bits(name: str) -> None:
    inside = SUBJECTS[name]
    around = PassThrough(inner=inside)
    assert around.subject == inside.subject
    assert trace(around, 4) == RECORDED[name]["4"], "what is inside sends that, in a test of its own"
    assert all(map(same_bits, trained(around, 4), trained(inside, 4)))
