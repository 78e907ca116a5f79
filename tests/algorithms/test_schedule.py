"""Combinations: what one part has not sent the next one sends; parts keep their periods, their exactness and their place."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from contracts.cases import exchange, noise, same_bits, weights
from gossamer import AllReduce, ByteGrad, ChunkSparse, Gossip, GossipGraD, Hierarchical, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm, after, by_size
from gossamer.algorithms.base import Context, parts_of
from gossamer.codecs import Cast, Quantize, Sign
from gossamer.errors import ConfigurationError

COARSE = ScatterReduce(codec=Quantize(bits=2), exact_vectors=False, residual="fp32")
SPARSE = ChunkSparse(chunk=8, density=0.25, codec=Cast(wire="fp32"), exact_vectors=False)
KEEP_RESIDUALS: list[Algorithm] = [
    COARSE,
    ScatterReduce(codec=Sign(block=8), residual="bf16", exact_vectors=False),
    SPARSE,
    PowerSGD(rank=1, exact_vectors=False),
    Hierarchical(COARSE, inner=COARSE, ranks_per_node=2),
    after(1, COARSE, before=SPARSE),
]
SUCCESSORS: list[Algorithm] = [AllReduce(), ByteGrad(), COARSE, SPARSE, Hierarchical(COARSE, ranks_per_node=3)]


class Given(nn.Module):
    """Its gradient is what it is given; no size is a round one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(13, 11, dtype=dtype))
        self.vector = nn.Parameter(torch.zeros(5, dtype=dtype))

    def forward(self, gradient: Tensor) -> Tensor:
        flat = torch.cat([self.matrix.reshape(-1), self.vector])
        return (flat * gradient).sum()


def gradient(step: int, rank: int) -> Tensor:
    return noise(1, 148, seed=100 * step + rank)[0]


def train(algorithm: Algorithm, world: int, steps: int, poisoned: int = -1, **options: Any) -> list[Tensor]:
    """What every rank's weights have moved, for a rate of 1."""

    def body(rank: int) -> Tensor:
        model = Given(**options)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(steps):
            optimizer.zero_grad()
            given = gradient(step, rank)
            if step == poisoned and rank == 0:
                given[3] = float("inf")
            model(given.to(model.matrix.dtype)).backward()
            if step != poisoned:
                optimizer.step()
        replica.close()
        return -weights(model)

    return loopback(body, world)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("before", KEEP_RESIDUALS, ids=repr)
@pytest.mark.parametrize("then", SUCCESSORS, ids=repr)
def test_what_is_unsent_at_a_change_is_sent_later(before: Algorithm, then: Algorithm, world: int) -> None:
    """Sent and kept is had, across the change, wherever it is kept."""
    inputs = [noise(world, 100, seed=step) for step in range(6)]
    algorithm = after(3, then, before=before)
    outcomes = exchange(algorithm, inputs)
    had = torch.stack([torch.stack(tensors).double().sum(0) for tensors in inputs]).sum(0)
    sent = world * torch.stack([result.double() for result in outcomes[0].results]).sum(0)
    contexts = [Context(5, rank, tuple(range(world))) for rank in range(world)]
    kept = sum(algorithm.hand_over(torch.zeros(100), o.state, ctx).double() for o, ctx in zip(outcomes, contexts, strict=True))
    lossy = {"ByteGrad": 0.03 * world, "bf16": 0.2}
    assert (sent + kept - had).abs().max() < max([2e-4, *(much for name, much in lossy.items() if name in repr(algorithm))])
    assert not any(key.startswith("phase 0: ") for outcome in outcomes for key in outcome.state)


@pytest.mark.parametrize("world", [1, 3, 8])
@pytest.mark.parametrize("before", KEEP_RESIDUALS, ids=repr)
@pytest.mark.parametrize(
    "then", [AllReduce(bucket_bytes=300), Gossip(wire="fp32"), Hierarchical(Gossip(wire="fp32"), ranks_per_node=2)], ids=repr
)
def test_after_the_change_the_mean_has_moved_by_all_gradients(before: Algorithm, then: Algorithm, world: int) -> None:
    """Also where weights travel from then on, in which what is unsent goes along."""
    moved = torch.stack(train(after(3, then, before=before), world, 6)).mean(0)
    whole = sum(gradient(step, rank) for step in range(6) for rank in range(world)) / world
    uneven = isinstance(then, Hierarchical) and world == 3  # machines count alike
    assert (moved - whole).abs().max() < (0.02 if "bf16" in repr(before) else 1e-5) or uneven


