"""Peers: what else a user of PyTorch could take, as sides of a comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

Joined = tuple[nn.Module, Optimizer]
"""What to train, and the optimizer to step."""

LOCAL_STEPS = 8
"""Steps between two averages of post-localSGD."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One of them. ``payload``: bytes per step relative to an exact ring all-reduce of the gradients; None if unknown.

    ``period``: after how many steps what travels repeats itself.
    """

    what: str
    join: Callable[[nn.Module, Optimizer], Joined]
    payload: float | None
    period: int = 1


def _compute(model: nn.Module, optimizer: Optimizer) -> Joined:
    return model, optimizer


def _ddp(model: nn.Module, optimizer: Optimizer) -> Joined:
    return DistributedDataParallel(model), optimizer


def _fp16(model: nn.Module, optimizer: Optimizer) -> Joined:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return wrapped, optimizer


def _power_sgd(model: nn.Module, optimizer: Optimizer) -> Joined:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    # On Gloo the hook is right only with all gradients in one bucket.
    state: Any = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=10_000)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return wrapped, optimizer


def _post_local_sgd(model: nn.Module, optimizer: Optimizer) -> Joined:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state: Any = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager: Any = PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=2)
    return wrapped, PostLocalSGDOptimizer(optimizer, averager)


PEERS = {
    "compute": Peer("no communication", _compute, 0.0),
    "ddp": Peer("PyTorch DistributedDataParallel", _ddp, 1.0),
    "ddp-again": Peer("the same beside itself: the noise", _ddp, 1.0),
    "ddp-fp16": Peer("DDP with its fp16 hook", _fp16, 0.5),
    "ddp-powersgd": Peer("DDP with its PowerSGD hook, rank 2, one bucket", _power_sgd, None),
    "post-localsgd": Peer("DDP's post-localSGD", _post_local_sgd, 1 / LOCAL_STEPS, period=LOCAL_STEPS),
}
