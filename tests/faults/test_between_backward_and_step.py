"""What a user may do between ``backward()`` and ``optimizer.step()``, and between that and the next forward pass: the result
is that of one process with the mean gradient, or the run ends with an error that names the parameter."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from contracts.cases import plain
from faults.training import (
    LR,
    Ramp,
    batch,
    mean_gradients,
    mlp,
    names_of,
    right_or_refused,
    sgd,
    single_process,
    squares,
    vector,
)
from gossamer import AllReduce, Gossip, Hierarchical, LocalSGD, ScatterReduce, UsageError, after, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Sign

STEPS = 5

# -- an optimizer that runs inside of backward ---------------------------------------------------------------------------


def torchs_own(model: nn.Module) -> list[Optimizer]:
    _apply_optimizer_in_backward(SGD, model.parameters(), {"lr": LR})
    return [optimizer for p in model.parameters() for optimizer in p._in_backward_optimizers]


def one_per_parameter(model: nn.Module) -> list[Optimizer]:
    """As PyTorch's tutorial has it."""
    optimizers = {p: SGD([p], lr=LR) for p in model.parameters()}

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    return list(optimizers.values())


def update_in_a_hook(model: nn.Module) -> list[Optimizer]:
    """Without any optimizer; that one is given which would do the same."""

    @torch.no_grad()
    def update(parameter: nn.Parameter) -> None:
        parameter.sub_(parameter.grad, alpha=LR)
        parameter.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return [SGD(model.parameters(), lr=LR)]


def update_of_the_data_in_a_hook(model: nn.Module) -> list[Optimizer]:
    """Through ``.data``, which counts no versions."""

    def update(parameter: nn.Parameter) -> None:
        parameter.data.sub_(parameter.grad, alpha=LR)
        parameter.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return [SGD(model.parameters(), lr=LR)]


def update_in_a_tensor_hook(model: nn.Module) -> list[Optimizer]:
    """Before the gradient is accumulated (LOMO)."""

    def hook(parameter: nn.Parameter) -> Callable[[Tensor], None]:
        @torch.no_grad()
        def update(gradient: Tensor) -> None:
            parameter.sub_(gradient, alpha=LR)

        return update

    for p in model.parameters():
        p.register_hook(hook(p))
    return [SGD(model.parameters(), lr=LR)]


FUSED = {
    "torch's": torchs_own,
    "one per parameter": one_per_parameter,
    "an update in a hook": update_in_a_hook,
    "an update of .data in a hook": update_of_the_data_in_a_hook,
    "an update in a tensor's hook": update_in_a_tensor_hook,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("given", ["given", "another given"])
@pytest.mark.parametrize("fused", list(FUSED))
@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce(gather_below=0)], ids=["AllReduce", "ScatterReduce"])
def test_an_optimizer_inside_backward_uses_mean_gradients_or_is_refused(
    algorithm: Algorithm, fused: str, given: str, when: str
) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        optimizers = FUSED[fused](model) if when == "before" else []
        if given == "another given" or not optimizers:
            optimizers = [SGD(model.parameters(), lr=LR)]
        replica = gossamer.replicate(model, optimizers, algorithm)
        if when == "after":
            FUSED[fused](model)
        for step in range(STEPS):
            model.zero_grad()
            squares(model, rank, step).backward()
        replica.close(average=True)
        return vector(model)

    right = single_process(2, STEPS, optimizer=lambda model: SGD(model.parameters(), lr=LR))
    right_or_refused(train, right, names_of(mlp()), 1e-9 if algorithm.traits.exact else 1e-2)


# -- hooks that change a gradient ------------------------------------------------------------------------------------------

CLAMPED = 0.02


def clamped_in_place(p: nn.Parameter) -> None:
    p.grad.clamp_(-CLAMPED, CLAMPED)


def clamped_anew(p: nn.Parameter) -> None:
    p.grad = p.grad.clamp(-CLAMPED, CLAMPED)


def clamped_data(p: nn.Parameter) -> None:
    p.grad.data = p.grad.data.clamp(-CLAMPED, CLAMPED)


