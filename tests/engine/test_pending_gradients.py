"""With ``overlap_forward`` gradients are under way between backward and step: what a loop does with them there is not lost."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer.algorithms import Algorithm, AllReduce, ChunkSparse, Hierarchical, PowerSGD, ScatterReduce
from gossamer.comm.loopback import loopback

WIDTH, STEPS, WORLD = 6, 6, 3


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2))


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    made: Tensor = model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))).square().mean()
    return made


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def replaced(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = p.grad * 0.1


def scaled_through_data(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.data.mul_(0.1)


def scaled_as_array(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad.numpy()[...] *= 0.5


def one_left_out(model: nn.Module) -> None:
    model[0].weight.grad = None


def set_by_hand(model: nn.Module) -> None:
    model[2].bias.grad = torch.ones(WIDTH)


def noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.01)


def unscaled(model: nn.Module) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(1))
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.1))


HABITS = {
    "clip the norm": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2),
    "clip the norm one by one": lambda m: nn.utils.clip_grad_norm_(m.parameters(), 1e-2, foreach=False),
    "clip the norm of one layer": lambda m: nn.utils.clip_grad_norm_(m[2].parameters(), 1e-2),
    "clip values": lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-3),
    "total norm, then clip": lambda m: nn.utils.clip_grads_with_norm_(
        m.parameters(), 1e-2, nn.utils.get_total_norm(gradients(m))
    ),
    "scale in place": lambda m: [g.mul_(0.1) for g in gradients(m)],
    "scale through data": scaled_through_data,
    "scale as an array": scaled_as_array,
    "foreach": lambda m: torch._foreach_mul_(gradients(m), 0.1),
    "replace": replaced,
    "leave one out": one_left_out,
    "set one by hand": set_by_hand,
    "noise": noise,
    "unscale": unscaled,
    "zero in place": lambda m: m.zero_grad(set_to_none=False),
    "throw all away": lambda m: m.zero_grad(),
    "throw one away in place": lambda m: m[0].weight.grad.zero_(),
    "only look": lambda m: torch.stack([g.norm() for g in gradients(m)]),
    "look at the shape": lambda m: [(g.shape, g.dtype, g.device) for g in gradients(m)],
}


def trained(overlap: bool, habit, algorithm: Algorithm, closure: bool = False, make=None) -> list[tuple[Tensor, Tensor]]:
    """The weights of every rank, and the norms of gradients that it saw."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model = net()
        optimizer: Optimizer = (make or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01)))(
            model.parameters()
        )
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=overlap)
        seen = []

        def evaluated(step: int) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            loss.backward()
            habit(model)
            seen.extend(g.norm().item() for g in gradients(model) if rank == 0)
            return loss

        for step in range(STEPS):
            if closure:
                optimizer.step(lambda step=step: evaluated(step))
            else:
                evaluated(step)
                optimizer.step()
        replica.close()
        return torch.cat([p.detach().flatten() for p in model.parameters()]), torch.tensor(seen)

    return loopback(body, WORLD)


def same(some, others) -> None:
    for (weights, seen), (other_weights, other_seen) in zip(some, others, strict=True):
        assert torch.equal(weights, other_weights)
        assert torch.equal(seen, other_seen)


def the_same_with_and_without_overlap(body: Callable[[int, bool], nn.Module]) -> None:
    """The weights of every rank, of the model that ``body(rank, overlap)`` has trained."""

    def weights(overlap: bool) -> list[Tensor]:
        return loopback(lambda rank: torch.cat([p.detach().flatten() for p in body(rank, overlap).parameters()]), WORLD)

    for one, other in zip(weights(False), weights(True), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("closure", [False, True], ids=["in the loop", "in a closure"])
@pytest.mark.parametrize("habit", list(HABITS))
def test_what_is_done_with_gradients_gives_the_same_bits(habit: str, closure: bool) -> None:
    algorithm = AllReduce(bucket_bytes=64)
    same(*(trained(overlap, HABITS[habit], algorithm, closure) for overlap in (False, True)))


@pytest.mark.parametrize(
    "algorithm",
    [
        AllReduce(),
        ScatterReduce(gather_below=0, bucket_bytes=64),
        ChunkSparse(density=0.5, chunk=8, warmup=0, bucket_bytes=64),
        PowerSGD(rank=1, bucket_bytes=64),
        Hierarchical(AllReduce(bucket_bytes=64), ranks_per_node=2),
    ],
    ids=lambda a: type(a).__name__,
)
@pytest.mark.parametrize("habit", ["clip the norm", "replace"])
def test_every_gradient_algorithm_clips_the_same(algorithm: Algorithm, habit: str) -> None:
    def adamw(parameters) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    same(*(trained(overlap, HABITS[habit], algorithm, make=adamw) for overlap in (False, True)))


def test_a_pass_inside_no_sync_adds_to_what_travels() -> None:
    def body(rank: int, overlap: bool) -> nn.Module:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=64), overlap_forward=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            with replica.no_sync():
                loss_of(model, 9, step).backward()  # the same on all ranks
            optimizer.step()
        replica.close()
        return model

    the_same_with_and_without_overlap(body)


