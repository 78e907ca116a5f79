"""Checks: what ``step_time`` is given, before anything is computed."""

from torch import nn

from gossamer.checks import hint_at_class, is_whole
from gossamer.engine.checks import named_parameters
from gossamer.errors import ConfigurationError
from gossamer.simulate.profile import Compute, Link


def check_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        hint = hint_at_class(value) or f": write for example {example}"
        raise ConfigurationError(f"{name} must be an instance of {kind.__name__}; got {value!r}{hint}")


def check_whole(least: int, **numbers: object) -> None:
    for name, value in numbers.items():
        if not is_whole(value, least):
            raise ConfigurationError(f"{name} must be a whole number, at least {least}; got {value!r}")


def check_left_out(**options: object) -> None:
    """What a cluster says is not to be given beside it."""
    given = [name for name, value in options.items() if value is not None]
    if given:
        raise ConfigurationError(f"cluster= says what {', '.join(given)} would: leave one of them out")


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


def check_names(model: nn.Module, compute: Compute) -> None:
    trainable = {name for name, parameter in named_parameters(model).items() if parameter.requires_grad}
    for what, moments in (("ready", compute.ready), ("needed", compute.needed)):
        unknown = sorted(set(moments) - trainable)
        if unknown:
            raise ConfigurationError(f"compute.{what} names parameters that are not communicated: {', '.join(unknown[:3])}")