def mean_of_clamped(first: int) -> Tensor:
    """The weights of one model whose gradients are clamped rank by rank, from the step ``first`` on."""
    model = mlp()
    for step in range(STEPS):
        most = CLAMPED if step >= first else math.inf
        each = [torch.autograd.grad(squares(model, rank, step), list(model.parameters())) for rank in range(2)]
        with torch.no_grad():
            for p, *gradients in zip(model.parameters(), *each, strict=True):
                p.sub_(sum(gradient.clamp(-most, most) for gradient in gradients) / 2, alpha=LR)
    return vector(model)


@pytest.mark.parametrize("when", ["before", "after", "after two steps"])
@pytest.mark.parametrize("hook", [clamped_in_place, clamped_anew, clamped_data], ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("algorithm", [AllReduce(), AllReduce(bucket_bytes=8)], ids=repr)
def test_what_a_hook_makes_of_a_gradient_is_averaged(algorithm: Algorithm, hook: Any, when: str) -> None:
    """As under DDP, whenever the hook was registered, and whether the model is called itself or module by module."""

    def train(rank: int, apart: bool) -> Tensor:
        model = mlp()
        optimizer = SGD(model.parameters(), lr=LR)
        if when == "before":
            _ = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        replica = gossamer.replicate(model, optimizer, algorithm)
        if when == "after":
            _ = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
        for step in range(STEPS):
            if when == "after two steps" and step == 2:
                _ = [p.register_post_accumulate_grad_hook(hook) for p in model.parameters()]
            optimizer.zero_grad()
            out = model[2](model[1](model[0](batch(rank, step)))) if apart else model(batch(rank, step))
            out.square().mean().backward()
            optimizer.step()
        replica.close()
        return vector(model)

    right = mean_of_clamped(2 if when == "after two steps" else 0)
    for apart in (False, True):
        for values in loopback(lambda rank, apart=apart: train(rank, apart), 2):
            assert (values - right).abs().max() < 1e-12


# -- gradients replaced between two passes that add up --------------------------------------------------------------------


def times_one(p: nn.Parameter) -> None:
    p.grad = p.grad * 1.0


def cloned(p: nn.Parameter) -> None:
    p.grad = p.grad.clone()


def detached(p: nn.Parameter) -> None:
    p.grad = p.grad.detach()


def in_place(p: nn.Parameter) -> None:
    p.grad.mul_(1.0)


def aside_and_back(p: nn.Parameter) -> None:
    kept, p.grad = p.grad, None
    p.grad = kept.clone()


def its_data(p: nn.Parameter) -> None:
    p.grad.data = p.grad.data.clone()


REPLACED = {f.__name__: f for f in (times_one, cloned, detached, in_place, aside_and_back, its_data)}
LOSSY = {
    "signs": ScatterReduce(codec=Sign(block=8), residual="fp32", gather_below=0),
    "signs among leaders": Hierarchical(ScatterReduce(codec=Sign(block=8), residual="fp32", gather_below=0), ranks_per_node=1),
}


@pytest.mark.parametrize("who", ["on all ranks", "on rank 1"])
@pytest.mark.parametrize("how", list(REPLACED))
@pytest.mark.parametrize("lossy", list(LOSSY))
def test_error_feedback_keeps_the_rest_of_a_pass_whose_gradient_was_replaced(lossy: str, how: str, who: str) -> None:
    """The last steps are exact and send all that was kept back: then the updates are the sum of the mean gradients."""
    steps = 6

    def gradient(rank: int, step: int, micro: int) -> Tensor:
        return batch(rank, 10 * step + micro, 4, 64)

    def train(rank: int) -> Tensor:
        model = Ramp(4, 64)
        optimizer = SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, after(2 * steps - 4, AllReduce(), before=LOSSY[lossy]))
        for step in range(steps):
            optimizer.zero_grad()
            model(gradient(rank, step, 0)).backward()
            if who == "on all ranks" or rank == 1:
                REPLACED[how](model.w)
            model(gradient(rank, step, 1)).backward()
            optimizer.step()
        replica.close()
        return vector(model)

    right = -sum(gradient(r, s, m) for r in range(2) for s in range(steps) for m in range(2)).reshape(-1) / 2
    for values in loopback(train, 2):
        assert (values - right).abs().max() < 1e-4


# -- a gradient that is None ----------------------------------------------------------------------------------------------