class Branches(nn.Module):
    """Of three branches, rank 1 never takes the first, and no rank takes the last in every second step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.left, self.right = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, left: bool, right: bool) -> Tensor:
        x = self.stem(x)
        x = x + self.left(x) if left else x
        return x + self.right(x) if right else x


@pytest.mark.parametrize("bucket_bytes", [64, 10**6])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_clipping_counts_gradients_that_only_other_ranks_have(make, bucket_bytes: int) -> None:
    def body(rank: int, overlap: bool) -> nn.Module:
        model = Branches()
        optimizer = make(model.parameters(), lr=0.05)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=bucket_bytes), overlap_forward=overlap)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
            model(x, left=rank != 1, right=step % 2 == 0).square().mean().backward()
            assert (model.right.weight.grad is None) == (step % 2 == 1)
            assert model.left.weight.grad is not None
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
        replica.close(average=True)
        return model

    the_same_with_and_without_overlap(body)


def test_what_nobody_reads_still_overlaps_and_what_is_read_is_told_once(caplog) -> None:
    def late(habit) -> list[bool]:
        def body(rank: int) -> bool:
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=64), overlap_forward=True)
            for step in range(STEPS):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                assert all(p.grad is not None for p in model.parameters())
                habit(model)
                before = [p.detach().clone() for p in model.parameters()]
                optimizer.step()
                unmoved = all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
            replica.close()
            return unmoved

        return loopback(body, 2)

    with caplog.at_level(logging.WARNING, "gossamer"):
        assert late(lambda model: None) == [True, True], "its updates wait for the next forward pass"
        assert "are read" not in caplog.text
        assert late(HABITS["replace"]) == [False, False], "its step is a plain one"
        assert caplog.text.count("gradients are read between backward() and step()") == 1


def test_a_gradient_that_is_kept_beyond_its_step_can_be_read() -> None:
    def body(rank: int) -> list[bool]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=64), overlap_forward=True)
        kept: list[list[Tensor]] = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            kept.append(gradients(model))
            optimizer.step()
        replica.close()
        return [bool(tensor.isfinite().all()) for each in kept for tensor in each]

    assert all(map(all, loopback(body, 2)))


@pytest.mark.parametrize("late", [False, True], ids=["before replicate()", "after it"])
def test_a_hook_before_the_step_that_clips_and_scales_is_called_once_a_step(late: bool) -> None:
    def body(rank: int, overlap: bool) -> nn.Module:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

        def clip(*args) -> None:
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            torch._foreach_mul_(gradients(model), 0.5)

        if not late:
            optimizer.register_step_pre_hook(clip)
        algorithm = ChunkSparse(density=0.5, chunk=8, warmup=0, bucket_bytes=64, momentum_correction=True)
        replica = gossamer.replicate(model, optimizer, algorithm, overlap_forward=overlap)
        if late:
            optimizer.register_step_pre_hook(clip)
        ended: list[int] = []
        optimizer.register_step_post_hook(lambda *args: ended.append(1))
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        replica.close()
        assert len(ended) == STEPS
        return model

    the_same_with_and_without_overlap(body)


def test_a_group_that_is_added_after_the_step_takes_no_part_in_it() -> None:
    def body(rank: int) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, AllReduce(bucket_bytes=64), overlap_forward=True)
        for step in range(STEPS):
            if step == STEPS - 1:
                added = nn.Parameter(torch.ones(2))
                optimizer.add_param_group({"params": [added]})
                replica.wait_for_exchanges()
                assert torch.equal(added, torch.ones(2))
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()

    with pytest.raises(gossamer.UsageError, match="the parameters of SGD changed after replicate"):
        loopback(body, 2)
