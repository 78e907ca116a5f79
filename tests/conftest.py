"""Shared by all tests: their markers, and imports of helpers by their folder (``from processes.harness import …``)."""

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))


# Examples are the same in every run, and a machine that stands still for a moment is no counterexample.
settings.register_profile("ours", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("ours")


def pytest_configure(config: pytest.Config) -> None:
    if (
        signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    ):  # a shell's background job; tests send Ctrl-C, and processes inherit this
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "slow: takes more than a few seconds of its own; run by `make test-slow`")
    config.addinivalue_line("markers", "processes: starts processes; its file begins before those in memory")
    config.addinivalue_line("markers", "alone: measures time; not beside other tests")


PROCESSES = ("examples", "integrations", "lab", "processes")
"""Folders of tests that start processes; others say so themselves, or ask for emulated hosts."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where only tests are wanted that measure time, other files are not imported: that would take most of the time."""
    if collection_path.suffix != ".py" or not config.option.markexpr.endswith(" and alone"):
        return None
    return None if collection_path.parent.name == "gpu" or "mark.alone" in collection_path.read_text() else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = item.path.relative_to(Path(__file__).parent).parts[0]
        if folder in PROCESSES or "namespaces" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
        if folder == "gpu":
            item.add_marker("alone")
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: item.path not in starting)  # they wait much: what is short comes last and fills the gaps


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips a test where emulated hosts are not possible, saying why."""
    from gossamer.lab import LabError, LabSpec, run_lab

    try:
        run_lab(LabSpec(hosts=1, rate="1gbit", shaping="namespaces"), ["-c", "pass"])
    except LabError as error:
        pytest.skip(str(error))
