"""Scenarios: every way in which a training loop may be written, against DDP where DDP can do it. Three ranks."""

import copy
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer import AllReduce, Gossip, Hierarchical, ScatterReduce, after
from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.codecs import Codec, Quantize, Sign
from gossamer.comm.connect import connect
from gossamer.comm.ops import Flow, all_reduce
from gossamer.state import State
from processes.expect import raises
from processes.twins import (
    Build,
    Run,
    assert_same_on_all_ranks,
    difference,
    equal_to_ddp,
    under_ddp,
    under_gossamer,
    values,
)
from processes.worker import Here, threads
from processes.workloads import generator

STEPS = 6


def numbers(here: Here, step: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Random numbers of one rank and step."""
    return torch.randn(*shape, generator=generator(here.rank, step), dtype=dtype)


def mlp() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(10, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def with_adamw(make: Callable[[], nn.Module]) -> Build:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = make()
        return model, [AdamW(model.parameters(), lr=1e-2)]

    return build


def steps(run: Run, count: int = STEPS) -> Iterator[Tensor]:
    """The batches of a plain run, with the gradients cleared before each."""
    for step in range(count):
        for optimizer in run.optimizers:
            optimizer.zero_grad()
        yield numbers(run.here, step, 8, 10)


def compiled(here: Here, codec: Codec) -> None:
    """Have the kernels of a codec loaded everywhere before anyone waits for anyone: on a busy machine that takes seconds."""
    ones = torch.ones(600)
    payload, _ = codec.encode_rest(ones, ones)
    codec.add_decoded(payload, ones)
    codec.decode_into(payload, ones)
    here.gathered(torch.zeros(1))


def loss_of(run: Run, batch: Tensor) -> Tensor:
    return run.model(batch).square().mean()


def plain(run: Run) -> None:
    for batch in steps(run):
        loss_of(run, batch).backward()
        for optimizer in run.optimizers:
            optimizer.step()


# -- parameters and optimizers ----------------------------------------------------------------------------------


def plain_training(here: Here) -> float:
    return equal_to_ddp(here, with_adamw(mlp), plain)


def overlap_of_the_forward_pass(here: Here) -> float:
    """Updates that come late, module by module, on a skewed batch; with what a codec remembers they are the same bits."""

    def late(run: Run) -> None:
        plain(run)
        if run.replica is not None:
            held = [p for p in run.bare.parameters() if p.grad is None]
            assert len(held) == len(list(run.bare.parameters())), "the last update did not wait for the next forward pass"
            run.replica.wait_for_exchanges()

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Patchwork()
        return model, [AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.5)]

    distance = equal_to_ddp(here, build, late, ours={"overlap_forward": True}, ddp={"find_unused_parameters": True})
    models = []
    for overlap in (False, True):
        run = under_gossamer(here, build, ScatterReduce(bucket_bytes=512, gather_below=0), overlap_forward=overlap)
        plain(run)
        run.replica.close()
        models.append(run.bare)
    assert difference(*models) == 0
    return distance


def several_optimizers_and_groups(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": [model[2].weight], "weight_decay": 0.1}]
        rest = [model[2].bias, *model[4].parameters()]
        return model, [AdamW(groups, lr=1e-3), SGD(rest, lr=0.1, momentum=0.9)]

    def train(run: Run) -> None:
        schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) for optimizer in run.optimizers]
        for batch in steps(run):
            loss_of(run, batch).backward()
            for optimizer, scheduler in zip(run.optimizers, schedulers, strict=True):
                optimizer.step()
                scheduler.step()

    return equal_to_ddp(here, build, train)


class Patchwork(nn.Module):
    """Frozen, tied and unused parameters; ``skip`` leaves a branch out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.inside, self.frozen = nn.Linear(10, 16), nn.Linear(16, 16)
        self.outside = nn.Linear(16, 10, bias=False)
        self.outside.weight = nn.Parameter(self.inside.weight.detach().t().clone())
        self.tied = nn.Linear(10, 16, bias=False)
        self.tied.weight = self.inside.weight
        self.branch, self.unused = nn.Linear(10, 10), nn.Linear(7, 7)
        self.frozen.requires_grad_(False)
        self.skip = False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.outside(torch.tanh(self.frozen(self.inside(x))) + self.tied(x))
        return y if self.skip else y + self.branch(x)


def frozen_tied_and_unused(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Patchwork()
        return model, [AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2, weight_decay=0.5)]

    def train(run: Run) -> None:
        unused = copy.deepcopy(run.bare.unused.weight)
        frozen = copy.deepcopy(run.bare.frozen.weight)
        plain(run)
        assert torch.equal(run.bare.unused.weight, unused), "AdamW moved a parameter that no rank used"
        assert run.bare.unused.weight.grad is None
        assert torch.equal(run.bare.frozen.weight, frozen)

    return equal_to_ddp(here, build, train, ddp={"find_unused_parameters": True})


def unused_on_some_ranks(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Patchwork()
        return model, [AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)]

    def train(run: Run) -> None:
        for step, batch in enumerate(steps(run)):
            run.bare.skip = here.rank == step % 3  # another rank leaves the branch out every time
            loss_of(run, batch).backward()
            assert run.bare.branch.weight.grad is not None
            run.optimizer.step()

    return equal_to_ddp(here, build, train, ddp={"find_unused_parameters": True})


class Mixed(nn.Module):
    """Parameters of three dtypes, a scalar one, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.wide, self.single = nn.Linear(10, 30).double(), nn.Linear(30, 30)
        self.narrow = nn.Linear(30, 3).to(torch.bfloat16)
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.single((self.scale * self.wide(x)).float()))
        return self.narrow(y.to(torch.bfloat16)).float() + self.nothing.sum()


def several_dtypes(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Mixed()
        return model, [SGD(model.parameters(), lr=0.05)]

    return equal_to_ddp(here, build, plain, bound=2e-2)


def starts_equal(here: Here) -> None:
    torch.manual_seed(here.rank)
    model = nn.Sequential(nn.Linear(10, 4), nn.BatchNorm1d(4)).double()
    model[1].running_mean.fill_(float(here.rank))
    here.replicate(model, AdamW(model.parameters()))
    assert_same_on_all_ranks(here, model)
    assert model[1].running_mean.eq(0).all()


# -- ways to write the loop -----------------------------------------------------------------------------------------


def accumulation(here: Here) -> float:
    def train(run: Run) -> None:
        for batch in steps(run):
            with run.no_sync():
                loss_of(run, batch).backward()
                loss_of(run, batch * 2).backward()
            loss_of(run, batch + 1).backward()
            run.optimizer.step()

    return equal_to_ddp(here, with_adamw(mlp), train)


def clipping(here: Here) -> float:
    def train(run: Run) -> None:
        for batch in steps(run):
            loss_of(run, 10 * batch).backward()
            norm = nn.utils.clip_grad_norm_(run.bare.parameters(), 0.1)
            assert norm > 0.1
            assert len({n.item() for n in here.gathered(norm)}) == 1, "the norm differs between ranks"
            run.optimizer.step()

    return equal_to_ddp(here, with_adamw(mlp), train)


def zeroing_in_every_way(here: Here) -> float:
    def train(run: Run) -> None:
        for step in range(STEPS):
            run.bare.zero_grad(set_to_none=step % 3 == 0)
            if step % 3 == 2:
                for parameter in run.bare.parameters():
                    parameter.grad.zero_()
            loss_of(run, numbers(here, step, 8, 10)).backward()
            run.optimizer.step()

    return equal_to_ddp(here, with_adamw(mlp), train)


def several_backwards_per_step(here: Here) -> float:
    def train(run: Run) -> None:
        for batch in steps(run):
            loss_of(run, batch).backward()
            loss_of(run, batch + 1).backward()
            run.optimizer.step()

    return equal_to_ddp(here, with_adamw(mlp), train)


def second_derivatives(here: Here) -> float:
    def train(run: Run) -> None:
        for batch in steps(run):
            batch.requires_grad_(True)
            output = run.model(batch).square().mean()
            (slope,) = torch.autograd.grad(output, batch, create_graph=True)
            (output + slope.square().sum()).backward()
            run.optimizer.step()

    return equal_to_ddp(here, with_adamw(mlp), train)


def gan(here: Here) -> float:
    def train(make: Callable[[Here, Build], Run]) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(8)
        generator_net = nn.Sequential(nn.Linear(4, 20), nn.Tanh(), nn.Linear(20, 10)).double()
        critic_net = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1)).double()
        faker = make(here, lambda: (generator_net, [AdamW(generator_net.parameters(), lr=1e-2)]))
        critic = make(here, lambda: (critic_net, [AdamW(critic_net.parameters(), lr=1e-2)]))
        for step in range(STEPS):
            real, noise = numbers(here, step, 8, 10), numbers(here, step + 100, 8, 4)
            critic.optimizer.zero_grad()
            fake = faker.model(noise)
            F.softplus(-critic.model(real)).mean().backward()
            F.softplus(critic.model(fake.detach())).mean().backward()
            critic.optimizer.step()
            faker.optimizer.zero_grad()
            F.softplus(-critic.model(fake)).mean().backward()  # reaches the critic's parameters, too
            faker.optimizer.step()
        return generator_net, critic_net

    reference, mine = train(under_ddp), train(under_gossamer)
    for one, other in zip(reference, mine, strict=True):
        assert_same_on_all_ranks(here, other)
        assert difference(one, other) <= 1e-12
    return max(difference(*pair) for pair in zip(reference, mine, strict=True))


def closures(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = mlp()
        return model, [SGD(model.parameters(), lr=0.1, momentum=0.9)]

    def train(run: Run) -> None:
        for step in range(4):
            batch = numbers(here, step, 8, 10)

            def closure(batch: Tensor = batch) -> Tensor:
                run.optimizer.zero_grad()
                loss = loss_of(run, batch)
                loss.backward()
                return loss

            run.optimizer.step(closure)

    return equal_to_ddp(here, build, train)


def uneven_data(here: Here) -> float:
    def train(run: Run) -> None:
        with run.join():
            for batch in steps(run, 2 + 3 * here.rank):
                loss_of(run, batch).backward()
                run.optimizer.step()

    return equal_to_ddp(here, with_adamw(batch_norm), train)


def uneven_data_with_accumulation(here: Here) -> None:
    """A rank without any data, accumulation, and an optimizer step now and then; then a second epoch, even."""
    run = under_gossamer(here, with_adamw(mlp))
    for epoch in range(2):
        with run.join():
            for batch in steps(run, 2 * here.rank if epoch == 0 else 2):
                with run.no_sync():
                    loss_of(run, batch).backward()
                loss_of(run, batch).backward()
                run.optimizer.step()
        assert_same_on_all_ranks(here, run.bare)


def uneven_data_with_gossip(here: Here) -> None:
    run = under_gossamer(here, with_adamw(batch_norm), Gossip(bucket_bytes=2048))
    with run.join():
        for batch in steps(run, 1 + 2 * here.rank):
            loss_of(run, batch).backward()
            run.optimizer.step()
    with run.replica.consensus():
        assert_same_on_all_ranks(here, run.bare)


def uneven_data_with_gossip_and_several_optimizers(here: Here) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = mlp()
        return model, [AdamW(model[0].parameters(), lr=1e-2), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]

    run = under_gossamer(here, build, Gossip(bucket_bytes=2048))
    for _ in range(2):
        with run.join():
            for batch in steps(run, 4 - here.rank):
                loss_of(run, batch).backward()
                for optimizer in run.optimizers:
                    optimizer.step()
    with run.replica.consensus():
        assert_same_on_all_ranks(here, run.bare)


def evaluation_on_one_rank(here: Here) -> None:
    """Only rank 0 evaluates, with buffers: no other rank is needed for it."""
    run = under_gossamer(here, with_adamw(batch_norm))
    for batch in steps(run):
        loss_of(run, batch).backward()
        run.optimizer.step()
        if here.rank == 0:
            run.bare.eval()
            with torch.no_grad():
                run.model(batch)
            run.bare.train()
    assert_same_on_all_ranks(here, run.bare)


def training_in_a_thread(here: Here) -> None:
    import threading

    run, failed = under_gossamer(here, with_adamw(mlp)), []

    def body() -> None:
        try:
            plain(run)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert not failed, failed
    assert_same_on_all_ranks(here, run.bare)


def forked_processes(here: Here) -> None:
    """A process forked from this one ends as Python processes end; that is not the end of this rank."""
    import atexit
    import os

    run = under_gossamer(here, with_adamw(mlp))
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    plain(run)
    assert_same_on_all_ranks(here, run.bare)


def join_of_an_optimizer_that_communicates(here: Here) -> None:
    """Ranks end after 4, 9 and 14 steps, the first of them while gradients are still averaged exactly."""
    compiled(here, Sign())
    model = mlp().float()
    optimizer = gossamer.optim.OneBitAdam(model.parameters(), lr=1e-2, warmup=6)
    replica = here.replicate(model, optimizer)
    with replica.join():
        for step in range(4 + 5 * here.rank):
            optimizer.zero_grad()
            model(numbers(here, step, 8, 10).float()).square().mean().backward()
            optimizer.step()
    assert replica.step == 14
    assert optimizer.frozen
    assert_same_on_all_ranks(here, model)
    moments = [optimizer.state[p][key].reshape(-1) for p in model.parameters() for key in ("exp_avg", "exp_avg_sq")]
    rows = here.gathered(torch.cat(moments))
    assert all(torch.equal(row, rows[0]) for row in rows)


# -- precision ------------------------------------------------------------------------------------------------------


def autocast(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = mlp().float()
        return model, [SGD(model.parameters(), lr=0.1)]

    def train(run: Run) -> None:
        for batch in steps(run):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = loss_of(run, batch.float())
            loss.backward()
            run.optimizer.step()

    return equal_to_ddp(here, build, train, bound=1e-3)


def scaled(run: Run, scaler: Any, bad_step: int, bad_rank: int) -> list[float]:
    """Train with a scaler; one rank's loss overflows once. Returns the scales."""
    scales = []
    for step, batch in enumerate(steps(run)):
        before = values(run.bare)
        factor = float("inf") if step == bad_step and run.here.rank == bad_rank else 1.0
        scaler.scale(loss_of(run, batch) * factor).backward()
        if step == bad_step:
            assert all(not p.grad.isfinite().all() for p in run.bare.parameters()), "every rank sees the overflow"
        scaler.unscale_(run.optimizer)
        nn.utils.clip_grad_norm_(run.bare.parameters(), 1.0)
        scaler.step(run.optimizer)
        scaler.update()
        assert torch.equal(values(run.bare), before) == (step == bad_step), f"step {step}"
        scales.append(scaler.get_scale())
    return scales


def gradient_scaler(here: Here) -> float:
    reference = under_ddp(here, with_adamw(mlp))
    expected = scaled(reference, torch.amp.GradScaler("cpu"), 2, 1)
    scaler = torch.amp.GradScaler("cpu")
    run = under_gossamer(here, with_adamw(mlp), scaler=scaler)
    assert scaled(run, scaler, 2, 1) == expected
    assert run.replica.step == STEPS
    assert_same_on_all_ranks(here, run.bare)
    assert difference(reference.bare, run.bare) <= 1e-12
    return difference(reference.bare, run.bare)


def gradient_scaler_with_gossip(here: Here) -> None:
    """Only one rank overflows; all skip, and the weights do not move, not even by gossip."""
    scaler = torch.amp.GradScaler("cpu")
    run = under_gossamer(here, with_adamw(mlp), Gossip(bucket_bytes=2048), scaler=scaler)
    scales = torch.tensor(scaled(run, scaler, 2, 1))
    assert scales.min() < scales[0]
    assert all(torch.equal(scales, other) for other in here.gathered(scales))


def gradient_scaler_with_several_dtypes(here: Here) -> None:
    """Empty parameters, and 64-bit gradients beyond the range of 32 bits, are no overflow."""
    scaler = torch.amp.GradScaler("cpu")
    model = Mixed()
    optimizer = SGD(model.parameters(), lr=1e-30)
    here.replicate(model, optimizer, scaler=scaler)
    scaler.scale(model.wide(torch.ones(1, 10, dtype=torch.float64)).sum() * 1e60).backward()
    assert model.wide.weight.grad.isfinite().all()


@dataclass(frozen=True, kw_only=True)
class Remembers(Algorithm, register=False):
    """An exact all-reduce that keeps what it sent, as error feedback would."""

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        state["residual"] = state["residual"] + bucket.flat
        return (yield from all_reduce(bucket.flat / ctx.world))


def non_finite_gradients_and_state(here: Here) -> None:
    """NaN of one rank reaches no rank's state, with a scaler or without; the next step goes on from the state before."""
    for scaler in (None, torch.amp.GradScaler("cpu")):
        run = under_gossamer(here, with_adamw(mlp), Remembers(bucket_bytes=2048), scaler=scaler)
        seen = []
        for step, batch in enumerate(steps(run, 3)):
            loss = loss_of(run, batch)
            (loss * float("nan") if here.rank == 1 and step == 1 else loss).backward()
            if step != 1:
                run.optimizers[0].step()
            kept = run.replica.state_dict()[f"rank{here.rank}"][0]["residual"]
            seen.append(torch.cat([tensor.reshape(-1) for tensor in kept.values()]))
        assert all(tensor.isfinite().all() for tensor in seen)
        assert torch.equal(seen[0], seen[1])
        assert not torch.equal(seen[1], seen[2])
        here.close()


def non_finite_gradients(here: Here) -> None:
    """Without a scaler: NaN and inf of one rank reach every rank's gradients."""
    for value in (float("nan"), float("inf")):
        for wire in ("fp32", "fp16", "bf16"):
            run = under_gossamer(here, with_adamw(mlp), AllReduce(bucket_bytes=2048, wire=wire))
            loss = loss_of(run, numbers(here, 0, 8, 10))
            (loss * value if here.rank == 2 else loss).backward()
            assert all(not p.grad.isfinite().any() for p in run.bare.parameters())
            here.close()


# -- modules --------------------------------------------------------------------------------------------------------


def batch_norm() -> nn.Module:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Linear(20, 3)).double()


