"""Wrapped: libraries that take the training loop in their hands: Accelerate, DeepSpeed."""

import os
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.bench.peers.base import Joined, Peer, from_extra


def _accelerate(model: nn.Module, optimizer: Optimizer) -> Joined:
    """``Accelerator.prepare`` and ``Accelerator.backward`` with their defaults: DDP underneath."""
    from accelerate import Accelerator

    made = Accelerator(cpu=_device(model) == "cpu")
    wrapped, stepped = made.prepare(model, optimizer)
    return Joined(wrapped, stepped, backward=made.backward, close=made.free_memory)


def _deepspeed(wire: str) -> Callable[[nn.Module, Optimizer], Joined]:
    """The plain engine (ZeRO stage 0): after backward, all gradients in one bucket, in ``wire`` precision."""
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 0}, "steps_per_print": 1_000_000_000}
    config["communication_data_type"] = wire

    def join(model: nn.Module, optimizer: Optimizer) -> Joined:
        os.environ.setdefault("DS_ACCELERATOR", _device(model))  # where the model is, whatever else the machine has
        import deepspeed

        # Its way past the network, between ranks on one machine, for inference; it would be compiled first, for a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine: Any = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
        return Joined(engine, engine, backward=engine.backward, close=engine.destroy)

    return join


def _device(model: nn.Module) -> str:
    return next(model.parameters()).device.type


PEERS = {
    "accelerate": Peer(
        "Hugging Face Accelerate: DDP underneath", _accelerate, 1.0, module="accelerate", get=from_extra("accelerate")
    ),
    "deepspeed": Peer("DeepSpeed's plain engine", _deepspeed("fp32"), 1.0, module="deepspeed", get=from_extra("deepspeed")),
    "deepspeed-fp16": Peer(
        "the same, gradients in fp16", _deepspeed("fp16"), 0.5, module="deepspeed", get=from_extra("deepspeed")
    ),
}
