"""DistributedDataParallel: a replicated model in the form that scripts and frameworks for PyTorch's DDP expect."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.connect import default_group
from gossamer.engine.arguments import Synchronize
from gossamer.engine.module_buffers import Buffers
from gossamer.errors import ConfigurationError, UsageError
from gossamer.replica import Replica
from gossamer.replicate import replicate

_DDP = nn.parallel.DistributedDataParallel

_BROADCAST_BYTES = 250 << 20
"""``broadcast_bucket_size`` of DDP, which scripts pass on."""

_DELAYED = "overlap_forward=True lets gradients travel in the next forward pass, and ignore= leaves parameters to each rank"

_OTHERS: Mapping[str, str] = dict.fromkeys(
    (
        "dim",
        "init_sync",
        "bucket_cap_mb",
        "bucket_cap_mb_list",
        "batched_grad_copy",
        "check_reduction",
        "skip_all_reduce_unused_params",
    ),
    "",
) | {
    "mixed_precision": "compute under torch.autocast, and send 16 bits with AllReduce(wire='bf16')",
    "delay_all_reduce_named_params": _DELAYED,
    "param_to_hook_all_reduce": _DELAYED,
}
"""Arguments of DDP that are taken and of no effect; or why they are refused."""


class DistributedDataParallel(_DDP):
    """``torch.nn.parallel.DistributedDataParallel`` whose exchange is a gossamer algorithm's.

    An instance of torch's class without its reducer: ``module``, ``no_sync()``, ``require_backward_grad_sync``, ``join()`` and
    the ``module.`` before every key of the state are as there, so that ``isinstance`` checks of scripts and frameworks
    find what they look for. A script changes in one line::

        model = gossamer.DistributedDataParallel(model, optimizer, gossamer.Gossip(), device_ids=[local_rank])

    Args:
        module: the bare model, as for :func:`gossamer.replicate`, which this calls.
        optimizer: the optimizer, or several.
        algorithm: the relaxation; exact :class:`AllReduce` by default.
        device_ids: the one device to which inputs are moved; on a CPU none.
        output_device: as for DDP: the same device.
        process_group: ``group`` of :func:`gossamer.replicate`.
        device_mesh: ``mesh`` of :func:`gossamer.replicate`.
        broadcast_buffers: True is ``buffers="broadcast"``, False ``buffers="local"``; None leaves the choice to ``buffers``.
        find_unused_parameters: of no effect, as the next two: unused parameters are always found.
        gradient_as_bucket_view: gradients are always views of buckets.
        static_graph: any graph may change.
        forward_sync_buffers: torch's newer name of ``broadcast_buffers``.
        buffers: as for :func:`gossamer.replicate`, as the following ones.
        scaler: for a ``GradScaler`` that skips steps.
        timeout: of an exchange.
        overlap_forward: exchange gradients during the next forward pass too.
        ignore: what is left to each rank.
        synchronize: exchange gradients in backward passes, in every n-th one, or in steps.
        others: DDP's other arguments. Of no effect are ``bucket_cap_mb``, ``bucket_cap_mb_list`` and ``batched_grad_copy`` (the
            algorithm chooses its buckets: ``AllReduce(bucket_bytes=…)``), ``init_sync``, ``dim``, ``check_reduction`` and
            ``skip_all_reduce_unused_params``. Refused are ``mixed_precision`` and delayed parameters.

    A copy or a pickle of it trains alone, and its ``replica`` is None.

    Raises:
        ConfigurationError: arguments that cannot work, with the reason.
        DisagreementError: on every rank, if ranks differ in version, algorithm, model or options.
        TypeError: an argument that DDP has not, either.
    """

    replica: Replica | None
    """The handle: ``consensus()``, ``metrics()``, ``state_dict()`` of what the algorithm keeps, ``close(average=True)`` …"""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        algorithm: Algorithm | None = None,
        *,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        process_group: Any = None,
        device_mesh: Any = None,
        broadcast_buffers: bool | None = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        forward_sync_buffers: bool | None = None,
        buffers: Buffers | None = None,
        scaler: Any = None,
        timeout: float | timedelta | None = None,
        overlap_forward: bool = False,
        ignore: Sequence[str | nn.Module] = (),
        synchronize: Synchronize | None = None,
        **others: Any,
    ) -> None:
        nn.Module.__init__(self)  # not DDP's own, which makes the reducer
        super(nn.Module, self).__init__()  # Joinable's
        _check_others(others)
        self.device_ids: list[Any] | None = _one_device(device_ids, output_device, module)
        self.output_device: Any = None if self.device_ids is None else self.device_ids[0]
        self.dim: int = 0
        self.mixed_precision: Any = None
        self.logger: Any = None
        self._group: Any = process_group
        self.device_mesh: Any = device_mesh
        self.broadcast_bucket_size = _BROADCAST_BYTES
        self.find_unused_parameters: bool = find_unused_parameters
        self.gradient_as_bucket_view: bool = gradient_as_bucket_view
        self.static_graph: bool = static_graph
        self.use_side_stream_for_tensor_copies = True
        self.require_forward_param_sync = True
        self._synchronises = True
        self.module = module
        self.replica = replicate(
            module,
            optimizer,
            algorithm,
            group=process_group,
            mesh=device_mesh,
            scaler=scaler,
            buffers=_buffers(broadcast_buffers if forward_sync_buffers is None else forward_sync_buffers, buffers),
            timeout=timeout,
            overlap_forward=overlap_forward,
            ignore=ignore,
            synchronize=synchronize,
        )
        first = next(p for p in module.parameters() if p.requires_grad)
        self.device: torch.device = first.device
        self.device_type: str = first.device.type
        self.parameters_to_ignore: set[str] = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self.broadcast_buffers: bool = self.replica._parts.buffers == "broadcast"
        self.forward_sync_buffers: bool = self.broadcast_buffers

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if torch.is_grad_enabled():
            # As in DDP, the forward pass decides whether its backward pass is synchronised, wherever that one runs.
            self.module.require_backward_grad_sync = self._synchronises
        if self.device_ids is not None:
            moved, named = self.to_kwargs(inputs, kwargs, self.device_ids[0])  # type: ignore[no-untyped-call]
            inputs, kwargs = moved[0], named[0]
        return self.module(*inputs, **kwargs)

    @property
    def process_group(self) -> Any:  # type: ignore[override]  # looked up, not held: its owner may destroy it
        """The process group of the replicas: the given one, the mesh's, or the default one; None where there is none."""
        if self._group is not None:
            return self._group
        return default_group() if self.device_mesh is None else self.device_mesh.get_group()

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the backward pass of the next forward pass is synchronised."""
        return self._synchronises

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._synchronises = value

    def synchronize_next_backward(self) -> None:
        """Synchronise the next backward pass, though its forward pass ran inside :meth:`no_sync`.

        Accelerate's ``trigger_sync_in_backward`` does it with DDP's reducer.
        """
        self.module.require_backward_grad_sync = True

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Train inside when ranks may have different numbers of batches: see :meth:`gossamer.Replica.join`."""
        self._join_config = self._join_config._replace(enable=enable)
        if self.replica is None or not enable:
            return nullcontext()
        return self.replica.join(
            divide_by_initial_world_size=divide_by_initial_world_size, throw_on_early_termination=throw_on_early_termination
        )

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refused: torch's ``Join`` context mirrors the collectives of a reducer."""
        raise UsageError("torch's Join context cannot mirror the exchanges of gossamer: use `with model.join():`")

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> NoReturn:
        """Refused: an algorithm takes the place of communication hooks."""
        raise _no_hooks()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> NoReturn:
        raise _no_hooks()

    def _register_buffer_comm_hook(self, state: Any, hook: Any, comm_hook_location: Any = None) -> NoReturn:
        raise UsageError("hooks for buffers have no counterpart: choose buffers='broadcast', 'average' or 'local'")

    def _register_fused_optim(self, optim: Any, *args: Any, optim_params: Any = None, **kwargs: Any) -> NoReturn:
        raise UsageError(
            "an optimizer inside of communication hooks has no counterpart: overlap_forward=True lets parameters be updated "
            "module by module in the next forward pass"
        )

    def _remove_autograd_hooks(self) -> None:
        """Leave the model to another wrapper: as :meth:`gossamer.Replica.close` without an average."""
        if self.replica is not None:
            self.replica.close()

    def _set_static_graph(self) -> None:
        self.static_graph = True

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {} if self.replica is None else dict(self.replica.metrics())

    def __getattr__(self, name: str) -> Any:
        if name == "reducer":
            raise AttributeError("gossamer.DistributedDataParallel has no reducer: gossamer exchanges what that one would")
        return super().__getattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "replica": None, "_group": None, "device_mesh": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)