def buffers_broadcast(here: Here) -> float:
    """The default equals DDP, on every rank, buffers included."""
    return equal_to_ddp(here, with_adamw(batch_norm), plain)


def buffer_modes(here: Here) -> None:
    """What a training pass does to buffers that differ (momentum 0: it does nothing else)."""
    expected = {"broadcast": 0.0, "average": 1.0, "local": float(here.rank)}
    for algorithm in (AllReduce(), Gossip()):
        for mode, mean in expected.items():
            model = batch_norm()
            model[1].momentum = 0.0
            optimizer = SGD(model.parameters(), lr=0.1)
            here.replicate(model, optimizer, algorithm, buffers=mode)
            model[1].running_mean.fill_(float(here.rank))
            if mode == "average" and isinstance(algorithm, Gossip):
                # With weights: the buffers travel with them, one partner per step.
                for step in range(30):
                    loss = model(numbers(here, step, 8, 10)).square().mean()
                    loss.backward()
                    optimizer.step()
            else:
                model(numbers(here, 0, 8, 10)).square().mean().backward()
            assert (model[1].running_mean - mean).abs().max() < 0.02, f"{algorithm}, {mode}"
            here.close()


class Odd(nn.Module):
    """Buffers of every kind: shared, scalar, empty, transposed, complex, boolean, not persistent; and a saved constant."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(10, 10).double()
        kinds = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool)
        for dtype in kinds:
            value = torch.full((3,), rank % 2 if dtype == torch.bool else rank).to(dtype)
            self.register_buffer(f"of_{str(dtype)[6:]}", value)
        self.register_buffer("scalar", torch.tensor(float(rank)), persistent=False)
        self.register_buffer("empty", torch.zeros(0, 4))
        self.register_buffer("transposed", torch.arange(6.0).view(2, 3).t() + rank)
        self.register_buffer("shared", self.of_float32)
        self.register_buffer("nothing", None)
        self.register_buffer("scale", torch.linspace(1, 2, 10, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale


def buffers_of_every_kind(here: Here) -> None:
    """Rank 0's arrive bit by bit, at the start and when each backward pass ends."""
    model, expected = Odd(here.rank), Odd(0)
    here.replicate(model, SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, expected.get_buffer(name)), name
            buffer.copy_(buffer + here.rank if buffer.dtype != torch.bool else buffer ^ bool(here.rank))
        model.scale.copy_(expected.scale)
        model(numbers(here, 0, 2, 10)).square().mean().backward()


