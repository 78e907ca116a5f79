"""Scenarios: models under torch.compile, wholly and block by block, before and after replicate()."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from gossamer import AllReduce
from processes.scenarios_features import batch_norm, loss_of, plain, steps, with_adamw
from processes.twins import Run, assert_same_on_all_ranks, distance_from_ddp, under_ddp
from processes.worker import Here


def compiled(here: Here, backend: str, wholly: bool, first: bool) -> float:
    """Train compiled under gossamer, and as it is under DDP; returns the largest difference."""
    reference = under_ddp(here, with_adamw(batch_norm))
    plain(reference)
    model = batch_norm()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    called = wrap(model, backend, wholly) if first else model
    replica = here.replicate(called, optimizer, AllReduce(bucket_bytes=2048))
    called = called if first else wrap(model, backend, wholly)
    plain(Run(here, called, model, [optimizer], replica.no_sync, replica.join, replica))
    assert_same_on_all_ranks(here, model)
    assert list(model.state_dict()) == list(batch_norm().state_dict())
    distance = distance_from_ddp(reference, model)
    assert distance <= 1e-10
    return distance


def used_before(here: Here) -> float:
    """Compiled and tried once before replicate() is given the model as it was before compilation."""
    reference = under_ddp(here, with_adamw(batch_norm))
    plain(reference)
    model = batch_norm()
    called = torch.compile(model, backend="aot_eager")
    buffers = [buffer.clone() for buffer in model.buffers()]
    called(torch.randn(8, 10, dtype=torch.float64)).sum().backward()
    model.zero_grad()
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    replica = here.replicate(model, optimizer, AllReduce(bucket_bytes=2048))
    plain(Run(here, called, model, [optimizer], replica.no_sync, replica.join, replica))
    distance = distance_from_ddp(reference, model)
    assert distance <= 1e-10
    return distance


def wrap(model: nn.Module, backend: str, wholly: bool) -> nn.Module:
    """Compile the model, or each of its layers in place."""
    if wholly:
        return torch.compile(model, backend=backend)
    for layer in model:
        layer.compile(backend=backend)
    return model


def wholly_before(here: Here) -> float:
    return compiled(here, "aot_eager", wholly=True, first=True)


def wholly_after(here: Here) -> float:
    return compiled(here, "aot_eager", wholly=True, first=False)


def blockwise_before(here: Here) -> float:
    return compiled(here, "aot_eager", wholly=False, first=True)


def blockwise_after(here: Here) -> float:
    return compiled(here, "eager", wholly=False, first=False)


def with_inductor(here: Here) -> float:
    return compiled(here, "inductor", wholly=True, first=True)


def overlap_of_blocks(here: Here) -> None:
    """Block by block, buckets leave while backward still goes on; wholly compiled, all gradients come at its end."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(4))).double()
        return model, [AdamW(model.parameters())]

    for wholly in (False, True):
        model, optimizers = build()
        replica = here.replicate(model, optimizers, AllReduce(bucket_bytes=1))
        gradients = replica._gradients
        assert gradients is not None
        launched: list[int] = []
        handle = model[0].weight.register_post_accumulate_grad_hook(lambda p: launched.append(gradients.exchange.launched))
        run = Run(here, wrap(model, "aot_eager", wholly), model, optimizers, replica.no_sync, replica.join, replica)
        for batch in steps(run):
            loss_of(run, batch).backward()
            run.optimizer.step()
        handle.remove()
        if not wholly:
            assert min(launched[1:]) >= 4, launched  # the last layers' buckets are under way when the first one's comes
        assert_same_on_all_ranks(here, model)
        here.close()
