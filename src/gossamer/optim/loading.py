"""Loading: optimizer state that has more bits than its parameter, put back with all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

State = dict[str, Any]
"""What an optimizer's ``state_dict()`` returned."""


@contextmanager
def loading(
    optimizer: Optimizer, put_back: Callable[[State], None], check: Callable[[State], None] = lambda state_dict: None
) -> Iterator[None]:
    """Inside, torch's ``load_state_dict`` loads the param groups, and ``put_back`` the rest: torch would round it to the
    parameters' dtype.

    Hooks find what they find in torch: those before loading may replace the state that ``check`` may then refuse and
    ``put_back`` is given; those after it see everything loaded.
    """
    whole: list[State] = []

    def take(_: Optimizer, state_dict: State) -> State:
        check(state_dict)
        whole.append(state_dict)
        return {**state_dict, "state": {}}

    handles = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(lambda _: put_back(whole[0]), prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def put_back(optimizer: Optimizer, state_dict: State) -> None:
    """The state of every parameter, as copies in the types in which it was saved."""
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(saved_keys(state_dict), own, strict=True):
        if key in state_dict["state"]:
            optimizer.state[parameter] = {
                name: _restored(name, value, parameter) for name, value in state_dict["state"][key].items()
            }


def _restored(name: str, value: Any, parameter: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    # Steps are counted in tensors by torch's optimizers, whose state ours take.
    return int(value) if name == "step" else value.to(parameter.device, copy=True)


def saved_keys(state_dict: State) -> list[Any]:
    """What stands for each parameter, in the order of the groups."""
    return list(chain.from_iterable(group["params"] for group in state_dict["param_groups"]))
