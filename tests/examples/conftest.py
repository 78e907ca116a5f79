"""The examples, importable and runnable."""

import importlib
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HELPERS = ("common", "data", "training_log")


@pytest.fixture(autouse=True)
def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Their folder comes first, as when one of them is run; their modules do not stay."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for name in HELPERS:
        sys.modules.pop(name, None)


@pytest.fixture
def data() -> Any:
    """The module ``examples/data.py``."""
    return importlib.import_module("data")


@pytest.fixture
def run_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Run an example in this process as a world of one; returns the records of its log."""

    def run(script: str, *arguments: str) -> list[dict[str, Any]]:
        log = tmp_path / "log.jsonl"
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--log-to", str(log)])
        before = torch.get_rng_state()
        try:
            runpy.run_path(str(EXAMPLES / script), run_name="__main__")
        finally:
            torch.set_rng_state(before)
        return [json.loads(line) for line in log.read_text().splitlines()]

    return run
