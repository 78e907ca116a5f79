"""An exchange of weights needs weights and steps, and nothing of how gradients came to be; where gradients travel, a backward
pass may run inside of another one."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim import SGD
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import gossamer
from faults.training import LR, batch, mlp, outcome, sgd, single_process, squares, vector
from gossamer import (
    AllReduce,
    ConfigurationError,
    DiLoCo,
    Gossip,
    LocalSGD,
    PushSum,
    QuantizedGossip,
    ScatterReduce,
    UsageError,
    loopback,
)
from gossamer.algorithms import Algorithm
from gossamer.codecs import Sign
from reentrant import OwnCheckpoint

STEPS = 6


def short(algorithm: Algorithm) -> str:
    return f"{algorithm!r:.60}"


WEIGHTS = [Gossip(), PushSum(), QuantizedGossip(), LocalSGD(every=2), DiLoCo(every=2)]


# -- gradients that no backward pass of the user's has left there ---------------------------------------------------------


def by_backward(model: nn.Module, rank: int, step: int) -> None:
    squares(model, rank, step).backward()


def by_autograd_grad(model: nn.Module, rank: int, step: int) -> None:
    parameters = list(model.parameters())
    for p, gradient in zip(parameters, torch.autograd.grad(squares(model, rank, step), parameters), strict=True):
        p.grad = gradient


def in_place(model: nn.Module, rank: int, step: int) -> None:
    """Into the tensors of the last step."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(squares(model, rank, step), parameters)
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        p.grad.copy_(gradient)


def per_sample(model: nn.Module, rank: int, step: int) -> None:
    """The mean of one gradient per sample."""

    def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(model, parameters, (one,)).square().mean()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0))(parameters, batch(rank, step))
    for name, p in model.named_parameters():
        p.grad = each[name].mean(0)


def through_a_copy(model: nn.Module, rank: int, step: int) -> None:
    """Backward runs on another model that has the same weights."""
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    squares(twin, rank, step).backward()
    for p, other in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = other.grad


def functionally(model: nn.Module, rank: int, step: int) -> None:
    functional_call(model, dict(model.named_parameters()), (batch(rank, step),)).square().mean().backward()


WAYS = {f.__name__: f for f in (by_autograd_grad, in_place, per_sample, through_a_copy, functionally)}


def trained(algorithm: Algorithm, way: Callable[[nn.Module, int, int], None], rank: int, **options: Any) -> Tensor:
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm, **options)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=way is not in_place)
        way(model, rank, step)
        optimizer.step()
    replica.close()
    return vector(model)


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("algorithm", WEIGHTS, ids=short)
def test_gradients_may_come_from_anywhere(algorithm: Algorithm, way: str) -> None:
    right = loopback(lambda rank: trained(algorithm, by_backward, rank), 2)
    for values, wanted in zip(loopback(lambda rank: trained(algorithm, WAYS[way], rank), 2), right, strict=True):
        assert torch.allclose(values, wanted, rtol=0, atol=1e-9)


def test_gradients_may_come_from_anywhere_where_exchanges_may_lag() -> None:
    """Which exchange is added when depends on the moment there; alone in the world everything is as without an exchange."""
    for values in loopback(lambda rank: trained(Gossip(lag=3), by_autograd_grad, rank), 2):
        assert values.isfinite().all()


@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=2)], ids=short)
def test_a_step_for_which_there_is_no_new_gradient_is_still_refused(algorithm: Algorithm) -> None:
    """No backward pass, and nothing was set by hand: that is a mistake wherever it happens."""

    def train(rank: int) -> None:
        model = mlp()
        optimizer = sgd(model)
        gossamer.replicate(model, optimizer, algorithm)
        optimizer.zero_grad()
        with pytest.raises(UsageError, match=rf"rank {rank}.*step 0"):
            optimizer.step()

    loopback(train, 2)


@pytest.mark.parametrize("algorithm", WEIGHTS, ids=short)
def test_a_backward_pass_that_reaches_some_parameters_only(algorithm: Algorithm) -> None:
    """``backward(inputs=…)``: the others stay as they are, but for what the exchange brings, which is equal here."""

    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(STEPS):
            optimizer.zero_grad()
            squares(model, rank, step).backward(inputs=list(model[2].parameters()))
            optimizer.step()
        replica.close()
        return vector(model[0])

    for values in loopback(train, 2):
        assert torch.allclose(values, vector(mlp()[0]), rtol=0, atol=1e-2)


