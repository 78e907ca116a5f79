"""One computing thread, as in the batteries."""

from contracts.conftest import _one_thread  # noqa: F401
