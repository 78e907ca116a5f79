"""Backward passes: which ones are exchanged, where each begins and ends, and what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, UsageError, loopback
from gossamer.algorithms import Algorithm
from reentrant import OwnCheckpoint

WORLD = 2


def layers(count: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).double()


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * step + rank))


def values(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alone(model: nn.Module, steps: int, world: int = WORLD) -> Tensor:
    """The weights of one process that takes the batches of all ranks together."""
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.cat([batch(rank, step) for rank in range(world)])).square().mean().backward()
        optimizer.step()
    return values(model)


def replicated(rank: int, model: nn.Module, algorithm: Algorithm | None = None) -> tuple[gossamer.Replica, SGD]:
    optimizer = SGD(model.parameters(), lr=0.1)
    return gossamer.replicate(model, optimizer, algorithm), optimizer


# -- which passes are exchanged ----------------------------------------------------------------------------------------


def test_each_pass_is_one_step_of_the_replica() -> None:
    def body(rank: int) -> int:
        model = layers()
        replica, _ = replicated(rank, model)

        def loss() -> Tensor:
            result: Tensor = model(batch(rank, 0)).sum()
            return result

        for _ in range(3):
            loss().backward()
        kept = loss()
        kept.backward(retain_graph=True)
        kept.backward()
        torch.autograd.backward([loss(), loss()])
        return replica.step

    assert loopback(body, WORLD) == [6, 6]


def test_passes_inside_no_sync_send_nothing_and_add_up() -> None:
    def body(rank: int) -> Tensor:
        model = layers()
        replica, _ = replicated(rank, model)
        sent = replica.metrics()["bytes_sent"]
        with replica.no_sync():
            model(batch(rank, 0)).sum().backward()
            model(batch(rank, 1)).sum().backward()
        assert replica.metrics()["bytes_sent"] == sent
        assert replica.step == 0
        model(batch(rank, 2)).sum().backward()
        assert replica.step == 1
        grad = model[0].weight.grad
        assert grad is not None
        return grad

    reference = layers()
    for rank in range(WORLD):
        for step in range(3):
            (reference(batch(rank, step)).sum() / WORLD).backward()
    for grad in loopback(body, WORLD):
        torch.testing.assert_close(grad, reference[0].weight.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
def test_gradients_of_something_else_are_not_exchanged(algorithm: Algorithm) -> None:
    def body(rank: int) -> None:
        model = layers()
        replica, _ = replicated(rank, model, algorithm)
        sent = replica.metrics()["bytes_sent"]
        inputs = batch(rank, 0).requires_grad_()
        (inputs * 2).sum().backward()
        output = model(inputs).sum()
        torch.autograd.grad(output, list(model.parameters()), retain_graph=True)
        torch.autograd.grad(output, inputs, create_graph=True)
        assert replica.step == 0
        assert replica.metrics()["bytes_sent"] == sent
        assert all(parameter.grad is None for parameter in model.parameters())

    loopback(body, WORLD)


def test_a_custom_function_that_returns_no_gradient_leaves_its_parameter_unused() -> None:
    class Swallow(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor) -> Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.swallowed = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, factor: float) -> Tensor:
            return (factor * self.used).sum() + Swallow.apply(self.swallowed).sum()

    def body(rank: int) -> None:
        model = Model()
        _, optimizer = replicated(rank, model)
        for _ in range(3):
            optimizer.zero_grad()
            model(rank + 1.0).backward()
            assert model.swallowed.grad is None
            assert model.used.grad is not None
            assert model.used.grad.tolist() == [1.5] * 3
            optimizer.step()

    loopback(body, WORLD)


# -- passes inside a pass ----------------------------------------------------------------------------------------------


def of_torch(run: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    result: Tensor = checkpoint(run, inputs, use_reentrant=True)
    return result


CHECKPOINTS = {"torch": of_torch, "own": OwnCheckpoint.apply}


class Checkpointed(nn.Module):
    """``shape``: where layers are inside a checkpoint: in the middle, all of them, one layer in several, or nested."""

    def __init__(self, kind: str, shape: str) -> None:
        super().__init__()
        self.layers, self.kind, self.shape = layers(4), kind, shape

    def forward(self, inputs: Tensor) -> Tensor:
        first, second, third, last = self.layers
        save = CHECKPOINTS.get(self.kind, lambda run, inputs: run(inputs))
        if self.shape == "middle":
            result = last(save(third, save(second, first(inputs))))
        elif self.shape == "all":
            result = save(self.layers, inputs.requires_grad_())
        elif self.shape == "shared":
            result = last(save(second, save(third, save(second, first(inputs)))))
        else:
            result = last(save(lambda x: third(save(second, x)), first(inputs)))
        return torch.as_tensor(result)


@pytest.mark.parametrize("shape", ["middle", "all", "shared", "nested"])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("algorithm", [AllReduce(bucket_bytes=64), Gossip()], ids=repr)
def test_reentrant_checkpointing_changes_nothing(algorithm: Algorithm, kind: str, shape: str) -> None:
    def body(rank: int) -> tuple[Tensor, float, int]:
        found = []
        for each in ("plain", kind):
            model = Checkpointed(each, shape)
            replica, optimizer = replicated(rank, model, algorithm)
            for step in range(4):
                optimizer.zero_grad()
                model(batch(rank, step)).square().mean().backward()
                optimizer.step()
            replica.close()
            found.append((values(model), replica.metrics()["bytes_sent"], replica.step))
        (plain, *counted), (own, *counted_too) = found
        torch.testing.assert_close(own, plain, rtol=1e-12, atol=1e-12)
        assert counted == counted_too, "one exchange for each outermost pass"
        return own, 0.0, replica.step

    found = loopback(body, WORLD)
    if isinstance(algorithm, AllReduce):
        reference = alone(Checkpointed("plain", shape), 4)
        for weights, _, _ in found:
            torch.testing.assert_close(weights, reference, rtol=1e-12, atol=1e-12)


def test_a_pass_in_a_hook_of_another_one_belongs_to_it() -> None:
    def body(rank: int) -> Tensor:
        model = layers()
        replica, _ = replicated(rank, model)
        output = model(batch(rank, 0))

        def inside(grad: Tensor) -> None:
            with torch.enable_grad():
                model[0](batch(rank, 1)).sum().backward()

        output.register_hook(inside)
        output.sum().backward()
        assert replica.step == 1
        grad = model[0].weight.grad
        assert grad is not None
        return grad

    reference = layers()
    for rank in range(WORLD):
        (reference(batch(rank, 0)).sum() / WORLD).backward()
        (reference[0](batch(rank, 1)).sum() / WORLD).backward()
    for grad in loopback(body, WORLD):
        torch.testing.assert_close(grad, reference[0].weight.grad, rtol=1e-12, atol=1e-12)


def test_reentrant_checkpointing_without_a_call_of_the_model_itself_is_refused() -> None:
    def body(rank: int) -> None:
        model = layers()
        replicated(rank, model)
        with pytest.raises(
            UsageError, match=rf"rank {rank}: .*call the model that replicate\(\) was given.*use_reentrant=False"
        ):
            of_torch(model[0], batch(rank, 0).requires_grad_()).sum().backward()

    loopback(body, WORLD)


# -- errors amid a pass ------------------------------------------------------------------------------------------------


def fail_half_way(model: nn.Sequential, inputs: Tensor) -> None:
    middle = model[0](inputs)
    middle.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model[1](middle).sum().backward()


def test_after_an_error_half_way_the_next_pass_is_refused() -> None:
    def body(rank: int) -> None:
        model = layers()
        _, _ = replicated(rank, model)
        fail_half_way(model, batch(rank, 0))
        model(batch(rank, 1)).sum().backward()

    with pytest.raises(UsageError, match="has not ended: it raised an error half-way"):
        loopback(body, WORLD)


def test_an_error_before_any_parameter_loses_nothing() -> None:
    def body(rank: int) -> int:
        model = layers()
        replica, _ = replicated(rank, model)
        output = model(batch(rank, 0))
        output.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.sum().backward()
        model(batch(rank, 1)).sum().backward()
        return replica.step

    assert loopback(body, WORLD) == [1, 1]


@pytest.mark.parametrize("overlap_forward", [False, True])
@pytest.mark.parametrize("algorithm", [AllReduce(bucket_bytes=64), ScatterReduce(bucket_bytes=64)])
def test_alone_a_batch_that_fails_leaves_nothing_behind(algorithm: Algorithm, overlap_forward: bool) -> None:
    def train(failing: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=overlap_forward)
        for step in range(6):
            batch = torch.full((2, 6), step / 6)
            middle = model[:2](batch)
            if step == failing:
                middle.register_hook(lambda grad: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model[2:](100 * middle).square().mean().backward()
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        replica.close()
        assert replica.step == 6
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(train(failing=4), train(failing=-1))


# -- updates amid a pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hooks_first", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_an_optimizer_that_steps_in_gradient_hooks_is_refused_where_gradients_travel(given: bool, hooks_first: bool) -> None:
    def body(rank: int) -> None:
        model = layers()
        each = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def step(parameter: Tensor) -> None:
            each[parameter].step()  # type: ignore[index]
            each[parameter].zero_grad()  # type: ignore[index]

        def hook() -> None:
            for parameter in model.parameters():
                parameter.register_post_accumulate_grad_hook(step)

        if hooks_first:
            hook()
        gossamer.replicate(model, list(each.values()) if given else SGD(model.parameters(), lr=0.1))
        if not hooks_first:
            hook()
        model(batch(rank, 0)).sum().backward()

    with pytest.raises(UsageError, match=r"rank \d: .*parameter '\d\.(weight|bias)'.*exchange weights"):
        loopback(body, WORLD)


def test_an_optimizer_that_steps_in_gradient_hooks_works_where_weights_travel() -> None:
    def body(rank: int) -> Tensor:
        model = layers()
        each = {parameter: SGD([parameter], lr=0.1) for parameter in model.parameters()}
        replica = gossamer.replicate(model, list(each.values()), Gossip(wire="fp32"))
        plain = layers()
        plain_optimizer = SGD(plain.parameters(), lr=0.1)
        reference = gossamer.replicate(plain, plain_optimizer, Gossip(wire="fp32"))

        def step(parameter: Tensor) -> None:
            each[parameter].step()  # type: ignore[index]
            each[parameter].zero_grad()  # type: ignore[index]

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(5):
            model(batch(rank, number)).square().mean().backward()
            plain_optimizer.zero_grad()
            plain(batch(rank, number)).square().mean().backward()
            plain_optimizer.step()
        replica.close()
        reference.close()
        return values(model) - values(plain)

    for difference in loopback(body, WORLD):
        assert difference.abs().max() < 1e-12
