"""Checks: what ``step_time`` is given, before anything is computed."""

from collections.abc import Iterable

import torch
from torch import nn

from gossamer.algorithms.base import Algorithm
from gossamer.buckets import Plan
from gossamer.checks import hint_at_class, is_whole
from gossamer.errors import ConfigurationError
from gossamer.pieces import part_of
from gossamer.simulate.profile import Compute, Link
from gossamer.sync.usage import USAGE


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        hint = hint_at_class(value) or f": write for example {example}"
        raise ConfigurationError(f"{name} must be an instance of {kind.__name__}; got {value!r}{hint}")


def check_whole(least: int, **numbers: object) -> None:
    for name, value in numbers.items():
        if not is_whole(value, least):
            raise ConfigurationError(f"{name} must be a whole number, at least {least}; got {value!r}")


def check_links(link: object, inside: object, ranks_per_node: int) -> None:
    check_kind("link", link, Link, "Link(bandwidth=200e6, latency=1e-3)")
    if inside is None:
        return
    check_kind("inside", inside, Link, "Link(bandwidth=100e9)")
    if ranks_per_node == 1:
        raise ConfigurationError(
            "inside= says how the ranks of one machine reach each other, and with ranks_per_node=1 no two share one: say how "
            "many do, or leave it out"
        )


def check_plan(plan: Plan, algorithm: Algorithm) -> None:
    """Refuse a plan that was made for another algorithm: its buckets would be handled as no replica does."""
    uncut = algorithm.cadence.parts > 1 and any(part_of(name)[1] is None for name in plan.names)
    for layout in plan.layouts:
        segments = [segment for segment in layout.segments if segment.name != USAGE]
        blanks = {s.name: torch.empty_strided(s.shape, s.stride, dtype=layout.dtype, device="meta") for s in segments}
        other = uncut or any(algorithm.route(name, blank) != layout.handler for name, blank in blanks.items())
        if other or layout.handler.message_dtype(layout.dtype) != layout.message:
            raise ConfigurationError(
                f"the plan was not made for {algorithm!r}, which would lay out {layout.names[0]!r} otherwise: give the model, "
                "or make_plan(tensors, algorithm)" + (" of tensors that were cut() into its parts" if uncut else "")
            )


def check_names(plans: Iterable[Plan], compute: Compute) -> None:
    communicated = {part_of(name)[0] for plan in plans for name in plan.names}
    for what, moments in (("ready", compute.ready), ("needed", compute.needed)):
        unknown = sorted(set(moments) - communicated)
        if unknown:
            raise ConfigurationError(f"compute.{what} names parameters that are not communicated: {', '.join(unknown[:3])}")


def check_history(history: int | None, algorithm: Algorithm, model_or_plan: nn.Module | Plan) -> None:
    if history is not None and not is_whole(history, 0):
        raise ConfigurationError(f"history must be a number of tensors per weight; got {history!r}")
    if history is None and algorithm.traits.history and not isinstance(model_or_plan, Plan):
        raise ConfigurationError(
            f"{algorithm!r} exchanges what the optimizer remembers of each weight: say how many tensors that is, "
            "history=1 for SGD with momentum, 2 for Adam, 0 for plain SGD"
        )