@pytest.mark.parametrize("before", [COARSE, Hierarchical(COARSE, ranks_per_node=2)], ids=repr)
@pytest.mark.parametrize("poisoned", [-1, 3])
def test_a_half_precision_gradient_is_handed_all_of_it(before: Algorithm, poisoned: int) -> None:
    """What is unsent is kept in full precision, and so is the sum that is communicated, if not all workers have a residual."""
    moved = train(after(3, AllReduce(), before=before), 3, 6, poisoned=poisoned, dtype=torch.bfloat16)
    given = {(step, rank): gradient(step, rank).bfloat16().float() for step in range(6) for rank in range(3)}
    whole = sum(each for (step, _), each in given.items() if step != poisoned) / 3
    assert all(same_bits(each, moved[0]) for each in moved)
    assert (moved[0] - whole).abs().max() < 0.1


def test_an_overflow_at_the_change_loses_nothing() -> None:
    """The step is skipped; what was unsent is paid in the next one."""
    moved = train(after(3, AllReduce(), before=COARSE), 3, 6, poisoned=3)
    whole = sum(gradient(step, rank) for step in range(6) for rank in range(3) if step != 3) / 3
    assert (moved[0] - whole).abs().max() < 1e-5


def test_biases_stay_exact_however_deep() -> None:
    nested = after(
        9, after(6, ScatterReduce(), before=Hierarchical(PowerSGD(), inner=ScatterReduce())), before=after(2, ByteGrad())
    )
    bias = nested.route("bias", torch.empty(5))
    matrix = nested.route("matrix", torch.empty(50, 50))
    exact = "AllReduce"
    assert {type(part).__name__ for part in leaves(bias)} == {exact}
    assert [type(part).__name__ for part in leaves(matrix)] == [exact, "ByteGrad", "ScatterReduce"], (
        "what never comes is left out"
    )


def leaves(algorithm: Algorithm) -> list[Algorithm]:
    parts = parts_of(algorithm)
    return [leaf for part in parts for leaf in leaves(part)] if parts else [algorithm]


def test_inside_a_machine_biases_are_exact_too() -> None:
    for outer in (AllReduce(), Gossip(wire="fp32")):
        moved = train(Hierarchical(outer, inner=ScatterReduce(codec=Sign()), ranks_per_node=3), 3, 2)
        whole = sum(gradient(step, rank) for step in range(2) for rank in range(3)) / 3
        assert (moved[0] - whole)[-5:].abs().max() < 1e-5
        assert (moved[0] - whole)[:-5].abs().max() > 1e-2


def test_inside_a_machine_gradients_are_averaged_in_every_step() -> None:
    """Whatever the leaders do: also when they have gone over to weights."""
    algorithm = Hierarchical(after(2, Gossip(wire="fp32"), before=COARSE), ranks_per_node=2)
    moved = train(algorithm, 4, 6)
    assert same_bits(moved[0], moved[1])
    assert same_bits(moved[2], moved[3])
    assert not same_bits(moved[0], moved[2])


def test_chunks_are_chosen_inside_a_machine() -> None:
    def sent(algorithm: Algorithm) -> int:
        def body(rank: int) -> int:
            model = Given()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            replica = gossamer.replicate(model, optimizer, algorithm)
            for step in range(6):
                model(gradient(step, rank)).backward()
                optimizer.step()
            return int(replica.metrics()["bytes_sent"])

        return loopback(body, 2)[0]

    inside, alone = (sent(a) for a in (Hierarchical(AllReduce(), inner=SPARSE, ranks_per_node=2), SPARSE))
    assert inside == alone + 6 * 4 * 148, "and the result is broadcast"


