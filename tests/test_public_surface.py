"""The public surface is one list; importing it is cheap."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import gossamer
from gossamer.algorithms import registry

PUBLIC = {
    "ByteGrad",
    "ChunkSparse",
    "Hierarchical",
    "PowerSGD",
    "PushSum",
    "QuantizedGossip",
    "DESLOC",
    "QSGD",
    "ScatterReduce",
    "SparseLoCo",
    "after",
    "by_size",
    "in_parts",
    "Algorithm",
    "AllReduce",
    "CheckpointError",
    "CommunicationError",
    "CommunicationTimeout",
    "ConfigurationError",
    "DisagreementError",
    "DistributedDataParallel",
    "GossamerError",
    "DecentralizedSGD",
    "DiLoCo",
    "EagerDiLoCo",
    "LocalSGD",
    "Gossip",
    "GossipGraD",
    "GossipPGA",
    "LowPrecisionDecentralized",
    "PeerLeftError",
    "Replica",
    "UsageError",
    "__version__",
    "loopback",
    "replicate",
    "sparta",
    "streaming_diloco",
}


def test_the_public_surface_is_this_list() -> None:
    assert set(gossamer.__all__) == PUBLIC
    assert sorted(set(gossamer.__all__)) == sorted(gossamer.__all__)
    assert all(getattr(gossamer, name) is not None for name in PUBLIC)


def test_the_reference_names_the_public_modules() -> None:
    """Exactly those at the top that say what they export."""
    text = (Path(__file__).parents[1] / "docs" / "reference.md").read_text()
    section = text.split("## What is public\n")[1].split("\n## ")[0]
    named = set(re.findall(r"^\| `([\w.]+)` \|", section, re.M))
    top = (module.name for module in pkgutil.iter_modules(gossamer.__path__))
    exporting = {f"gossamer.{name}" for name in top if hasattr(importlib.import_module(f"gossamer.{name}"), "__all__")}
    assert named == {"gossamer"} | exporting


def test_every_algorithm_is_public() -> None:
    assert {cls.__name__ for cls in registry().values() if cls.__module__.startswith("gossamer.")} <= PUBLIC


@pytest.mark.alone
def test_importing_costs_less_than_half_of_what_importing_torch_costs() -> None:
    """CPU time of one process, so that neither a slow nor a busy machine matters much; once in five times is enough."""
    code = """
from time import process_time
begin = process_time()
import torch
between = process_time()
import gossamer
print((process_time() - between) / (between - begin))
"""
    ratios = (float(subprocess.check_output([sys.executable, "-c", code])) for _ in range(5))
    assert any(ratio <= 0.45 for ratio in ratios)


def test_importing_starts_nothing() -> None:
    """No thread, no process group, no compiler, none of the tools."""
    code = """
import sys, threading, gossamer
assert threading.active_count() == 1
heavy = {"torch._dynamo", "torch._inductor", "typer", "rich", "matplotlib", "scipy", "pyroute2", "gossamer.lab"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