# -- one optimizer per parameter, stepped inside of backward --------------------------------------------------------------


def with_an_optimizer_per_parameter(algorithm: Algorithm, rank: int, hooks: str) -> Tensor:
    """``hooks``: when they are registered, "before" or "after" ``replicate()``; "none": steps after backward."""
    model = mlp()
    optimizers = {p: SGD([p], lr=LR, momentum=0.5) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    def register() -> None:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)

    if hooks == "before":
        register()
    replica = gossamer.replicate(model, list(optimizers.values()), algorithm)
    if hooks == "after":
        register()
    for number in range(STEPS):
        squares(model, rank, number).backward()
        for p in reversed(list(model.parameters())) if hooks == "none" else ():
            step(p)
    replica.close(average=True)
    return vector(model)


@pytest.mark.parametrize("hooks", ["before", "after"])
@pytest.mark.parametrize("algorithm", WEIGHTS, ids=short)
def test_one_optimizer_per_parameter_may_step_inside_backward(algorithm: Algorithm, hooks: str) -> None:
    """What an exchange brings is added before the update of the same parameter: the result is that of steps after backward."""
    right = loopback(lambda rank: with_an_optimizer_per_parameter(algorithm, rank, "none"), 2)
    found = loopback(lambda rank: with_an_optimizer_per_parameter(algorithm, rank, hooks), 2)
    for values, wanted in zip(found, right, strict=True):
        assert torch.allclose(values, wanted, rtol=0, atol=1e-9)


# -- a backward pass that ends in an error --------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    """Raises in backward when told to, half-way through the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.fails:
            raise torch.OutOfMemoryError("pretended")
        return gradient, None


def loss_that_fails(model: nn.Module, rank: int, step: int, fails: bool) -> Tensor:
    return model[2](Fails.apply(model[1](model[0](batch(rank, step))), fails)).square().mean()


def trained_again_after_an_error(algorithm: Algorithm, rank: int, failing: Callable[[int, int], bool]) -> Tensor:
    """The batch of a pass that failed is taken again, as with a smaller one."""
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(STEPS):
        optimizer.zero_grad()
        if failing(rank, step):
            with suppress(torch.OutOfMemoryError):
                loss_that_fails(model, rank, step, True).backward()
            optimizer.zero_grad()
        loss_that_fails(model, rank, step, False).backward()
        optimizer.step()
    replica.close(average=True)
    return vector(model)


FAILING: dict[str, Callable[[int, int], bool]] = {
    "on rank 1 once": lambda rank, step: rank == 1 and step == 2,
    "on rank 0 in the first step": lambda rank, step: rank == 0 and step == 0,
    "everywhere in every step": lambda rank, step: True,
}


@pytest.mark.parametrize("failing", list(FAILING))
@pytest.mark.parametrize("algorithm", WEIGHTS, ids=short)
def test_a_backward_pass_that_failed_may_be_done_again(algorithm: Algorithm, failing: str) -> None:
    right = loopback(lambda rank: trained_again_after_an_error(algorithm, rank, lambda *_: False), 2)
    found = loopback(lambda rank: trained_again_after_an_error(algorithm, rank, FAILING[failing]), 2)
    for values, wanted in zip(found, right, strict=True):
        assert torch.allclose(values, wanted, rtol=0, atol=1e-9)


def test_where_exchanges_may_lag_a_batch_whose_backward_failed_may_be_left_out() -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, Gossip(wire="fp32", lag=4))
        for step in range(9 + (rank == 1)):
            optimizer.zero_grad()
            try:
                loss_that_fails(model, rank, step, rank == 1 and step == 4).backward()
            except torch.OutOfMemoryError:
                continue
            optimizer.step()
        replica.close(average=True)
        return vector(model)

    first, second = loopback(train, 2)
    assert torch.allclose(first, second, rtol=0, atol=1e-12)


# -- a backward pass inside a backward pass -------------------------------------------------------------------------------


