"""What a prediction computes hardly grows with the number of workers, and not with the number of steps."""

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gossamer.simulate import Compute, Link, StepTime, step_time
from gossamer.spelled import algorithm_of

METHODS = ["AllReduce()", "ByteGrad()", "Gossip()", "QuantizedGossip()", "LocalSGD()", "DiLoCo()", "in_parts(8, Gossip())"]


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 64)).to("meta")


def repeated() -> nn.Module:
    """Layers that are alike, in several buckets that are alike."""
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(6)]).to("meta")


def predict(method: str, world: int = 8, steps: int = 8, build: Callable[[], nn.Module] = small) -> StepTime:
    model = build()
    compute, link = Compute(forward=0.01, backward=0.02), Link(bandwidth=1e9, latency=5e-5)
    return step_time(model, algorithm_of(method), world=world, link=link, compute=compute, steps=steps)


def calls(work: Callable[[], object]) -> int:
    """How many functions written in Python ``work`` calls."""
    found = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


class Made(TorchDispatchMode):
    """Counts the operations on tensors that PyTorch carries out and that give no view."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        takes_tensors = any(isinstance(each, Tensor) for each in args)
        self.number += takes_tensors and all(each.alias_info is None for each in func._schema.returns)
        return func(*args, **(kwargs or {}))


class CarriedOut(TorchDispatchMode):
    """Every operation is carried out by PyTorch; a number that is read is 1."""

    def __init__(self, wrote: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__()
        assert wrote is None, "no processor here"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default) and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", [*METHODS, "ScatterReduce()", "GossipPGA()", "PowerSGD()", "ChunkSparse()", "PushSum()"])
def test_what_is_not_carried_out_changes_no_prediction(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predict(method, build=repeated)
    monkeypatch.setattr("gossamer.simulate.run.Valueless", CarriedOut)
    assert predict(method, build=repeated) == found


@pytest.mark.parametrize("enabled", [True, False])
def test_the_search_for_garbage_is_on_or_off_as_before(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        predict("Gossip()")
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("method", METHODS)
def test_sixteen_times_as_many_workers_take_less_than_four_times_as_many_calls(method: str) -> None:
    predict(method)  # what is done once in a process
    assert calls(lambda: predict(method, world=4096)) < 4 * calls(lambda: predict(method, world=256))


@pytest.mark.parametrize("method", ["QuantizedGossip()", "ByteGrad()"])
def test_an_operation_whose_arguments_look_as_before_is_not_carried_out_again(method: str) -> None:
    def made(steps: int) -> int:
        with Made() as counted:
            predict(method, steps=steps)
        return counted.number

    predict(method)
    assert made(60) == made(12)


@pytest.mark.parametrize("method", ["LocalSGD(every=8)", "DiLoCo(every=30)"])
def test_a_dense_start_is_neither_run_nor_priced(method: str) -> None:
    without = method.replace(")", ", dense=0)")
    assert predict(method) == predict(without)
    assert calls(lambda: predict(method)) < 1.1 * calls(lambda: predict(without))