def count_exchanges(algorithm: Algorithm, steps: int) -> list[list[int]]:
    """At which steps the small and the large parameter of each rank were changed by others."""

    def body(rank: int) -> list[list[int]]:
        model = Given()
        nn.init.constant_(model.matrix, 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        found: list[list[int]] = [[], []]
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.full((148,), float(rank == 0))).backward()
            before = [p.detach().clone() for p in (model.vector, model.matrix)]
            optimizer.step()
            replica.wait_for_exchanges()
            for which, (parameter, old) in enumerate(zip((model.vector, model.matrix), before, strict=True)):
                if not torch.allclose(old - parameter, torch.full_like(old, float(rank == 0))):
                    found[which].append(step)
        replica.close()
        return found

    return loopback(body, 2)[1]


def test_each_size_keeps_its_period() -> None:
    small, large = count_exchanges(by_size(100, small=Gossip(every=2, wire="fp32"), large=Gossip(every=3, wire="fp32")), 13)
    assert small == [2, 4, 6, 8, 10, 12]
    assert large == [3, 6, 9, 12]


@pytest.mark.parametrize("history", [(True, True), (True, False), (False, True)])
def test_history_travels_for_the_sizes_that_want_it(history: tuple[bool, bool]) -> None:
    parts = [GossipGraD(history=each, wire="fp32") for each in history]

    def body(rank: int) -> list[Tensor]:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=1.0)
        replica = gossamer.replicate(model, optimizer, by_size(100, small=parts[0], large=parts[1]))
        for step in range(9):
            optimizer.zero_grad()
            model(gradient(step, rank) * (step < 4)).backward()
            optimizer.step()
        replica.close()
        return [optimizer.state[p]["momentum_buffer"] for p in (model.vector, model.matrix)]

    ours, theirs = loopback(body, 2)
    assert [torch.allclose(a, b, atol=1e-5) for a, b in zip(ours, theirs, strict=True)] == list(history)


def test_both_sizes_may_be_applied_late() -> None:
    late = GossipGraD(late=True, history=False, wire="fp32")
    plain, by_sizes = (train(algorithm, 2, 5) for algorithm in (late, by_size(100, small=late, large=late)))
    assert all(same_bits(a, b) for a, b in zip(plain, by_sizes, strict=True))


def test_sizes_may_move_gradients_first_and_weights_later() -> None:
    """In parts that are combinations themselves."""
    mixed = after(2, Gossip(wire="fp32"), before=COARSE)
    pairs = [(mixed, Gossip(wire="fp32")), (Hierarchical(Gossip(wire="fp32"), ranks_per_node=2), mixed)]
    whole = sum(gradient(step, rank) for step in range(6) for rank in range(4)) / 4
    for small, large in pairs:
        moved = torch.stack(train(by_size(100, small=small, large=large), 4, 6))
        assert (moved.mean(0) - whole).abs().max() < 1e-5
        if isinstance(small, Hierarchical):
            assert same_bits(moved[0, -5:], moved[1, -5:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: after(3, ChunkSparse(momentum_correction=True)), "takes the momentum out of the optimizer"),
        (lambda: after(3, AllReduce(), before=ChunkSparse(momentum_correction=True)), "takes the momentum"),
        (lambda: by_size(9, small=AllReduce(), large=ChunkSparse(momentum_correction=True)), "takes the momentum"),
        (lambda: Hierarchical(inner=ChunkSparse(momentum_correction=True)), "takes the momentum"),
        (lambda: after(3, Hierarchical(ChunkSparse(momentum_correction=True))), "takes the momentum"),
        (lambda: by_size(9, small=GossipGraD(late=True), large=GossipGraD()), "give both the same late="),
        (lambda: by_size(9, small=Gossip(), large=AllReduce()), "both must move the same"),
        (lambda: by_size(-1, small=AllReduce(), large=AllReduce()), "number of bytes"),
        (lambda: after(-1, AllReduce()), "number of steps"),
        (lambda: after(2, AllReduce), "instances of gossamer algorithms"),
        (lambda: Hierarchical(Hierarchical()), "two levels"),
    ],
)
def test_what_cannot_be_combined(make: Callable[[], Algorithm], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