class Gate(torch.autograd.Function):
    """Passes no gradient on where it is shut, as autograd allows: then the gradient is None, and not zero."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shut: bool) -> Tensor:
        ctx.shut = shut
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        return (None if ctx.shut else gradient), None


class Gated(nn.Module):
    """Two branches, of which the first may be shut; ``own`` is a parameter that goes through the gate itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 8), nn.Linear(4, 8)
        self.own = nn.Parameter(torch.ones(8))
        self.double()

    def forward(self, x: Tensor, shut: bool) -> Tensor:
        return (Gate.apply(self.a(x), shut) + self.b(x) + Gate.apply(self.own, shut)).square().mean()


def is_shut(who: str, when: str, rank: int, step: int) -> bool:
    times = {"the first step": step == 0, "a later step": step == 3, "every step": True}
    return times[when] and who in ("all ranks", f"rank {rank}")


def adamw(model: nn.Module) -> Optimizer:
    """Moves a parameter whose gradient is zero, and leaves one alone that has none."""
    return AdamW(model.parameters(), lr=LR, eps=1e-3)


EXACT = {
    "AllReduce": (AllReduce(), {}),
    "AllReduce in small buckets": (AllReduce(bucket_bytes=64), {}),
    "AllReduce in the forward pass": (AllReduce(bucket_bytes=64), {"overlap_forward": True}),
    "Hierarchical": (Hierarchical(AllReduce(bucket_bytes=64), ranks_per_node=1), {}),
}


@pytest.mark.parametrize("when", ["the first step", "a later step", "every step"])
@pytest.mark.parametrize("who", ["rank 1", "all ranks"])
@pytest.mark.parametrize("how", list(EXACT))
def test_a_gradient_of_none_counts_as_a_parameter_that_is_not_used(how: str, who: str, when: str) -> None:
    algorithm, options = EXACT[how]

    def loss(model: nn.Module, rank: int, step: int) -> Tensor:
        return model(batch(rank, step), is_shut(who, when, rank, step))

    def train(rank: int) -> Tensor:
        model = Gated()
        optimizer = adamw(model)
        replica = gossamer.replicate(model, optimizer, algorithm, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss(model, rank, step).backward()
            if who == "all ranks" and is_shut(who, when, rank, step):
                assert model.a.weight.grad is None
                assert model.own.grad is None
            optimizer.step()
        replica.close()
        return vector(model)

    right = single_process(2, STEPS, Gated, loss, adamw)
    for values in loopback(train, 2):
        assert torch.allclose(values, right, rtol=0, atol=1e-9)


def test_a_gradient_of_none_leaves_what_was_accumulated() -> None:
    """A pass inside ``no_sync()`` gave a gradient, the synchronised one gives none on rank 1: the mean has the first one's."""

    def train(rank: int) -> Tensor:
        model = Gated()
        replica = gossamer.replicate(model, SGD(model.parameters(), lr=LR))
        with replica.no_sync():
            model(batch(rank, 0), False).backward()
        model(batch(rank, 1), rank == 1).backward()
        gradients = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        replica.close()
        return gradients

    model = Gated()
    mean_gradients(model, [model(batch(r, 0), False) + model(batch(r, 1), r == 1) for r in range(2)])
    right = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    for gradients in loopback(train, 2):
        assert torch.allclose(gradients, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("who", ["rank 1", "all ranks"])
@pytest.mark.parametrize("algorithm", [a for a in plain() if a.subject == "gradients"], ids=lambda a: f"{a!r:.60}")
def test_under_every_gradient_algorithm_a_gradient_of_none_leaves_the_replicas_equal(algorithm: Algorithm, who: str) -> None:
    def train(rank: int) -> Tensor:
        model = Gated()
        optimizer = SGD(model.parameters(), lr=LR, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(rank, step), is_shut(who, "a later step", rank, step)).backward()
            optimizer.step()
        replica.close()
        return vector(model)

    first, second = loopback(train, 2)
    assert first.isfinite().all()
    assert torch.equal(first, second)


# -- a loss made of gradients ---------------------------------------------------------------------------------------------

PENALTY = 0.1


def penalty(gradients: Any) -> Tensor:
    return PENALTY * sum(gradient.square().sum() for gradient in gradients)


def alone_only(model: nn.Module, rank: int) -> None:
    """The penalty by itself, on top of the gradients that are there."""
    squares(model, rank, 0).backward(create_graph=True)
    penalty(p.grad for p in model.parameters()).backward()


def with_the_loss_again(model: nn.Module, rank: int) -> None:
    """Gradients are cleared, and the whole loss is taken."""
    squares(model, rank, 0).backward(create_graph=True)
    term = penalty([p.grad for p in model.parameters()])
    model.zero_grad()
    (squares(model, rank, 0) + term).backward()


def of_one_gradient(model: nn.Module, rank: int) -> None:
    squares(model, rank, 0).backward(create_graph=True)
    term = penalty([model.get_parameter("0.weight").grad])
    model.zero_grad()
    (squares(model, rank, 0) + term).backward()


def by_autograd_grad(model: nn.Module, rank: int) -> None:
    """Nothing lies in ``p.grad`` here; works anywhere."""
    loss = squares(model, rank, 0)
    (loss + penalty(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))).backward()


PENALTIES = {f.__name__: f for f in (alone_only, with_the_loss_again, of_one_gradient, by_autograd_grad)}


def gradients_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.detach().reshape(-1) for p in model.parameters()])