class Checkpointed(nn.Module):
    """Four blocks, of which some are computed again in backward; ``shared`` takes part in two of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.shared = nn.Linear(6, 6)
        self.double()

    def again(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if self.how.startswith("own"):
            return OwnCheckpoint.apply(block, x)
        if self.how.startswith("torch"):
            return checkpoint(block, x, use_reentrant=True)
        return block(x)

    def pair(self, x: Tensor) -> Tensor:
        """A checkpoint around a checkpoint, if nested."""
        inner = self.again if self.how.endswith("nested") else (lambda block, y: block(y))
        return inner(self.blocks[1], self.blocks[0](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.pair, self.first(x))
        if self.how.endswith("shared"):
            x = self.again(self.shared, torch.tanh(self.again(self.shared, x)))
        x = self.again(self.blocks[2], x)
        return self.again(self.last, x) if self.how.endswith("last") else self.last(x)


HOWS = [f"{kind}{what}" for kind in ("torch", "own") for what in ("", ", nested", ", shared", ", last")]


def plainly(how: str) -> str:
    """The same computation without checkpoints."""
    return "plain, shared" if how.endswith("shared") else "plain"


def trained_with_checkpoints(algorithm: Algorithm, how: str, rank: int, accumulate: bool = False) -> Tensor:
    model = Checkpointed(how)
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(STEPS):
        optimizer.zero_grad()
        if accumulate:
            with replica.no_sync():
                squares(model, rank, 100 + step).backward()
        squares(model, rank, step).backward()
        optimizer.step()
    assert replica.step == STEPS, "a pass inside of a pass was counted"
    replica.close()
    return vector(model)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # of an inner one
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=2), DiLoCo(every=2)], ids=short)
def test_where_weights_travel_checkpoints_may_be_reentrant(algorithm: Algorithm, how: str) -> None:
    right = loopback(lambda rank: trained_with_checkpoints(algorithm, plainly(how), rank), 2)
    found = loopback(lambda rank: trained_with_checkpoints(algorithm, how, rank), 2)
    for values, wanted in zip(found, right, strict=True):
        assert torch.allclose(values, wanted, rtol=0, atol=1e-9)


EXACT = {"one bucket": AllReduce(), "many buckets": AllReduce(bucket_bytes=64)}


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # of an inner one
@pytest.mark.parametrize("accumulate", [False, True], ids=["", "accumulated"])
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("buckets", list(EXACT))
def test_where_gradients_travel_checkpoints_may_be_reentrant(buckets: str, how: str, accumulate: bool) -> None:
    """The right value is that of one process with the mean gradient; gradients are collected when the outermost pass ends."""

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        more = squares(model, rank, 100 + step) if accumulate else 0.0
        return squares(model, rank, step) + more

    right = single_process(2, STEPS, lambda: Checkpointed(plainly(how)), loss)
    for values in loopback(lambda rank: trained_with_checkpoints(EXACT[buckets], how, rank, accumulate), 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")  # of an inner one
@pytest.mark.parametrize("how", HOWS)
def test_with_error_feedback_a_reentrant_checkpoint_sends_each_gradient_once(how: str) -> None:
    """Bit by bit as without checkpoints: the same gradients in the same buckets, in the same number of exchanges."""
    algorithm = ScatterReduce(codec=Sign(block=8), gather_below=0)
    right = loopback(lambda rank: trained_with_checkpoints(algorithm, plainly(how), rank), 2)
    found = loopback(lambda rank: trained_with_checkpoints(algorithm, how, rank), 2)
    for values, wanted in zip(found, right, strict=True):
        assert torch.allclose(values, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(), LocalSGD(every=2)], ids=short)
def test_a_loss_that_differentiates_inside_trains(algorithm: Algorithm) -> None:
    """``autograd.grad`` with a graph leaves nothing in ``grad``: there is one backward pass."""

    def train(rank: int) -> Tensor:
        model = Checkpointed("plain")
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = batch(rank, step).requires_grad_()
            energy = model(x).square().sum()
            (slope,) = torch.autograd.grad(energy, x, create_graph=True)
            (energy + slope.square().sum()).backward()
            optimizer.step()
        replica.close(average=True)
        return vector(model)

    first, second = loopback(train, 2)
    assert first.isfinite().all()
    assert torch.equal(first, second)


# -- parameters that never travel -----------------------------------------------------------------------------------------


class Opaque(Tensor):
    """A weight kept in 8 bits with one scale per row, which looks like a tensor in full precision and does not say what it is
    made of; frozen."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> "Opaque":
        made: Opaque = torch.Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype, requires_grad=False)
        return made

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    def dequantized(self) -> Tensor:
        return self.whole.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func is aten.detach.default:
            return type(args[0])(args[0].whole, args[0].scale)
        if func in (aten.clone.default, aten._to_copy.default):
            return type(args[0])(args[0].whole.clone(), args[0].scale.clone())
        if func.overloadpacket is aten.copy_:
            raise NotImplementedError("a packed weight is not written to")
        plainly = tree_map(lambda t: t.dequantized() if isinstance(t, Opaque) else t, (args, kwargs or {}))
        return func(*plainly[0], **plainly[1])


