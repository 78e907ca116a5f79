"""Scenarios: what FSDP2 and pipelines offer beside the plain case, with replicas around it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer import AllReduce, Gossip
from processes.expect import raises
from processes.sharded import Block, Sharded, Transformer, alone, batch, flat, fsdp, loss_of, of_all, stage_of, transformer
from processes.worker import Here

STEPS = 6


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def error_of(model: nn.Module, one: Transformer) -> float:
    return float((flat(model) - flat(one)).abs().max())


def accumulated(here: Here, how: str) -> None:
    """Four passes to a step, as one process with all their batches."""
    parts = Sharded("fsdp")
    model, optimizer = parts.model, adamw(parts.model)
    at_step = {"synchronize": "step"} if how == "at the step" else {}
    replica = here.replicate(model, optimizer, mesh=parts.mesh["replicate"], **at_step)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(4):
            words = batch(step, 4 * parts.reader + number)
            last = number == 3
            if how == "without reducing":
                model.set_requires_gradient_sync(last)
                (loss_of(model(words), words) / 4).backward()
            elif how == "inside no_sync" and not last:
                with replica.no_sync():
                    (loss_of(model(words), words) / 4).backward()
            else:
                (loss_of(model(words), words) / 4).backward()
        optimizer.step()
    assert replica.step == STEPS, (how, replica.step)
    assert error_of(model, alone(16, STEPS)) < 1e-9, how
    here.close()


def accumulation(here: Here) -> None:
    for how in ("without reducing", "inside no_sync", "at the step"):
        accumulated(here, how)


def options_of_fsdp(here: Here) -> None:
    """Parameters that stay whole after forward, and blocks whose activations are computed again."""
    one = alone(4, STEPS)
    for options in ({"reshard_after_forward": False}, {"reshard_after_forward": True}):
        for recomputed in (False, True):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
            model = transformer()
            for block in model.blocks:
                if recomputed:
                    recompute(block)
                fully_shard(block, mesh=mesh["shard"], **options)
            fully_shard(model, mesh=mesh["shard"], **options)
            optimizer = adamw(model)
            here.replicate(model, optimizer, mesh=mesh["replicate"])
            for step in range(STEPS):
                optimizer.zero_grad()
                words = batch(step, here.rank)
                loss_of(model(words), words).backward()
                with torch.no_grad():
                    model(words)  # leaves the outermost parameters whole, when the step is taken
                optimizer.step()
            assert error_of(model, one) < 1e-9, (options, recomputed)
            here.close()


def recompute(block: Block) -> None:
    forward = block.forward
    block.forward = lambda x: checkpoint(forward, x, use_reentrant=False)  # type: ignore[method-assign]


def mixed_precision(here: Here) -> None:
    """Computed and reduced in bfloat16, exchanged in the type that FSDP2 gives: as FSDP2 over all four alone, to rounding."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def made(mesh: Any) -> Transformer:
        model = transformer().float()
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model

    def train(model: Transformer, optimizer: torch.optim.Optimizer) -> Tensor:
        for step in range(STEPS):
            optimizer.zero_grad()
            words = batch(step, here.rank)
            loss_of(model(words).float(), words).backward()
            optimizer.step()
        return flat(model)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    reference = made(init_device_mesh("cpu", (4,)))
    expected = train(reference, sgd(reference))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = made(mesh["shard"])
    optimizer = sgd(model)
    here.replicate(model, optimizer, AllReduce(), mesh=mesh["replicate"])
    got = train(model, optimizer)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-3)
    here.close()
    model = made(mesh["shard"])
    optimizer = sgd(model)
    replica = here.replicate(model, optimizer, Gossip(), mesh=mesh["replicate"])
    train(model, optimizer)
    replica.close(average=True)
    assert float((flat(model) - expected).abs().max()) < 0.05


