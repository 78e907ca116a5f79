"""Builtin: what PyTorch has itself."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gossamer.bench.peers.base import BASELINE, LOCAL_STEPS, Joined, Peer


def _compute(model: nn.Module, optimizer: Optimizer) -> Joined:
    return Joined(model, optimizer)


def _ddp(model: nn.Module, optimizer: Optimizer) -> Joined:
    """With its defaults: buckets of 25 MiB, the first of 1 MiB."""
    return Joined(DistributedDataParallel(model), optimizer)


def _fp16(model: nn.Module, optimizer: Optimizer) -> Joined:
    """DDP's own hook: gradients in fp16 on the wire, in DDP's buckets."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    return Joined(wrapped, optimizer)


def _power_sgd(model: nn.Module, optimizer: Optimizer) -> Joined:
    """Rank 2, error feedback and warm start, from the third step on; on Gloo all gradients in one bucket."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    # On Gloo the hook is right only with all gradients in one bucket.
    state: Any = PowerSGDState(process_group=None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    wrapped = DistributedDataParallel(model, bucket_cap_mb=10_000 if dist.get_backend() == "gloo" else None)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return Joined(wrapped, optimizer)


def _post_local_sgd(model: nn.Module, optimizer: Optimizer) -> Joined:
    """Two steps of DDP, then weights averaged every ``LOCAL_STEPS`` steps and nothing in between."""
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    state: Any = PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager: Any = PeriodicModelAverager(period=LOCAL_STEPS, warmup_steps=2)
    return Joined(wrapped, PostLocalSGDOptimizer(optimizer, averager))


PEERS = {
    BASELINE: Peer("no communication", _compute, 0.0),
    "ddp": Peer("PyTorch DistributedDataParallel", _ddp, 1.0),
    "ddp-again": Peer("the same beside itself: the noise", _ddp, 1.0),
    "ddp-fp16": Peer("DDP with its fp16 hook", _fp16, 0.5),
    "ddp-powersgd": Peer("DDP with its PowerSGD hook, rank 2, on Gloo one bucket", _power_sgd, None),
    "post-localsgd": Peer("DDP's post-localSGD", _post_local_sgd, 1 / LOCAL_STEPS, period=LOCAL_STEPS, when="after"),
}