class Packed(Opaque):
    """The same of a class that says it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["whole", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], meta: None, size: Any, stride: Any) -> "Packed":
        return Packed(inner["whole"], inner["scale"])


class Adapted(nn.Module):
    """A frozen base, kept in few bits, and an adapter that is trained."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        full = torch.randn(8, 8)
        scale = full.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        kept = {
            "int8": lambda: (full / scale).round().to(torch.int8),
            "bool": lambda: full > 0,
            "float8": lambda: full.to(torch.float8_e4m3fn),
            "float8_e5m2": lambda: full.to(torch.float8_e5m2),
            "subclass": lambda: Packed((full / scale).round().to(torch.int8), scale),
        }[kind]()
        self.base = nn.Parameter(kept, requires_grad=False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def whole(self) -> Tensor:
        return self.base.dequantized() if isinstance(self.base.data, Packed) else self.base.float() * self.scale

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.whole().t() + self.up(self.down(x))


KINDS = ["int8", "bool", "float8", "float8_e5m2", "subclass"]


def adapted(kind: str, rank: int, algorithm: Algorithm, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Trains, and calls everything that a replica offers. The base as it is in the end, and the adapter."""
    model = Adapted(kind, seed)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(rank, step, 4, 8).float()).square().mean().backward()
        optimizer.step()
    with replica.consensus() as average:
        average(torch.ones(1, 8))
    assert replica.consensus_distance() >= 0
    replica.load_state_dict(replica.state_dict())
    replica.close(average=True)
    return model.whole(), vector(model.up)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=2), DiLoCo(every=2)], ids=short)
def test_where_weights_travel_a_frozen_parameter_may_be_of_any_type(algorithm: Algorithm, kind: str) -> None:
    (base, up), (other_base, other_up) = loopback(lambda rank: adapted(kind, rank, algorithm), 2)
    assert torch.equal(base, Adapted(kind).whole())
    assert torch.equal(base, other_base)
    assert torch.equal(up, other_up)


@pytest.mark.parametrize("kind", KINDS)
def test_where_gradients_travel_a_frozen_parameter_may_be_of_any_type(kind: str) -> None:
    """What is equal on all ranks is not written to."""
    (base, up), (other_base, other_up) = loopback(lambda rank: adapted(kind, rank, AllReduce()), 2)
    assert torch.equal(base, other_base)
    assert torch.equal(up, other_up)


DIFFERENT = {
    f"{name}, {kind}": (algorithm, kind)
    for kind in KINDS
    for name, algorithm in {"AllReduce": AllReduce(), "Gossip": Gossip()}.items()
}


@pytest.mark.parametrize("different", list(DIFFERENT))
def test_a_frozen_parameter_that_differs_is_made_equal_or_refused_by_name(different: str) -> None:
    algorithm, kind = DIFFERENT[different]
    bases, error = outcome(lambda rank: adapted(kind, rank, algorithm, seed=rank)[0])
    if error is not None:
        assert "'base'" in str(error)
    else:
        assert torch.equal(bases[0], Adapted(kind).whole())
        assert torch.equal(bases[1], bases[0])


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=short)
@pytest.mark.parametrize("place", ["parameter", "buffer"])
def test_what_does_not_say_what_it_wraps_is_refused_by_name_or_left_to_each_rank(algorithm: Algorithm, place: str) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        kept = Opaque(torch.ones(2, 2, dtype=torch.int8), torch.full((2, 1), rank + 1.0))
        if place == "parameter":
            model.register_parameter("kept", nn.Parameter(kept, requires_grad=False))
        else:
            model.register_buffer("kept", kept)
        trained = SGD([p for p in model.parameters() if p.requires_grad], lr=LR)
        with pytest.raises(ConfigurationError, match=rf"{place} 'kept' is of type Opaque.*ignore="):
            gossamer.replicate(model, trained, algorithm)
        replica = gossamer.replicate(model, trained, algorithm, ignore=["kept"])
        squares(model, rank, 0).backward()
        trained.step()
        replica.close(average=True)
        return vector(model[0])

    first, second = loopback(train, 2)
    assert torch.equal(first, second)
