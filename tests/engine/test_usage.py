"""Which parameters are used anywhere: the numbers travel in the last bucket that is averaged exactly."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, Gossip, Hierarchical, ScatterReduce, loopback
from gossamer.algorithms import Algorithm, after, by_size
from gossamer.bucket_plan import make_plan
from gossamer.codecs import Cast, Quantize
from gossamer.engine.usage import USAGE, with_usage


def tensors(*numels: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {str(index): torch.empty(numel, dtype=dtype, device="meta") for index, numel in enumerate(numels)}


def test_they_travel_before_the_last_tensor() -> None:
    held = with_usage(tensors(5, 6, 7), AllReduce())
    assert list(held) == ["0", "1", USAGE, "2"]
    assert (held[USAGE].shape, held[USAGE].dtype) == ((3,), torch.float32)


def test_they_share_the_dtype_of_the_last_tensor() -> None:
    mixed = tensors(5) | {"half": torch.empty(4, dtype=torch.bfloat16, device="meta")}
    assert with_usage(mixed, AllReduce())[USAGE].dtype == torch.bfloat16


def test_they_travel_with_the_exact_buckets_of_a_lossy_algorithm() -> None:
    model = {"a": torch.empty(3, 3), "b": torch.empty(3), "c": torch.empty(3, 3)}
    assert list(with_usage(model, ScatterReduce())) == ["a", USAGE, "b", "c"]
    plan = make_plan(with_usage(model, ScatterReduce()), ScatterReduce())
    assert sorted(layout.names for layout in plan.layouts) == [("(use of parameters)", "b"), ("a", "c")]


@pytest.mark.parametrize("algorithm", [ScatterReduce(exact_vectors=False), after(5, ScatterReduce())], ids=repr)
def test_they_travel_alone_if_nothing_is_always_exact(algorithm: Algorithm) -> None:
    assert USAGE not in with_usage(tensors(5, 6), algorithm)


class Branches(nn.Module):
    """Every rank uses the branch of its number; nobody uses the last one."""

    def __init__(self, world: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(2, 2, dtype=dtype) for _ in range(world + 1))
        self.dtype = dtype

    def forward(self, number: int) -> Tensor:
        out: Tensor = self.branches[number](torch.ones(1, 2, dtype=self.dtype))
        return out


@pytest.mark.parametrize(
    "algorithm",
    [AllReduce(bucket_bytes=1), AllReduce(), AllReduce(wire="fp16"), ScatterReduce(), after(2, AllReduce())],
    ids=repr,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_parameter_has_a_gradient_if_any_rank_uses_it(algorithm: Algorithm, dtype: torch.dtype) -> None:
    world = 3

    def body(rank: int) -> list[bool]:
        model = Branches(world, dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, algorithm)
        for _ in range(3):
            optimizer.zero_grad()
            model(rank).sum().backward()
            optimizer.step()
        return [branch.weight.grad is not None for branch in model.branches]  # type: ignore[union-attr]

    assert loopback(body, world) == [[True, True, True, False]] * world


COARSE = ScatterReduce(codec=Quantize(bits=2), residual="fp32")
FORGETFUL = ScatterReduce(codec=Cast(wire="fp32"), worker_feedback=False, server_feedback=False)
"""Not exact by its kind, but it loses nothing and so remembers nothing."""


@pytest.mark.parametrize(
    ("algorithm", "world"),
    [
        (COARSE, 3),
        (ScatterReduce(codec=Quantize(bits=2), gather_below=0, residual="fp32"), 3),
        (ChunkSparse(chunk=2, density=0.2, codec=Cast(), residual="fp32"), 3),
        (after(1, COARSE, before=ScatterReduce(residual="fp32")), 3),
        (Hierarchical(COARSE, ranks_per_node=2), 4),
        (Hierarchical(COARSE, inner=COARSE, ranks_per_node=2), 4),
        (Hierarchical(AllReduce(), inner=COARSE, ranks_per_node=2), 4),
        (Hierarchical(COARSE, ranks_per_node=2), 3),
        (Hierarchical(COARSE, inner=COARSE, ranks_per_node=2), 3),
        (Hierarchical(Gossip(), inner=COARSE, ranks_per_node=2), 4),
    ],
    ids=repr,
)
def test_what_was_kept_back_stays_unsent_while_nobody_uses_a_parameter(algorithm: Algorithm, world: int) -> None:
    """Its gradient stays None, so nothing of it is applied, and nothing of it may count as sent."""

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(rank)
        model = nn.ModuleDict({"always": nn.Linear(8, 8, bias=False), "sometimes": nn.Linear(8, 8, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        unsent = []
        for step in range(4):
            optimizer.zero_grad()
            out = model["always"](torch.randn(4, 8))
            if step < 2:
                out = out + model["sometimes"](torch.randn(4, 8))
            out.square().sum().backward()
            assert (model["sometimes"].weight.grad is None) == (step >= 2)
            optimizer.step()
            unsent.append(unsent_of(replica, "sometimes.weight"))
        return unsent

    by_step = [torch.stack(each).sum(0) for each in zip(*loopback(body, world), strict=True)]
    assert by_step[1].abs().max() > 0.01
    torch.testing.assert_close(by_step[2], by_step[1])
    torch.testing.assert_close(by_step[3], by_step[1])


def unsent_of(replica: gossamer.Replica, name: str) -> Tensor:
    """What is unsent of this worker's term of the sum over all workers, of one parameter."""
    assert replica._gradients is not None
    exchange = replica._gradients.exchange
    ((index, segment),) = [(b.index, s) for b in exchange.buckets for s in b.segments if s.name == name]
    unsent = exchange.handlers[index].hand_over(
        torch.zeros_like(exchange.buckets[index].flat), exchange.states[index], exchange.context(replica.step)
    )
    return segment.view(unsent).clone()


