"""Loan: options of an optimizer's groups that gossamer sets while a replica is open; what is saved meanwhile is the user's."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

Loan = Mapping[str, str]
"""By option, the key in a param group under which the user's value is kept meanwhile."""


def give_back(groups: Iterable[dict[str, Any]], loan: Loan) -> None:
    """Put the user's values back, where there are any."""
    for group in groups:
        for option, key in loan.items():
            if key in group:
                group[option] = group.pop(key)


def save_as_given(optimizer: Optimizer, loan: Loan) -> RemovableHandle:
    """From now on ``state_dict()`` holds the user's values: it can be loaded without gossamer, or in another training."""

    def after_saving(_: Optimizer, state_dict: dict[str, Any]) -> None:
        give_back(state_dict["param_groups"], loan)  # copies of the optimizer's own

    return optimizer.register_state_dict_post_hook(after_saving, prepend=True)
