"""One battery over every registered algorithm, through ``replicate()`` and a whole training loop in loopback."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import Gossip, loopback
from gossamer.algorithms import Algorithm, registry

from .cases import WORLDS, algorithms, batch, make_training, mixed, same_bits, train_step, weights

everyone = pytest.mark.parametrize("algorithm", [*algorithms(bucket_bytes=200), *mixed()], ids=repr)
of_gradients = pytest.mark.parametrize("algorithm", algorithms("gradients", bucket_bytes=200), ids=repr)
SINGLE, DOUBLE, HALF = (torch.float32, None), (torch.float64, torch.float32), (torch.bfloat16, torch.float16)
worlds_and_dtypes = pytest.mark.parametrize(
    ("world", "dtypes"), [(2, SINGLE), (3, SINGLE), (8, SINGLE), (3, DOUBLE), (2, HALF), (8, HALF)], ids=str
)
exact = [cls(bucket_bytes=200) for cls in registry().values() if cls().traits.exact]
of_weights = pytest.mark.parametrize("algorithm", algorithms("weights", bucket_bytes=200), ids=repr)

keep_the_mean = pytest.mark.parametrize(
    "algorithm", [a for a in algorithms("weights", bucket_bytes=200) if not a.traits.moves_mean], ids=repr
)


def train(
    algorithm: Algorithm | None, rank: int, steps: int, lr: float = 0.05, data_of: int | None = None, **options
) -> Tensor:
    """The weights after some steps; ``data_of`` lets a rank train on another one's data."""
    model, optimizer, replica = make_training(algorithm, seed=rank, lr=lr, **options)
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        train_step(model, optimizer, batch(step, rank if data_of is None else data_of, dtype))
    if replica is not None:
        replica.close()
    return weights(model)


@functools.cache
def train_alone(steps: int, data_of: int, dtype: torch.dtype = torch.float32, other: torch.dtype | None = None) -> Tensor:
    """The weights of one that communicates with nobody."""
    return train(None, 0, steps, data_of=data_of, dtype=dtype, other=other)


@of_gradients
@worlds_and_dtypes
def test_replicas_stay_bit_identical(algorithm: Algorithm, world: int, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    replicas = loopback(lambda rank: train(algorithm, rank, 4, dtype=dtypes[0], other=dtypes[1]), world)
    assert replicas[0].isfinite().all()
    assert all(same_bits(replica, replicas[0]) for replica in replicas)


@of_weights
@worlds_and_dtypes
def test_replicas_stay_close(algorithm: Algorithm, world: int, dtypes: tuple[torch.dtype, torch.dtype | None]) -> None:
    """Different data push the replicas apart; after ten steps they are closer than without communication."""
    together = torch.stack(loopback(lambda rank: train(algorithm, rank, 10, dtype=dtypes[0], other=dtypes[1]), world))
    alone = torch.stack([train_alone(10, rank, *dtypes) for rank in range(world)])
    assert together.isfinite().all()
    assert together.std(0).norm() < 0.6 * alone.std(0).norm()


@pytest.mark.parametrize("algorithm", exact, ids=repr)
@pytest.mark.parametrize("world", WORLDS)
def test_exact_algorithms_equal_one_worker_with_the_whole_batch(algorithm: Algorithm, world: int) -> None:
    model, optimizer, _ = make_training(None, dtype=torch.float64)
    for step in range(5):
        train_step(model, optimizer, torch.cat([batch(step, rank, torch.float64) for rank in range(world)]))
    replicas = loopback(lambda rank: train(algorithm, rank, 5, dtype=torch.float64), world)
    assert (replicas[0] - weights(model)).abs().max() < 1e-10


@pytest.mark.parametrize("algorithm", [a for a in (*algorithms(), *mixed()) if not a.traits.takes_momentum], ids=repr)
def test_a_world_of_one_trains_as_alone(algorithm: Algorithm) -> None:
    """With and without a loopback world around it."""
    alone = train_alone(5, 0)
    assert same_bits(train(algorithm, 0, 5), alone)
    assert same_bits(loopback(lambda rank: train(algorithm, rank, 5), 1)[0], alone)


@keep_the_mean
@pytest.mark.parametrize("world", [2, 3, 8])
def test_equal_data_make_gossip_the_identity(algorithm: Algorithm, world: int) -> None:
    replicas = loopback(lambda rank: train(algorithm, rank, 5, data_of=0), world)
    assert all(same_bits(replica, train_alone(5, 0)) for replica in replicas)


@everyone
@pytest.mark.parametrize("world", [1, 3, 5])
def test_a_run_resumes_bit_identically(algorithm: Algorithm, world: int) -> None:
    """Saved in mid-run and loaded into new objects made from another seed: the rest of the run is the same."""

    def uninterrupted(rank: int) -> tuple[Tensor, dict[str, dict]]:
        model, optimizer, replica = make_training(algorithm)
        for step in range(6):
            if step == 3:
                saved = {"replica": replica.state_dict(), "model": model.state_dict(), "optimizer": optimizer.state_dict()}
                saved = copy.deepcopy(saved)
            train_step(model, optimizer, batch(step, rank))
        replica.close()
        return weights(model), saved

    runs = loopback(uninterrupted, world)

    def resumed(rank: int) -> Tensor:
        model, optimizer, replica = make_training(algorithm, seed=7)
        saved = runs[rank][1]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        replica.load_state_dict(saved["replica"])
        for step in range(3, 6):
            train_step(model, optimizer, batch(step, rank))
        assert replica.step == 6
        replica.close()
        return weights(model)

    for (through, _), again in zip(runs, loopback(resumed, world), strict=True):
        assert same_bits(through, again)


class Ramp(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(300).uniform_(0.5, 2.0))

    def forward(self, gradient: Tensor) -> Tensor:
        return self.weight @ gradient


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [3, 4])
def test_gossip_keeps_the_whole_step(wire: str, world: int) -> None:
    """A constant update of 1e-4 of the weights' size, different on every rank: the mean moves its full length."""
    steps = 400
    torch.manual_seed(0)
    update = 1e-4 * Ramp().weight.detach()

    def body(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = Ramp()
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, Gossip(wire=wire))
        for _ in range(steps):
            optimizer.zero_grad()
            model(-update * 2 * rank / (world - 1)).backward()
            optimizer.step()
        replica.close()
        return before, model.weight.detach()

    before, after = (torch.stack(pair).double().mean(0) for pair in zip(*loopback(body, world), strict=True))
    moved = (after - before) / (steps * update)
    assert (moved - 1).abs().max() < 0.01
