"""On a device a step waits for nothing on the host: it runs on ``meta`` tensors, of which no value can be read."""

import importlib

import pytest
import torch
from torch import nn

import gossamer
from echo import EchoRunner
from fake_device import FakeDevice
from gossamer import AllReduce, Gossip
from gossamer.algorithms import Algorithm


def train(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch, steps: int = 4) -> EchoRunner:
    runner = EchoRunner(FakeDevice(torch.device("meta")))
    entry = importlib.import_module("gossamer.replicate")
    monkeypatch.setattr(entry, "connect", lambda *arguments, **options: runner)
    monkeypatch.setattr("gossamer.replication._start_equal", lambda *arguments: None)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 3)).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, algorithm)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.empty(8, 10, device="meta")).square().mean().backward()
        optimizer.step()
    replica.close()
    return runner


@pytest.mark.parametrize(
    "algorithm", [AllReduce(bucket_bytes=64), AllReduce(wire="bf16"), Gossip(bucket_bytes=64), Gossip(wire="bf16")], ids=repr
)
def test_a_step_reads_no_value(algorithm: Algorithm, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(algorithm, monkeypatch).data.error is None


def test_to_read_a_value_is_noticed() -> None:
    """Else the test above could not fail."""
    with pytest.raises(RuntimeError, match="meta"):
        torch.empty(1, device="meta").item()
    with pytest.raises(NotImplementedError, match="meta"):
        torch.empty(1, device="meta").cpu()