def two_forwards_before_backward(here: Here) -> None:
    """A buffer that autograd has saved for two forward passes is broadcast when the backward pass ends (DDP raises here)."""
    run = under_gossamer(here, with_adamw(lambda: Odd(0)))
    for batch in steps(run):
        (loss_of(run, batch) + loss_of(run, batch + 1)).backward()
        run.optimizer.step()
    assert_same_on_all_ranks(here, run.bare)


def channels_last(here: Here) -> float:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(10)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).double().to(memory_format=torch.channels_last)
        return model, [SGD(model.parameters(), lr=0.1, momentum=0.9)]

    def train(run: Run) -> None:
        for step in range(STEPS):
            run.optimizer.zero_grad()
            images = numbers(here, step, 4, 3, 9, 9).contiguous(memory_format=torch.channels_last)
            loss_of(run, images).backward()
            assert all(p.grad.stride() == p.stride() for p in run.bare.parameters())
            run.optimizer.step()

    return equal_to_ddp(here, build, train)


class Checkpointed(nn.Module):
    """Two blocks, each recomputed in backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.reentrant = reentrant
        self.first, self.second, self.last = nn.Linear(10, 20), nn.Linear(20, 20), nn.Linear(20, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: torch.tanh(self.first(y)), x.requires_grad_(), use_reentrant=self.reentrant)
        x = checkpoint(lambda y: torch.tanh(self.second(y)), x, use_reentrant=self.reentrant)
        return self.last(x)


def checkpoint_without_reentrance(here: Here) -> float:
    return equal_to_ddp(here, with_adamw(lambda: Checkpointed(False)), plain)


def checkpoint_with_reentrance(here: Here) -> float:
    return equal_to_ddp(here, with_adamw(lambda: Checkpointed(True)), plain)


def copies_of_the_model(here: Here) -> None:
    """A deep copy (an average of weights over time, say) trains alone, and a whole model can be saved."""
    import io

    run = under_gossamer(here, with_adamw(batch_norm))
    plain(run)
    twin = copy.deepcopy(run.bare)
    saved = io.BytesIO()
    torch.save(run.bare, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    assert torch.equal(values(twin), values(run.bare))
    assert torch.equal(values(loaded), values(run.bare))
    if here.rank == 0:
        for alone in (twin, loaded):
            alone(numbers(here, 0, 8, 10)).square().mean().backward()
    plain(run)
    assert_same_on_all_ranks(here, run.bare)


# -- the handle -----------------------------------------------------------------------------------------------------


def interrupted(here: Here, algorithm: gossamer.Algorithm) -> None:
    """Save after three steps, go on; a fresh process that loads ends with the same bits."""
    import io

    def train(run: Run, steps: range) -> None:
        for step in steps:
            run.optimizer.zero_grad()
            loss_of(run, numbers(here, step, 8, 10)).backward()
            run.optimizer.step()

    run = under_gossamer(here, with_adamw(batch_norm), algorithm)
    train(run, range(3))
    saved = io.BytesIO()
    torch.save([run.replica.state_dict(), run.bare.state_dict(), run.optimizer.state_dict()], saved)
    train(run, range(3, 6))
    here.close()

    saved.seek(0)
    torch.manual_seed(here.rank)
    again = under_gossamer(here, with_adamw(batch_norm), algorithm)
    own, model, optimizer = torch.load(saved, weights_only=True)
    again.bare.load_state_dict(model)
    again.optimizer.load_state_dict(optimizer)
    again.replica.load_state_dict(own)
    assert again.replica.step == 3
    train(again, range(3, 6))
    here.close()
    assert torch.equal(values(run.bare), values(again.bare))
    for one, other in zip(run.bare.parameters(), again.bare.parameters(), strict=True):
        assert torch.equal(one, other)


def state_of_all_reduce(here: Here) -> None:
    interrupted(here, AllReduce(bucket_bytes=2048))


def state_of_gossip(here: Here) -> None:
    interrupted(here, Gossip(bucket_bytes=2048))


def consensus(here: Here) -> None:
    """The same average on every rank; then one's own weights again, and training as if nothing had been."""

    def train(look: bool) -> Tensor:
        run = under_gossamer(here, with_adamw(batch_norm), Gossip(bucket_bytes=2048))
        for batch in steps(run):
            loss_of(run, batch).backward()
            run.optimizer.step()
            if look:
                own = values(run.bare)
                mean = torch.stack(here.gathered(own)).mean(0)
                with run.replica.consensus() as model:
                    assert model is run.bare
                    assert (values(model) - mean).abs().max() < 1e-12
                    assert_same_on_all_ranks(here, model)
                assert torch.equal(values(run.bare), own)
        here.close()
        return values(run.bare)

    assert torch.equal(train(False), train(True))


