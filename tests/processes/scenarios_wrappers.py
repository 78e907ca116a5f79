"""Scenarios: a replicated model that something else wraps as well, and the class in DDP's form. Two ranks."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable_replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Optimizer

import gossamer
from gossamer import Algorithm, AllReduce, Gossip, UsageError
from processes.twins import assert_same_on_all_ranks, difference
from processes.worker import Here
from processes.workloads import generator

WAY_OUT = "gossamer.DistributedDataParallel(model, optimizer, algorithm)"


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2)).double()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def batch(here: Here, step: int) -> Tensor:
    return torch.randn(4, 6, generator=generator(here.rank, step), dtype=torch.float64)


def refused(call: Callable[[], Any]) -> str:
    """What the error says, on this rank."""
    try:
        call()
    except UsageError as error:
        return str(error)
    raise AssertionError("two exchanges of one gradient were not noticed")


def ddp_around_a_replicated_model(here: Here) -> None:
    """A framework wraps the model after ``replicate()``: refused in the first forward pass, whatever is exchanged."""
    for algorithm in (AllReduce(), Gossip(), gossamer.after(2, AllReduce(), before=Gossip())):
        model = net()
        here.replicate(model, sgd(model), algorithm)
        wrapped = DistributedDataParallel(model)
        said = refused(lambda wrapped=wrapped: wrapped(batch(here, 0)))
        assert f"rank {here.rank}: " in said
        assert "gradient of '0.weight' as well" in said
        assert WAY_OUT in said
        here.close()


def the_module_of_a_ddp_that_is_still_called(here: Here) -> None:
    """A callback replicates ``ddp.module`` and the loop goes on calling ``ddp``; also where only a part is replicated."""
    whole = nn.Sequential(net(), nn.Linear(2, 2).double())
    wrapped = DistributedDataParallel(whole)
    here.replicate(whole[0], sgd(whole[0]), AllReduce())
    assert WAY_OUT in refused(lambda: wrapped(batch(here, 0)))


def the_composable_replicate_of_torch(here: Here) -> None:
    """Before and after ours: it wraps no module and has hooks instead."""
    model = net()
    composable_replicate(model)
    here.replicate(model, sgd(model), AllReduce())
    assert "as well" in refused(lambda: model(batch(here, 0)))
    here.close()
    model = net()
    here.replicate(model, sgd(model), AllReduce())
    composable_replicate(model)
    assert "as well" in refused(lambda: model(batch(here, 0)))


def a_compiled_model_inside_ddp(here: Here) -> None:
    model = nn.Sequential(nn.Linear(6, 2)).double()
    here.replicate(model, sgd(model), AllReduce())
    wrapped = DistributedDataParallel(torch.compile(model, backend="eager"))
    assert WAY_OUT in refused(lambda: wrapped(batch(here, 0)))


class DeepSpeedEngine(nn.Module):
    """In the part of DeepSpeed's, of whose forward pass torch knows nothing."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any) -> Any:
        return self.module(*inputs)


def wrappers_that_torch_does_not_know_of(here: Here) -> None:
    model = net()
    here.replicate(model, sgd(model), Gossip())
    assert "DeepSpeedEngine" in refused(lambda: DeepSpeedEngine(model)(batch(here, 0)))


def fsdp1_around_a_replicated_model(here: Here) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = nn.Sequential(nn.Linear(6, 2)).double()
    here.replicate(model, sgd(model), AllReduce())
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    assert "FSDP1" in refused(lambda: wrapped(batch(here, 0)))


def what_does_not_communicate_is_not_refused(here: Here) -> None:
    """DDP's forward pass without gradients, or while its own exchange is off, or among other ranks than ours."""
    model = net()
    replica = here.replicate(model, sgd(model), AllReduce())
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():
        wrapped(batch(here, 0))
    with wrapped.no_sync():
        wrapped(batch(here, 0)).sum().backward()
    assert replica.step == 1
    here.close()
    model = net()
    optimizer = sgd(model)
    groups = [dist.new_group([rank]) for rank in range(here.world)]
    wrapped = DistributedDataParallel(model, process_group=groups[here.rank])
    here.replicate(model, optimizer, Gossip())
    for step in range(3):
        optimizer.zero_grad()
        wrapped(batch(here, step)).square().mean().backward()
        optimizer.step()


# -- the class in DDP's form --------------------------------------------------------------------------------------


def wrap(here: Here, model: nn.Module, optimizer: Any, algorithm: Algorithm | None, **options: Any) -> Any:
    wrapped = gossamer.DistributedDataParallel(model, optimizer, algorithm, timeout=30.0, **options)
    here.replicas.append(wrapped.replica)
    return wrapped


def twins(here: Here, train: Callable[[Any, Optimizer], None], make: Callable[[], nn.Module] = net) -> float:
    """Train with DDP and with gossamer's class; how far they are apart (in buffers, which DDP leaves unequal, on rank 0)."""
    ends = []
    for ours in (False, True):
        model = make()
        optimizer = sgd(model)
        train(wrap(here, model, optimizer, None) if ours else DistributedDataParallel(model), optimizer)
        ends.append(model)
    assert_same_on_all_ranks(here, ends[1])
    assert difference(ends[0], make()) > 1e-6
    pairs = zip(ends[0].parameters(), ends[1].parameters(), strict=True)
    apart = difference(*ends) if here.rank == 0 else max((one - other).abs().max().item() for one, other in pairs)
    assert apart < 1e-10, apart
    return apart


def the_class_trains_as_ddp_does(here: Here) -> float:
    """Accumulation by ``no_sync()`` and by the attribute, clipping, an evaluation in between."""

    def train(model: Any, optimizer: Optimizer) -> None:
        for step in range(6):
            optimizer.zero_grad()
            if step % 2:
                with model.no_sync():
                    model(batch(here, 100 + step)).square().mean().backward()
            else:
                model.require_backward_grad_sync = False
                model(batch(here, 100 + step)).square().mean().backward()
                model.require_backward_grad_sync = True
            model(batch(here, step)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            model.eval()
            with torch.no_grad():
                model(batch(here, 200 + step))
            assert model.train() is model

    return twins(here, train)


def the_class_joins_uneven_data(here: Here) -> float:
    def train(model: Any, optimizer: Optimizer) -> None:
        with model.join():
            for step in range(3 + 2 * here.rank):
                optimizer.zero_grad()
                model(batch(here, step)).square().mean().backward()
                optimizer.step()

    return twins(here, train, plain)


def plain() -> nn.Module:
    torch.manual_seed(4)
    return nn.Linear(6, 2).double()


def the_class_compiles(here: Here) -> float:
    """Compiled from outside, as a whole."""

    def train(model: Any, optimizer: Optimizer) -> None:
        compiled = torch.compile(model, backend="eager")
        for step in range(4):
            optimizer.zero_grad()
            compiled(batch(here, step)).square().mean().backward()
            optimizer.step()

    return twins(here, train)
