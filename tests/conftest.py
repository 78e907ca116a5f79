"""Shared by all tests: the ``slow`` marker, and imports of helpers by their folder (``from processes.harness import …``)."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slow: takes more than a few seconds of its own; run by `make test-slow`")