def metrics(here: Here) -> dict[str, float]:
    run = under_gossamer(here, with_adamw(mlp))
    before = run.replica.metrics()
    plain(run)
    found = run.replica.metrics()
    payload = sum(p.numel() * p.element_size() for p in run.bare.parameters())
    sent = found["bytes_sent"] - before["bytes_sent"]
    gathered = STEPS * payload * (here.world - 1)  # what small buckets take
    assert gathered <= sent <= 1.1 * gathered, (sent, gathered)
    assert found["step"] == STEPS
    assert 0 <= found["exposed_seconds"] <= found["elapsed_seconds"]
    assert found["messages_sent"] > 0
    assert found["wire_seconds"] > 0
    here.close()
    compiled(here, Quantize())
    begin = time.perf_counter()
    coded = under_gossamer(here, with_adamw(mlp), ScatterReduce(bucket_bytes=2048))
    plain(coded)
    passed, parts = time.perf_counter() - begin, coded.replica.metrics()
    for part in ("wire_seconds", "local_seconds", "exposed_seconds"):
        assert 0 < parts[part] < passed * (1 if part == "exposed_seconds" else 3), (part, parts)  # of three lanes
    assert parts["residual_norm"] > 0
    here.close()
    prompt = under_gossamer(here, with_adamw(mlp), AllReduce(gather_below=0))
    plain(prompt)
    assert prompt.replica.metrics()["local_seconds"] > 0, "its waits are cut short by the main thread, again and again"
    return found