def loss_scale(here: Here) -> None:
    """An overflow in one part of one replica makes all ranks skip the step."""
    parts = Sharded("fsdp", dtype=torch.float32)
    optimizer = torch.optim.SGD(parts.model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
    here.replicate(parts.model, optimizer, AllReduce(), mesh=parts.mesh["replicate"], scaler=scaler)
    for step, bad in enumerate((False, True, False)):
        before = parts.whole()
        optimizer.zero_grad()
        loss = parts.loss(step)
        scaler.scale(loss * float("inf") if bad and here.rank == 3 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(parts.whole(), before)
        assert set(of_all((moved, scaler.get_scale()))) == {(not bad, {0: 8.0, 1: 4.0, 2: 8.0}[step])}


def offloading(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = transformer()
    fully_shard(model, mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))
    with raises(gossamer.ConfigurationError, match=r"CPUOffloadPolicy.*synchronize='step'"):
        here.replicate(model, adamw(model), AllReduce(), mesh=mesh["replicate"])
    optimizer = adamw(model)
    here.replicate(model, optimizer, AllReduce(), mesh=mesh["replicate"], synchronize="step")
    for step in range(STEPS):
        optimizer.zero_grad()
        words = batch(step, here.rank)
        loss_of(model(words), words).backward()
        optimizer.step()
    assert error_of(model, alone(4, STEPS)) < 1e-9


def tensor_parallel_weights(here: Here) -> None:
    """Gossip on tensor-parallel parts, whose gradients may be sums that are still to be made."""
    parts = Sharded("tensor")
    optimizer = gossamer.optim.GossipAdamW(parts.model.parameters(), lr=1e-2)
    replica = here.replicate(parts.model, optimizer, Gossip(), mesh=parts.mesh["replicate"])
    for step in range(STEPS):
        optimizer.zero_grad()
        parts.loss(step).backward()
        optimizer.step()
    every = of_all(parts.whole())
    assert torch.equal(every[0], every[1])
    assert not torch.equal(every[0], every[2])
    with replica.consensus():
        inside = of_all(parts.whole())
    assert all(torch.equal(each, inside[0]) for each in inside)


def stages(here: Here, kind: Any, sharded: bool = False, synchronize: Any = "step") -> None:
    """A pipeline of two ranks with two stages each, perhaps modules of FSDP2 (with one part)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipe"))
    number, who = mesh.get_local_rank("pipe"), mesh.get_local_rank("replicate")
    model = transformer()
    cut = nn.ModuleList([model.words, model.blocks[0], model.blocks[1], nn.Sequential(model.norm, model.head)])
    numbers = (number, number + 2)
    own = nn.ModuleList([cut[each] for each in numbers])
    if sharded:
        for module in own:
            fully_shard(module, mesh=init_device_mesh("cpu", (4, 1), mesh_dim_names=("all", "alone"))["alone"])
    optimizer = adamw(own)
    replica = here.replicate(own, optimizer, mesh=mesh["replicate"], synchronize=synchronize)
    group = mesh["pipe"].get_group()
    places = [PipelineStage(cut[each], each, 4, torch.device("cpu"), group=group) for each in numbers]
    schedule = kind(places, 4, loss_fn=loss_of)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = batch(step, who, 4)
        schedule.step(*([words] if number == 0 else []), **({"target": words} if number == 1 else {}))
        optimizer.step()
    assert replica.step == STEPS
    one = alone(2, STEPS, size=4)
    other = nn.ModuleList([one.words, one.blocks[0], one.blocks[1], nn.Sequential(one.norm, one.head)])
    difference = float((flat(own) - flat(nn.ModuleList([other[each] for each in numbers]))).abs().max())
    assert difference < 1e-9, difference


def interleaved(here: Here) -> None:
    stages(here, ScheduleInterleaved1F1B)


def interleaved_and_exchanged_in_the_last_pass(here: Here) -> None:
    """Each stage has a backward pass for each of four micro-batches."""
    stages(here, ScheduleInterleaved1F1B, synchronize=8)


def zero_bubble(here: Here) -> None:
    """Its gradients of weights are written without hooks."""
    stages(here, ScheduleInterleavedZeroBubble)


def zero_bubble_with_a_number_of_passes(here: Here) -> None:
    """What comes without hooks is no pass, and is exchanged when the step begins."""
    stages(here, ScheduleInterleavedZeroBubble, synchronize=8)


def stages_of_fsdp(here: Here) -> None:
    stages(here, ScheduleInterleaved1F1B, sharded=True)


def gossip_between_stages(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipe"))
    number, who = mesh.get_local_rank("pipe"), mesh.get_local_rank("replicate")
    model = stage_of(transformer(), number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = here.replicate(model, optimizer, Gossip(), mesh=mesh["replicate"])
    place = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    schedule = ScheduleGPipe(place, 4, loss_fn=loss_of)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = batch(step, who, 4)
        schedule.step(*([words] if number == 0 else []), **({"target": words} if number == 1 else {}))
        before = replica.metrics()["messages_sent"]
        optimizer.step()
        replica.wait_for_exchanges()
        assert replica.metrics()["messages_sent"] - before == 1, "one message to the partner in each step"
    assert replica.step == STEPS
    with replica.consensus():
        every = of_all(flat(model))
    assert torch.equal(every[0], every[2])
    assert torch.equal(every[1], every[3])


def metrics_of_a_part(here: Here) -> None:
    """A replica counts what this rank holds and sends."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = transformer()
    fsdp(model, mesh)
    optimizer = adamw(model)
    replica = here.replicate(model, optimizer, AllReduce(gather_below=0), mesh=mesh["replicate"])
    for step in range(3):
        optimizer.zero_grad()
        words = batch(step, here.rank)
        loss_of(model(words), words).backward()
        optimizer.step()
    held = sum(parameter.to_local().nbytes for parameter in model.parameters())
    assert 1 <= replica.metrics()["bytes_sent_last_step"] / held < 1.1, "an all-reduce of two ranks sends what it reduces"
