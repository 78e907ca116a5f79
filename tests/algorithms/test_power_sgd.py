"""PowerSGD: exact for gradients of low rank, nothing lost otherwise."""

import copy

import pytest
import torch
from torch import nn

import gossamer
from contracts.cases import noise, own_runner, same_bits, settle, weights
from gossamer import PowerSGD, loopback
from gossamer.algorithms.base import Context
from gossamer.algorithms.power_sgd import FACTOR, beginning
from gossamer.bucket_plan import make_layout
from gossamer.buckets import Bucket
from gossamer.state import State

SHAPES = {"matrix": (40, 30), "kernel": (16, 4, 3, 3), "vector": (17,), "small": (2, 2)}


def run(gradients: list[list[dict[str, torch.Tensor]]], rank_of: int) -> list[tuple[list[torch.Tensor], State, Bucket]]:
    """``gradients[step][rank]``; results, state and bucket of every rank."""

    def body(rank: int) -> tuple[list[torch.Tensor], State, Bucket]:
        runner, bucket = own_runner(), Bucket(0, make_layout({name: torch.empty(shape) for name, shape in SHAPES.items()}))
        state, results = State(bucket.flat), []
        for step, ranks in enumerate(gradients):
            bucket.renew()
            for view, value in zip(bucket.views, ranks[rank].values(), strict=True):
                view.copy_(value)
            ctx = Context(step, runner.rank, runner.members)
            exact = PowerSGD(rank=rank_of, residual="fp32")
            results.append(runner.run(lambda ctx=ctx, exact=exact: exact.exchange(bucket, state, ctx), f"step {step}"))
            settle(exact, state, results[-1])
        return results, state, bucket

    return loopback(body, len(gradients[0]))


def low_rank(seed: int, rank: int) -> dict[str, torch.Tensor]:
    """Gradients that are of this rank, in the same directions for every seed."""
    shared, own = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    made = {}
    for name, shape in SHAPES.items():
        rows, columns = shape[0], torch.Size(shape[1:]).numel()
        left, right = torch.randn(rows, rank, generator=shared), torch.randn(rank, columns, generator=shared)
        made[name] = (left @ (torch.randn(rank, 1, generator=own) * right)).view(shape)
    return made


@pytest.mark.parametrize("world", [1, 3])
def test_a_gradient_of_low_rank_arrives_whole(world: int) -> None:
    gradients = [[low_rank(10 * step + rank, 2) for rank in range(world)] for step in range(3)]
    results, _, bucket = run(gradients, 2)[0]
    for name, view in zip(SHAPES, bucket.split(results[-1]), strict=True):
        mean = sum(each[name] for each in gradients[-1]) / world
        assert (view - mean).norm() < 1e-4 * mean.norm()


def test_what_does_not_fit_is_kept() -> None:
    source = torch.Generator().manual_seed(0)
    gradients = [
        [{name: torch.randn(shape, generator=source) for name, shape in SHAPES.items()} for _ in range(3)] for _ in range(5)
    ]
    runs = run(gradients, 1)
    had = {name: sum(rank[name] for step in gradients for rank in step) for name in SHAPES}
    sent = runs[0][2].split(3 * sum(runs[0][0]))
    kept = runs[0][2].split(sum(state["residual"] for _, state, _ in runs))
    for name, mean, rest in zip(SHAPES, sent, kept, strict=True):
        assert (mean + rest - had[name]).abs().max() < 1e-3
    assert all(torch.equal(one, other) for results, _, _ in runs for one, other in zip(results, runs[0][0], strict=True))


def test_a_run_resumes_bit_identically_whatever_the_memory_is() -> None:
    """Products with one column depend on where in memory it begins, which loading changes."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(13, 37), nn.Tanh(), nn.Linear(37, 7, bias=False))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, gossamer.replicate(model, optimizer, PowerSGD(rank=1))

    def body(rank: int, stop: int) -> torch.Tensor:
        objects = made(0)
        for step in range(8):
            if step == stop:
                saved = copy.deepcopy([each.state_dict() for each in objects])
                objects[2].close()
                objects = made(1)
                for each, state in zip(objects, saved, strict=True):
                    each.load_state_dict(state)
            model, optimizer, _ = objects
            optimizer.zero_grad()
            model(noise(1, 78, seed=10 * step + rank)[0].view(6, 13)).square().mean().backward()
            optimizer.step()
        objects[2].close()
        return weights(objects[0])

    through = loopback(lambda rank: body(rank, 99), 4)
    for stop in (2, 3, 5):
        resumed = loopback(lambda rank, stop=stop: body(rank, stop), 4)
        assert all(same_bits(a, b) for a, b in zip(through, resumed, strict=True))


def test_a_matrix_without_a_gradient_at_first_is_found_later() -> None:
    """Its Q is zero then. From zeros M·Q would lead to the first rows of M, which an embedding may never use."""
    nothing = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    later = low_rank(1, 1)
    for gradient in later.values():
        gradient[0] = 0
    results, _, bucket = run([[nothing] * 2, [later] * 2, [later] * 2], 1)[0]
    for name, view in zip(SHAPES, bucket.split(results[-1]), strict=True):
        assert (view - later[name]).norm() < 1e-4 * later[name].norm()


def test_a_column_of_zeros_alone_begins_anew() -> None:
    """And the other one goes on."""
    layout = make_layout({"matrix": torch.empty(40, 30)})
    like, state, algorithm = torch.empty(40, 30), State(torch.empty(1200)), PowerSGD(rank=2)
    first = algorithm._right(layout.segments[0], like, state)
    factor = torch.randn(30, 2, generator=torch.Generator().manual_seed(5))
    factor[:, 1] = 0
    state.set_extra(FACTOR, factor, "matrix")
    mended = algorithm._right(layout.segments[0], like, state)
    assert torch.equal(mended[:, 0], factor[:, 0])
    assert torch.equal(mended[:, 1], first[:, 1])
    assert first[:, 1].all()


def test_parameters_begin_in_directions_of_their_own() -> None:
    """Also those whose names have the same letters."""
    one, other = (beginning(name, 8, 2, torch.float32, torch.device("cpu")) for name in ("layers.12.w", "layers.21.w"))
    assert not torch.equal(one, other)