def _check_others(others: Mapping[str, Any]) -> None:
    """Raise for arguments of DDP that have no counterpart, and for what is no argument of DDP."""
    for name, value in others.items():
        if name not in _OTHERS:
            raise TypeError(f"DistributedDataParallel.__init__() got an unexpected keyword argument {name!r}")
        if _OTHERS[name] and value is not None:
            raise ConfigurationError(f"{name} has no counterpart: {_OTHERS[name]}")


def _one_device(
    device_ids: Sequence[int | torch.device] | None, output_device: int | torch.device | None, module: nn.Module
) -> list[int] | None:
    """The device to which inputs are moved, in a list, as DDP keeps it."""
    if not device_ids and output_device is None:
        return None
    kinds = {p.device.type for p in module.parameters()}
    if "cpu" in kinds or device_ids is None or len(device_ids) != 1 or output_device not in (None, *device_ids):
        raise ConfigurationError(
            f"device_ids takes the one device of the model, and output_device the same one; on a CPU neither; got device_ids="
            f"{device_ids}, output_device={output_device}, and parameters on {', '.join(sorted(kinds))}"
        )
    only = device_ids[0]
    index = only.index if isinstance(only, torch.device) else only
    return [torch.accelerator.current_device_index() if index is None else index]


def _buffers(broadcast: bool | None, buffers: Buffers | None) -> Buffers | None:
    if broadcast is None:
        return buffers
    asked: Buffers = "broadcast" if broadcast else "local"
    if buffers not in (None, asked):
        raise ConfigurationError(
            f"broadcast_buffers={broadcast} (or forward_sync_buffers) and buffers={buffers!r} ask for different things"
        )
    return asked


def _no_hooks() -> UsageError:
    return UsageError(
        "communication hooks have no counterpart: an algorithm takes their place (AllReduce(wire='bf16') sends 16 bits, "
        "ScatterReduce() 8 bits, PowerSGD() low rank …)"
    )
