"""Ranks of one machine name it alike."""

import socket

import pytest
import torch

from gossamer.comm.nodes import here, nodes_from


def test_torchrun_names_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = []
    for name in ("0", "1", "0"):
        monkeypatch.setenv("GROUP_RANK", name)
        numbers.append(here())
    assert nodes_from(torch.stack(numbers)) == ((0, 2), (1,))


def test_elsewhere_their_own_names_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GROUP_RANK", raising=False)
    numbers = []
    for name in ("a", "a", "b", "b"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        numbers.append(here())
    assert nodes_from(torch.stack(numbers)) == ((0, 1), (2, 3))


def test_a_mesh_goes_before_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_RANK", "0")
    assert nodes_from(torch.stack([here(machine) for machine in (1, 0, 1, 0)])) == ((0, 2), (1, 3))
