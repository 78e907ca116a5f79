"""Cases: those of torch's installed tests of ``torch.distributed`` that wrap a model in DDP."""

import ast
import inspect
import textwrap
from typing import Any

import torch

from judge import shim

shim.on_cpu()
shim.replace()

from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402

WRAPS = {"DistributedDataParallel", "DDP"}


class Case(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
    """torch's tests, in processes that are forked, because importing torch takes seconds."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def runTest(self) -> None: ...


def names() -> list[str]:
    """The tests that wrap a model, in their own bodies or in a method that they call."""
    base = DistributedTest._DistTestBase
    bodies = {name: _mentioned(member) for name, member in vars(base).items() if inspect.isfunction(member)}
    wrapping = {name for name, mentioned in bodies.items() if mentioned & WRAPS}
    while more := {name for name, mentioned in bodies.items() if mentioned & wrapping} - wrapping:
        wrapping |= more
    return sorted(name for name in wrapping if name.startswith("test_"))


def _mentioned(function: Any) -> set[str]:
    """The names and attributes that a function mentions."""
    tree = ast.walk(ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))))
    return {node.id if isinstance(node, ast.Name) else node.attr for node in tree if isinstance(node, ast.Name | ast.Attribute)}
