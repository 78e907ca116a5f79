"""Shim: torch's own tests of DDP on CPUs, under DDP itself or under gossamer's class in its place.

Imported in every process of a test. ``JUDGE`` in the environment says which of the two: ``ddp`` or ``gossamer``.
"""

import os
import tempfile
from contextlib import nullcontext
from typing import Any

os.environ.setdefault("BACKEND", "gloo")
os.environ.setdefault("WORLD_SIZE", "2")
os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "90")
if "TEMP_DIR" not in os.environ:
    os.environ["TEMP_DIR"] = tempfile.mkdtemp(prefix="judge-")

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

TORCH = nn.parallel.DistributedDataParallel


def _mapped(value: Any) -> Any:
    """A device of a GPU, in any form, as the CPU."""
    if isinstance(value, torch.device) and value.type != "meta":
        return torch.device("cpu")
    if isinstance(value, str) and value.split(":")[0] == "cuda":
        return "cpu"
    return value


class OnCPU(TorchFunctionMode):
    """Everything that is made on a GPU, or moved to one, is on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            device = kwargs["device"]
            kwargs["device"] = "cpu" if isinstance(device, int) and not isinstance(device, bool) else _mapped(device)
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
            args = (args[0], "cpu", *args[2:])
        return func(*map(_mapped, args), **kwargs)


class Standing(torch.optim.SGD):
    """Stands where gossamer wants the optimizer: torch's tests make theirs after the model is wrapped, and step that."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__([{"params": [p for p in module.parameters() if p.requires_grad]}], lr=0.0)


class OnlyModule(TORCH):
    """DDP itself, without the devices."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
        super().__init__(module, **options)


def gossamers() -> type[nn.Module]:
    """gossamer's class, called as DDP is."""
    import gossamer

    class Judged(gossamer.DistributedDataParallel):
        def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any) -> None:
            super().__init__(module, Standing(module), timeout=60.0, **options)

    Judged.__name__ = Judged.__qualname__ = "DistributedDataParallel"
    globals()[Judged.__name__] = Judged  # where pickle looks for it
    return Judged


class _Nothing:
    """A stream or an event of a device that there is not."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def on_cpu() -> None:
    """Make the processes that import this one see as many GPUs as there are ranks, all of which are the CPU."""
    import torch.testing._internal.common_distributed as common

    common.TEST_CUDA = True
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: int(os.environ["WORLD_SIZE"])  # type: ignore[assignment]
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "init", "_lazy_init"):
        setattr(torch.cuda, name, lambda *args, **kwargs: None)
    torch.cuda.current_device = lambda: 0  # type: ignore[assignment]
    torch.cuda.device = lambda *args: nullcontext()  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda *args: nullcontext()  # type: ignore[assignment]
    torch.cuda.Stream = torch.cuda.Event = _Nothing  # type: ignore[assignment,misc]
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _Nothing()  # type: ignore[assignment]
    to = nn.Module.to

    def moved(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        places = ["cpu" if isinstance(each, int) and not isinstance(each, bool) else _mapped(each) for each in args]
        return to(self, *places, **{name: _mapped(each) for name, each in kwargs.items()})

    nn.Module.to = moved  # type: ignore[method-assign,assignment]
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign,assignment,misc]
    OnCPU().__enter__()


def replace() -> None:
    """Put the judged class where torch's tests look for DDP."""
    ours = gossamers() if os.environ.get("JUDGE") == "gossamer" else OnlyModule
    nn.parallel.DistributedDataParallel = ours  # type: ignore[misc,assignment]
    from torch.testing._internal.distributed import distributed_test

    distributed_test.DistributedDataParallel = ours  # type: ignore[attr-defined]
