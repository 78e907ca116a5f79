"""Script: what a training script of the user's trains, with its own loop, seen in its first step.

The script runs as one process of a world of one, without a network, until an optimizer of it has taken a step. Which module was
called, on what, how often before that step, and which optimizer it was, is all that a prediction needs.
"""

import contextlib
import copy
import gc
import os
import runpy
import sys
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.modules import module as modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as optimizers
from torch.utils._pytree import tree_map

from gossamer.distributed_data_parallel import DistributedDataParallel as OwnDistributedDataParallel
from gossamer.errors import ConfigurationError

ALONE: Mapping[str, str] = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What torchrun tells a process that is alone."""


@dataclass(frozen=True)
class Step:
    """A step of a script: its ``model``, on ``meta``, what it was called with in the last of so many ``passes``, and the
    ``optimizer``."""

    model: nn.Module
    inputs: tuple[Any, ...]
    named: dict[str, Any]
    passes: int
    optimizer: Optimizer


class _Taken(BaseException):
    """The first step has been taken. No ``except Exception`` of a script catches it."""


@dataclass
class _Seen:
    """Calls of modules that no other module makes, and the optimizer that stepped."""

    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)
    optimizer: Optimizer | None = None
    depth: int = 0

    def begin(self, *_: Any) -> None:
        """A module is called."""
        self.depth += 1

    def end(self, called: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> None:
        """A call has ended."""
        self.depth -= 1
        if self.depth == 0 and torch.is_grad_enabled() and any(each.requires_grad for each in called.parameters()):
            self.calls.append((called, args, kwargs))

    def stepped(self, optimizer: Optimizer, *_: Any) -> None:
        """An optimizer has taken a step."""
        if self.calls:
            self.optimizer = optimizer
            raise _Taken


def first_step(path: Path, arguments: Sequence[str] = ()) -> Step:
    """Run a script until its first step. What it prints goes to stderr.

    Raises:
        ConfigurationError: it raised something, or ended, before a step; or its step is not one of one model.
    """
    sys.stderr.write(f"running {path} until its first step\n")
    with _alone(path, arguments):
        return _run(path)


def _run(path: Path) -> Step:
    seen = _Seen()
    try:
        with _watching(seen), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
        raise ConfigurationError(f"{path} ended before an optimizer of it took a step with gradients of a module's call")
    except _Taken:
        pass
    except ConfigurationError:
        raise
    except SystemExit as error:
        raise ConfigurationError(f"{path} exited before its first step, with {error.code!r}") from None
    except Exception as error:
        places = [each for each in traceback.extract_tb(error.__traceback__) if each.filename == str(path)]
        line = f", line {places[-1].lineno}" if places else ""
        raise ConfigurationError(
            f"{path}{line}: {type(error).__name__}: {error} (before its first step; it runs alone, on this machine: what it "
            "needs must be there, or give --model a file with build_model and random_batch)"
        ) from None
    return _step_of(seen, path)


@contextlib.contextmanager
def _alone(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    """Inside, this process looks to a script like one that torchrun has started alone."""
    real, was_there = dist.init_process_group, dist.is_initialized()

    def init_process_group(*_: Any, **__: Any) -> None:
        real("gloo", store=HashStore(), rank=0, world_size=1)

    folder = str(path.resolve().parent)
    with (
        torch.compiler.set_stance("force_eager"),
        patch.dict(os.environ, ALONE),
        patch.object(sys, "argv", [str(path), *arguments]),
        patch.object(sys, "path", [folder, *sys.path]),
        patch.object(dist, "init_process_group", init_process_group),
    ):
        try:
            yield
        except BaseException as error:
            for each in filter(None, (error, error.__context__)):
                traceback.clear_frames(each.__traceback__)  # they hold what the script made
            raise
        finally:
            gc.collect()  # torch's DDP may wait forever for a group that is destroyed before it
            if dist.is_initialized() and not was_there:
                dist.destroy_process_group()


@contextlib.contextmanager
def _watching(seen: _Seen) -> Iterator[None]:
    """Inside, every call of a module and every step is seen."""
    handles: list[Any] = [
        modules.register_module_forward_pre_hook(seen.begin),
        modules.register_module_forward_hook(seen.end, with_kwargs=True, always_call=True),
        optimizers.register_optimizer_step_post_hook(seen.stepped),
    ]
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*global hooks on modules")  # of torch.compile, under whose hooks calls nest
            yield
    finally:
        for handle in handles:
            handle.remove()


def _step_of(seen: _Seen, path: Path) -> Step:
    assert seen.optimizer is not None
    stepped = {id(each) for group in seen.optimizer.param_groups for each in group["params"]}
    calls = [(_inner(called), args, kwargs) for called, args, kwargs in seen.calls]
    own = [call for call in calls if any(id(each) in stepped for each in call[0].parameters())]
    models = list({id(model): model for model, _, _ in own}.values())
    if len(models) != 1:
        names = ", ".join(type(model).__name__ for model in models) or "none"
        raise ConfigurationError(
            f"{path}: a step is predicted of one model, and {len(models)} with parameters of the optimizer that stepped first "
            f"were called ({names}): give --model a file with build_model and random_batch"
        )
    model, args, kwargs = own[-1]
    return Step(_on_meta(model), tree_map(_blank, args), tree_map(_blank, kwargs), len(own), seen.optimizer)


def _inner(called: nn.Module) -> nn.Module:
    """The module that a wrapper (of torch.compile, DDP, or gossamer's in its place) holds."""
    if isinstance(compiled := getattr(called, "_orig_mod", None), nn.Module):
        return _inner(compiled)
    if isinstance(called, DistributedDataParallel | nn.DataParallel | OwnDistributedDataParallel):
        return _inner(called.module)
    return called


def _on_meta(model: nn.Module) -> nn.Module:
    """The same without values."""
    tensors = [*model.parameters(), *model.buffers()]
    blank = {id(each): _blank(each.detach()) for each in tensors}
    memo: dict[int, Any] = {
        id(each): nn.Parameter(blank[id(each)], each.requires_grad) if isinstance(each, nn.Parameter) else blank[id(each)]
        for each in tensors
    }
    return copy.deepcopy(model, memo)


def _blank(value: Any) -> Any:
    return torch.empty_like(value, device="meta", requires_grad=False) if isinstance(value, Tensor) else value