@pytest.mark.parametrize(
    "then",
    [
        AllReduce(),
        COARSE,
        Hierarchical(ranks_per_node=2),
        Hierarchical(COARSE, ranks_per_node=2),
        Hierarchical(FORGETFUL, ranks_per_node=2),
    ],
)
@pytest.mark.parametrize("before", [COARSE, Hierarchical(COARSE, inner=COARSE, ranks_per_node=2)])
def test_what_is_unsent_at_a_change_waits_for_a_parameter_that_nobody_uses_then(before: Algorithm, then: Algorithm) -> None:
    world, used = 4, (0, 1, 4, 6)  # the change is at step 2

    def body(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(rank)
        model = nn.ModuleDict({"always": nn.Linear(8, 8, bias=False), "sometimes": nn.Linear(8, 8, bias=False)})
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, after(2, then, before=before))
        begin, given = model["sometimes"].weight.detach().clone(), torch.zeros(8, 8)
        for step in range(7):
            optimizer.zero_grad()
            loss = model["always"].weight.sum()
            if step in used:
                factor = torch.randn(8, 8)
                loss = loss + (model["sometimes"].weight * factor).sum()
                given += factor
            loss.backward()
            optimizer.step()
            assert (model["sometimes"].weight.grad is not None) == (step in used)
        return begin - model["sometimes"].weight.detach(), given, unsent_of(replica, "sometimes.weight")

    moved, given, unsent = (torch.stack(each) for each in zip(*loopback(body, world), strict=True))
    assert all(torch.equal(each, moved[0]) for each in moved)
    torch.testing.assert_close(world * moved[0] + unsent.sum(0), given.sum(0), atol=1e-4, rtol=1e-4)


def test_they_are_routed_by_how_many_they_are() -> None:
    """Small alone, but many parameters have many of them: lossy, they would say that a used parameter is not."""
    algorithm = by_size(40, small=AllReduce(), large=ScatterReduce(exact_vectors=False))
    assert USAGE in with_usage(tensors(*[5] * 9), algorithm)
    assert USAGE not in with_usage(tensors(*[5] * 10), algorithm)
