"""Collation: whether a DataLoader would put batches together that are made already."""

import inspect

from torch.utils.data import default_collate


def collated_again() -> bool:
    """Whether the ``__iter__`` that asks was called by a DataLoader that stacks what it gets.

    Such a loader tells its dataset nothing, so this looks at the call: what fetches for the loader is made with its
    ``auto_collation`` and ``collate_fn``. A ``collate_fn`` of the user's own may know what it is given.
    """
    asking = inspect.currentframe()
    caller = asking and asking.f_back and asking.f_back.f_back
    if not caller or not caller.f_globals.get("__name__", "").startswith("torch.utils.data."):
        return False
    return bool(caller.f_locals.get("auto_collation")) and caller.f_locals.get("collate_fn") is default_collate
