"""Profiling: ranges in the timeline of ``torch.profiler``, one per flow and one per wait for it."""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_STEP = re.compile(r"( (at|after|of( the optimizer's)?))? step \d+$")
_NOTHING = nullcontext()


def shown(what: str, label: str) -> AbstractContextManager[Any]:
    """Show what runs inside as ``gossamer: <what> of <label>``, without the number of a step, so that steps can be summed up.

    Where this thread has no profiler, which is asked first, it costs less than a microsecond. Lanes are threads of their own:
    a profiler sees their flows with ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    """
    if not torch._C._autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"gossamer: {what} of {_STEP.sub('', label)}")