def closing_and_replicating_again(here: Here) -> int:
    """Eight times, without leaving threads behind; between and after, the model trains alone."""
    import os

    run = Run(here, *with_adamw(mlp)()[:1] * 2, [], None, None)  # type: ignore[arg-type]
    run.optimizers = [AdamW(run.bare.parameters(), lr=1e-2)]
    tasks = []
    for algorithm in (AllReduce(), Gossip()) * 4:
        replica = here.replicate(run.bare, run.optimizers, algorithm)
        plain(run)
        replica.close()
        replica.close()
        hooks = [h for p in run.bare.parameters() for h in (p._post_accumulate_grad_hooks or {})]
        assert not hooks
        if here.rank == 1:
            plain(run)  # alone
        here.close()
        tasks.append(len(os.listdir("/proc/self/task")))
    assert tasks[-1] <= tasks[1] + 3, tasks
    return tasks[-1]


def runners_that_are_dropped_leave_no_threads_behind(here: Here) -> None:
    """As that of a shuffle which nobody has closed."""
    import gc

    def lanes() -> int:
        return sum(thread.name.startswith("gossamer-lane") for thread in threading.enumerate())

    def use_once() -> None:
        runner = connect()
        runner.agree_on_opening()
        runner.run(lambda: all_reduce(torch.ones(3)), "an exchange")

    before = lanes()
    use_once()
    here.gathered(torch.zeros(1))  # until all are there, nobody's connections end
    gc.collect()
    end = time.monotonic() + 10
    while lanes() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert lanes() <= before, threading.enumerate()


