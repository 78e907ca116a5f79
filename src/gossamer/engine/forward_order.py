"""Forward order: which module's forward pass needs a parameter, and which parameters are needed first (``overlap_forward``)."""

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn import Parameter


def guards(
    model: nn.Module, parameters: Mapping[str, Parameter], calls: Mapping[nn.Module, int]
) -> Iterator[tuple[str, nn.Module | None]]:
    """For each trainable parameter's name, the modules that wait for it: its holders, or, where a forward pass
    of theirs was not seen, the nearest around them; None where there is none. ``calls``: the place of each module in the
    forward pass."""
    named = dict(model.named_modules(remove_duplicate=False))
    names = {id(p): name for name, p in parameters.items()}
    for path, module in named.items():
        mine = [names[id(p)] for p in module._parameters.values() if p is not None and id(p) in names]
        around = path
        while mine and named[around] not in calls and around:
            around = around.rpartition(".")[0]
        guard = named[around]
        yield from ((name, guard if guard in calls else None) for name in mine)


def first_uses(model: nn.Module, parameters: Mapping[str, Parameter], calls: Mapping[nn.Module, int]) -> dict[str, int]:
    """The place in the forward pass at which each parameter is needed first."""
    positions: dict[str, int] = {}
    for name, guard in guards(model, parameters, calls):
        place = -1 if guard is None else calls[guard]
        positions[name] = min(place, positions.get(name, place))
    return positions
