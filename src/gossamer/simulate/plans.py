"""Plans: the buckets that a replica of a model has, in the order in which it launches them; and what it sends before them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from gossamer.algorithms.base import Algorithm, Subject
from gossamer.buckets import Plan, make_plan
from gossamer.comm.ops import Flow, all_reduce, broadcast
from gossamer.memory import wide
from gossamer.pieces import cut
from gossamer.simulate.checks import check_kind, check_plan
from gossamer.simulate.profile import Compute
from gossamer.simulate.training import MakeFlow, blank
from gossamer.sync.agreement import PORTION
from gossamer.sync.checks import named_parameters
from gossamer.sync.history import weight_of
from gossamer.sync.launch import launch_order
from gossamer.sync.module_buffers import Buffers, averaged, check_buffers, floating, named_buffers
from gossamer.sync.usage import with_usage


def plans_for(
    model_or_plan: nn.Module | Plan,
    algorithm: Algorithm,
    parts: Mapping[Subject, Algorithm],
    compute: Compute,
    mode: Buffers,
    history: int,
    world: int,
) -> tuple[dict[Subject, Plan], list[MakeFlow]]:
    """The plan of each part of an algorithm, and what is sent before each forward pass.

    Raises ConfigurationError for a plan of another algorithm, and for buffers that the algorithm cannot treat in this way.
    """
    if isinstance(model_or_plan, Plan):
        for part in parts.values():
            check_plan(model_or_plan, part)
        return dict.fromkeys(parts, model_or_plan), []
    check_kind("model_or_plan", model_or_plan, nn.Module, "a torch.nn.Module, or make_plan(tensors, algorithm)")
    check_buffers(algorithm, model_or_plan, mode)
    plans = {subject: _plan(model_or_plan, part, compute, mode, history) for subject, part in parts.items()}
    return plans, _preludes(model_or_plan, algorithm, mode) if world > 1 else []


def _plan(model: nn.Module, algorithm: Algorithm, compute: Compute, mode: Buffers, history: int) -> Plan:
    """The plan that a replica of ``model`` has once it has learned the order of gradients, and the optimizer its history."""
    trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    tensors: dict[str, Tensor] = dict(trainable)
    if algorithm.subject == "weights":
        if mode == "average":
            tensors |= averaged(model)
        told = [name for name, p in trainable.items() if algorithm.route(name, p).traits.history]
        tensors |= {f"{kind} of {name}": trainable[name] for name in told for kind in range(history)}
        return make_plan(cut(tensors, algorithm.cadence.parts, weight_of), algorithm, at_once=True)
    in_order = list(reversed(tensors))
    in_order.sort(key=lambda name: compute.ready_at([name]))
    return make_plan(with_usage({name: tensors[name] for name in in_order}, algorithm), algorithm)


def arranged(plan: Plan, compute: Compute, wire_seconds: float) -> Plan:
    """The plan with the buckets in the order in which a replica launches them when they overlap the forward pass."""
    total = max(1, sum(layout.nbytes for layout in plan.layouts))
    order = launch_order(
        [compute.ready_at(layout.names) for layout in plan.layouts],
        [wire_seconds * layout.nbytes / total for layout in plan.layouts],
        [compute.needed_at(layout.names) for layout in plan.layouts],
    )
    return Plan(tuple(plan.layouts[index] for index in order))


def _preludes(model: nn.Module, algorithm: Algorithm, mode: Buffers) -> list[MakeFlow]:
    """What a replica sends of the module's buffers before each forward pass: one operation for each message."""
    if mode == "local" or (mode == "average" and algorithm.subject == "weights"):
        return []
    operation: Callable[[Tensor], Flow[Tensor]] = broadcast if mode == "broadcast" else all_reduce
    sizes = _broadcast_sizes(model) if mode == "broadcast" else _average_sizes(model)
    return [partial(lambda size: operation(blank(size)), size) for size in sizes]


def _broadcast_sizes(model: nn.Module) -> list[int]:
    """Bytes of the messages of ``same_from_rank``: everything that lies on one device, in portions."""
    totals: Counter[torch.device] = Counter()
    for tensor in named_buffers(model).values():
        totals[tensor.device] += tensor.nbytes
    return _in_portions(totals.values())


def _average_sizes(model: nn.Module) -> list[int]:
    """Bytes of the messages of ``module_buffers.average``: of each type on a device, in full precision at least."""
    totals: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for tensor in floating(named_buffers(model)).values():
        totals[tensor.device, tensor.dtype] += wide(tensor.to("meta")).nbytes
    return _in_portions(totals.values())


def _in_portions(totals: Iterable[int]) -> list[int]:
    return [min(PORTION, total - begin) for total in totals for begin in range(0, total, PORTION)]