def by_one_process(how: str, rank: int) -> Tensor:
    model = mlp()
    PENALTIES[how](model, rank)
    return gradients_of(model)


@pytest.mark.parametrize("how", list(PENALTIES))
@pytest.mark.parametrize("algorithm", [AllReduce(), AllReduce(bucket_bytes=64)], ids=["AllReduce", "in small buckets"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_loss_made_of_gradients_is_right_or_refused(algorithm: Algorithm, how: str) -> None:
    """Right is the mean of what each rank's loss and penalty give."""

    def train(rank: int) -> Tensor:
        model = mlp()
        replica = gossamer.replicate(model, sgd(model), algorithm)
        PENALTIES[how](model, rank)
        replica.close()
        return gradients_of(model)

    right = (by_one_process(how, 0) + by_one_process(how, 1)) / 2
    right_or_refused(train, right, names_of(mlp()))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_the_refusal_of_a_graph_through_mean_gradients_says_what_to_do() -> None:
    def train(rank: int) -> None:
        model = mlp()
        gossamer.replicate(model, sgd(model))
        with pytest.raises(UsageError, match=rf"rank {rank}.*create_graph=True.*'\d\.(weight|bias)'.*(no_sync|autograd\.grad)"):
            with_the_loss_again(model, rank)

    loopback(train, 2)


@pytest.mark.parametrize("how", ["with_the_loss_again", "of_one_gradient"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_a_graph_of_gradients_made_inside_no_sync_works(how: str) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        replica = gossamer.replicate(model, sgd(model))
        with replica.no_sync():
            squares(model, rank, 0).backward(create_graph=True)
        parameters = list(model.parameters()) if how == "with_the_loss_again" else [model.get_parameter("0.weight")]
        term = penalty([p.grad for p in parameters])
        model.zero_grad()
        (squares(model, rank, 0) + term).backward()
        replica.close()
        return gradients_of(model)

    right = (by_one_process(how, 0) + by_one_process(how, 1)) / 2
    for gradients in loopback(train, 2):
        assert torch.allclose(gradients, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", list(PENALTIES))
@pytest.mark.parametrize("algorithm", [Gossip(), LocalSGD(every=2)], ids=["Gossip", "LocalSGD"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_where_weights_travel_a_loss_made_of_gradients_is_the_ranks_own(algorithm: Algorithm, how: str) -> None:
    def train(rank: int) -> Tensor:
        model = mlp()
        replica = gossamer.replicate(model, sgd(model), algorithm)
        PENALTIES[how](model, rank)
        replica.close()
        return gradients_of(model)

    for rank, gradients in enumerate(loopback(train, 2)):
        assert torch.equal(gradients, by_one_process(how, rank))


# -- weights that the user changes between the step and the next forward pass, with overlap_forward -----------------------


class Changes:
    """What is done after each step; ``other`` holds weights of the user's own."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = list(model.parameters())
        self.model, self.other = model, [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def clamp(self, step: int) -> None:
        for p in self.parameters:
            p.clamp_(-0.1, 0.1)

    @torch.no_grad()
    def clamp_one(self, step: int) -> None:
        self.parameters[2].clamp_(-0.1, 0.1)

    def clamp_data(self, step: int) -> None:
        for p in self.parameters:
            p.data.clamp_(-0.1, 0.1)

    def change_places_through_data(self, step: int) -> None:
        """The same values in other places."""
        for p in self.parameters:
            p.data.copy_(p.data.flatten().roll(1).view_as(p))

    def clamp_into_new_memory(self, step: int) -> None:
        for p in self.parameters:
            p.data = p.data.clamp(-0.1, 0.1)

    def move_to_new_memory(self, step: int) -> None:
        """In another order of elements, where that can be: nothing else changes."""
        for p in self.parameters:
            p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data.clone()

    @torch.no_grad()
    def swap_an_average_through_data(self, step: int) -> None:
        """As many averages are written; only every second step."""
        for mine, p in zip(self.other, self.parameters, strict=True):
            mine.lerp_(p, 0.5)
        if step % 2:
            kept = [p.data.clone() for p in self.parameters]
            for mine, p in zip(self.other, self.parameters, strict=True):
                p.data.copy_(mine)
            squares(self.model, 9, step)
            for mine, p in zip(kept, self.parameters, strict=True):
                p.data.copy_(mine)

    @torch.no_grad()
    def foreach(self, step: int) -> None:
        torch._foreach_mul_(self.parameters, 0.9)

    @torch.no_grad()
    def swap_an_average_in_and_out(self, step: int) -> None:
        """As an exponential moving average is evaluated; only every second step."""
        for mine, p in zip(self.other, self.parameters, strict=True):
            mine.lerp_(p, 0.5)
        if step % 2:
            kept = [p.clone() for p in self.parameters]
            torch._foreach_copy_(self.parameters, self.other)
            squares(self.model, 9, step)
            torch._foreach_copy_(self.parameters, kept)

    @torch.no_grad()
    def swap_without_a_forward_pass(self, step: int) -> None:
        kept = [p.clone() for p in self.parameters]
        torch._foreach_copy_(self.parameters, self.other)
        torch._foreach_copy_(self.parameters, kept)

    @torch.no_grad()
    def anneal_towards_the_start(self, step: int) -> None:
        for mine, p in zip(self.other, self.parameters, strict=True):
            p.lerp_(mine, 0.1)

    def load(self, step: int) -> None:
        """Through ``load_state_dict``, which waits by itself."""
        halves = {name: tensor / 2 for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(halves)


CHANGES = [name for name in vars(Changes) if not name.startswith("_")]


def trained_with(change: str, rank: int, overlap: bool, wait: bool = False) -> tuple[Tensor, Tensor]:
    model = mlp()
    optimizer = sgd(model)
    replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=64), overlap_forward=overlap)
    changes = Changes(model)
    for step in range(8):
        optimizer.zero_grad()
        squares(model, rank, step).backward()
        optimizer.step()
        if wait:
            replica.wait_for_exchanges()
        getattr(changes, change)(step)
    replica.close()
    return vector(model), torch.cat([mine.reshape(-1) for mine in changes.other])


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_before_a_late_update_are_right_or_refused(change: str) -> None:
    (right, _), _ = loopback(lambda rank: trained_with(change, rank, overlap=False), 2)
    right_or_refused(lambda rank: trained_with(change, rank, overlap=True)[0], right, names_of(mlp()))


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_after_waiting_for_exchanges_are_right(change: str) -> None:
    """What the refusal asks for: ``wait_for_exchanges()`` before the change."""
    (right, other), _ = loopback(lambda rank: trained_with(change, rank, overlap=False), 2)
    for values, others in loopback(lambda rank: trained_with(change, rank, overlap=True, wait=True), 2):
        assert torch.equal(values, right)
        assert torch.equal(others, other)


def test_the_refusal_of_a_change_before_a_late_update_says_what_to_do() -> None:
    def train(rank: int) -> None:
        with pytest.raises(UsageError, match=rf"rank {rank}.*'\d\.(weight|bias)'.*wait_for_exchanges\(\)"):
            trained_with("clamp", rank, overlap=True)

    loopback(train, 2)