def all_lanes_share_two_network_threads(here: Here) -> None:
    """One for each direction: every such thread wakes a hundred times a second."""

    def network_threads() -> int:
        return sum(name.startswith("gloo") for name in threads())

    before = network_threads()
    model = mlp()
    here.replicate(model, AdamW(model.parameters(), lr=1e-2))
    assert network_threads() == before + 2


def subgroups(here: Here) -> None:
    """Ranks 0 and 2 train together; rank 1 is no member, and trains with nobody."""
    import torch.distributed as dist

    group = dist.new_group([0, 2])
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    if here.rank == 1:
        with raises(gossamer.ConfigurationError, match="not a member"):
            here.replicate(model, optimizer, group=group)
        return
    reference = under_ddp(here, with_adamw(mlp), process_group=group)
    plain(reference)
    run = under_gossamer(here, with_adamw(mlp), group=group)
    plain(run)
    assert difference(reference.bare, run.bare) <= 1e-12


def machines_from_a_mesh(here: Here) -> None:
    """Rows of a two-dimensional mesh are machines, whatever the environment says; workers of one stay bit-identical.

    Before ranks belong to different numbers of groups: torch's own meshes of some of the ranks hang after that.
    """
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    gossip = Hierarchical(Gossip(bucket_bytes=2048, wire="fp32"), bucket_bytes=2048)
    together = under_gossamer(here, with_adamw(mlp), gossip, mesh=init_device_mesh("cpu", (1, 3)))
    plain(together)
    assert_same_on_all_ranks(here, together.bare)
    apart = under_gossamer(here, with_adamw(mlp), after(2, gossip), mesh=init_device_mesh("cpu", (3, 1)))
    plain(apart)
    rows = here.gathered(values(apart.bare))
    assert not torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])
    pair = DeviceMesh("cpu", [[2, 0]])
    if here.rank == 1:
        with raises(gossamer.ConfigurationError, match="this process is not in"):
            under_gossamer(here, with_adamw(mlp), gossip, mesh=pair)
    else:
        plain(run := under_gossamer(here, with_adamw(mlp), gossip, mesh=pair))
        run.replica.close()
    here.gathered(torch.zeros(1))  # those who wait for nobody wait here
    deep = init_device_mesh("cpu", (1, 1, 3))
    for algorithm in (gossip, Hierarchical(Gossip(), ranks_per_node=3)):
        with raises(gossamer.ConfigurationError, match=r"mesh= takes .*mesh\["):
            under_gossamer(here, with_adamw(mlp), algorithm, mesh=deep)


