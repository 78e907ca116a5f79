"""Task: a model and its batch on a device, which is what is trained, whatever the cluster and the method."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gossamer.errors import ConfigurationError
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.counted import Counted, count_step
from gossamer.simulate.devices import DEVICES, GIB, UTILISATION, find_device, throughput
from gossamer.simulate.profile import Compute
from gossamer.simulate.stand_in import leave_to_torch
from gossamer.simulate.valueless import Valueless

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Task:
    """``model`` lies on ``meta``. ``batch``: samples of one device in a step; ``optimizer``: makes it from parameters."""

    name: str
    model: nn.Module
    counted: Counted
    batch: int
    samples: str
    optimizer: Callable[..., Optimizer]

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients."""
        return sum(p.nbytes for p in self.model.parameters() if p.requires_grad)

    def optimizer_bytes(self) -> int:
        """Bytes of what the optimizer keeps after its first step."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = self.optimizer(parameters)
        leave_to_torch(optimizer)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        with Valueless():
            optimizer.step()
        self.model.zero_grad()
        kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        return sum(tensor.nbytes for tensor in kept)

    def memory(self) -> dict[str, float]:
        """Bytes that training takes on a device, by what they are for."""
        return {
            "weights and gradients": float(2 * self.gradient_bytes),
            "optimizer": float(self.optimizer_bytes()),
            "activations": float(self.counted.saved),
        }

    def check_fits(self, device: str) -> None:
        """ConfigurationError if it does not fit into the memory of a device that is known."""
        if device not in DEVICES:
            return
        needed, there = self.memory(), find_device(device).memory
        if sum(needed.values()) > there:
            parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in needed.items())
            total = sum(needed.values()) / GIB
            raise ConfigurationError(
                f"{self.name} with {self.batch} {self.samples} per device takes {total:.1f} GiB ({parts}), and a {device} has "
                f"{there / GIB:.0f}: take a smaller --batch, --dtype bf16, or another device"
            )

    def compute(self, seconds: float | None, device: str, format: str, utilisation: float = UTILISATION) -> Compute:
        """What a step computes: so many ``seconds``, or an estimate from what the device is stated to reach."""
        if seconds is not None:
            return self.counted.compute(seconds)
        step = self.counted.total / throughput(device, format, utilisation)
        moved = 3 * self.gradient_bytes + 2 * self.optimizer_bytes()
        return self.counted.compute(step, optimizer=moved / find_device(device).memory_rate)


def task_of(
    name: str, model: nn.Module, inputs: Any, loss: Callable[[Any], Tensor], *, batch: int, samples: str,
    optimizer: Callable[..., Optimizer],
) -> Task:  # fmt: skip
    """A task, once one step of it has been counted."""
    counted = count_step(model, inputs if isinstance(inputs, tuple) else (inputs,), loss)
    return Task(name=name, model=model, counted=counted, batch=batch, samples=samples, optimizer=optimizer)


def device_of(cluster: Cluster, compute_seconds: float | None) -> str:
    """The device of a cluster's machines. ConfigurationError if one is needed and none is named."""
    if not cluster.machines.device and compute_seconds is None:
        raise ConfigurationError(
            f"{cluster.name} does not say what device its machines have: say how long a step computes (--compute 0.3s), or add "
            f"device to its [machines], one of {', '.join(DEVICES)}"
        )
    return cluster.machines.device


def on_meta(dtype: torch.dtype) -> Callable[[Any], Any]:
    """What takes a tensor of a batch to ``meta``, and leaves anything else."""

    def moved(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to("meta", dtype) if value.is_floating_point() else value.to("meta")

    return moved


def length_of(inputs: Any) -> int:
    """Samples of a batch."""
    first = tree_leaves(inputs)[0]
    return int(first.shape[0]) if first.ndim else 1
