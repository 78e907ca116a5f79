"""Stub: stands for ``torch._dynamo``, which every optimizer imports on its first use for two seconds of each process."""

import sys
from types import ModuleType
from typing import Any

import torch


def leave_out_the_compiler() -> None:
    """Put a module in the compiler's place that has what optimizers ask of it when nothing is compiled."""
    module: Any = ModuleType("torch._dynamo")
    module.disable = lambda function, *arguments, **options: function
    module.graph_break = lambda *arguments: None
    module.OptimizedModule = type("OptimizedModule", (), {})
    module.reset = lambda: None
    sys.modules["torch._dynamo"] = torch._dynamo = module