def overlapping_groups(here: Here) -> None:
    """A rank that belongs to more groups than the others is no obstacle to a replica over all."""
    import torch.distributed as dist

    for ranks in ([0], [0, 1], [0, 2]):
        dist.new_group(ranks)
    plain(run := under_gossamer(here, with_adamw(mlp)))
    assert_same_on_all_ranks(here, run.bare)


def device_meshes(here: Here) -> float:
    from torch.distributed.device_mesh import init_device_mesh

    grid = init_device_mesh("cpu", (1, 3), mesh_dim_names=("shard", "replicate"))
    line = init_device_mesh("cpu", (3,))
    with raises(gossamer.ConfigurationError, match=r"mesh\["):
        under_gossamer(here, with_adamw(mlp), mesh=grid)
    equal_to_ddp(here, with_adamw(mlp), plain, ours={"mesh": grid["replicate"]})
    return equal_to_ddp(here, with_adamw(mlp), plain, ours={"mesh": line})


def gossip_with_several_optimizers(here: Here) -> None:
    """One optimizer steps every time, the other every second time; replicas stay near each other."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = mlp()
        return model, [AdamW(model[0].parameters(), lr=1e-2), SGD([*model[2].parameters(), *model[4].parameters()], lr=0.1)]

    run = under_gossamer(here, build, Gossip(bucket_bytes=2048, wire="fp32"))
    for step, batch in enumerate(steps(run, 12)):
        loss_of(run, batch).backward()
        run.optimizers[0].step()
        if step % 2:
            run.optimizers[1].step()
    rows = torch.stack(here.gathered(values(run.bare)))
    assert (rows - rows.mean(0)).norm() < 0.1 * rows.norm()
    assert not torch.equal(rows[0], rows[1])


def nothing_is_pickled(here: Here) -> None:
    """Start, train, save, load and disagree with every way to pickle taken away."""
    import pickle
    from unittest import mock

    import torch.distributed as dist

    forbidden = mock.Mock(side_effect=AssertionError("pickled"))
    objects = [name for name in dir(dist) if "_object" in name]
    assert objects
    ways = dict.fromkeys(("dumps", "loads", "dump", "load", "Pickler", "Unpickler"), forbidden)
    with mock.patch.multiple(pickle, **ways), mock.patch.multiple(dist, **dict.fromkeys(objects, forbidden)):
        for algorithm in (AllReduce(), Gossip()):
            run = under_gossamer(here, with_adamw(batch_norm), algorithm)
            plain(run)
            run.replica.load_state_dict(run.replica.state_dict())
            with run.replica.consensus(), run.replica.join():
                pass
            here.close()
        with raises(gossamer.DisagreementError):
            under_gossamer(here, with_adamw(mlp), AllReduce(bucket_bytes=1000 + here.rank))
    assert not forbidden.called
