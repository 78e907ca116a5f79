"""What moves a model's tensors: decided by where they lie, and by what the process group has for that."""

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.comm.torch import transport as torch_transport
from gossamer.comm.torch.groups import group_timeout
from gossamer.comm.torch.transport import HOST, Transport, same_everywhere, told, transport_for
from gossamer.errors import ConfigurationError, DisagreementError

CPU, FIRST, SECOND = torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A group with the backends that ``config`` says, whatever it is called."""
    made = SimpleNamespace(config="")
    monkeypatch.setattr(torch_transport.dist, "get_backend_config", lambda group: group.config)
    return made


@pytest.mark.parametrize(
    ("config", "devices", "backend", "device"),
    [
        ("cpu:gloo,cuda:gloo", {CPU}, "gloo", None),
        ("cpu:gloo,cuda:nccl", {CPU}, "gloo", None),
        ("cpu:gloo,cuda:nccl", {SECOND}, "nccl", SECOND),
        ("cuda:nccl", {FIRST}, "nccl", FIRST),
        ("cuda:nccl", (), "gloo", None),
        ("cpu:gloo,cuda:gloo", {FIRST}, "gloo", FIRST),
    ],
)
def test_the_backend_is_that_of_the_models_device(
    group: Any, config: str, devices: Any, backend: str, device: torch.device | None
) -> None:
    group.config = config
    transport = transport_for(group, devices, 0)
    assert transport.backend == backend
    assert transport.streams is (backend == "nccl")
    assert (transport.device and transport.device.device) == device


@pytest.mark.parametrize(
    ("config", "devices", "words"),
    [
        (
            "cpu:gloo",
            {SECOND},
            "rank 3: the parameters lie on cuda:1, and the process group has no backend for it (only cpu:",
        ),
        ("cuda:nccl", {CPU}, "the parameters lie on cpu, and the process group has no backend for it (only cuda:nccl)"),
        ("cpu:gloo,cuda:nccl", {FIRST, SECOND}, "several devices (cuda:0, cuda:1)"),
        ("cpu:gloo,cuda:nccl", {CPU, FIRST}, "lie on cuda:0 and some on the host; all must lie on cuda:0"),
        ("cpu:gloo,cuda:gloo", {CPU, FIRST}, "lie on cuda:0 and some on the host"),
        ("cpu:ucc,cuda:ucc", {FIRST}, "moves tensors on cuda by ucc; gossamer knows nccl and gloo"),
    ],
)
def test_what_cannot_be_moved_is_refused(group: Any, config: str, devices: Any, words: str) -> None:
    group.config = config
    with pytest.raises(ConfigurationError) as caught:
        transport_for(group, devices, 3)
    assert words in str(caught.value)


def test_ranks_tell_each_other_what_they_mean() -> None:
    streams = Transport("nccl", torch_transport.Device(FIRST))
    same_everywhere(torch.stack([told(streams), told(Transport("nccl", torch_transport.Device(SECOND)))]), 0)
    with pytest.raises(
        DisagreementError, match="rank 0: tensors on cpu, moved by gloo; rank 1: tensors on cuda, moved by nccl"
    ):
        same_everywhere(torch.stack([told(HOST), told(streams)]), 1)


def test_the_timeout_is_that_of_a_backend_which_is_there(group: Any) -> None:
    def backend(device: torch.device) -> Any:
        if device.type != "cuda":
            raise RuntimeError("none")
        return SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))

    group.config, group._get_backend = "cpu:gloo,cuda:nccl", backend
    assert group_timeout(group) == timedelta(seconds=7)
    group.config = "cpu:gloo"
    assert group_timeout(group) == timedelta(minutes=30)
