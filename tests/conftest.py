"""Shared by all tests: the ``slow`` marker, and imports of helpers by their folder (``from processes.harness import …``)."""

import signal
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # a shell's background job; tests send Ctrl-C, and processes inherit this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes more than a few seconds of its own; run by `make test-slow`")
