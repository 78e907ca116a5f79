"""Rows of gossamer bench, for tests of what is made of them."""

from typing import Any


def a_row(method: str, **more: Any) -> dict[str, Any]:
    """What was measured of a method."""
    figures = {"step_seconds": 0.5, "ratio": 0.5, "ratio_low": 0.49, "ratio_high": 0.51, "payload_bytes": 2e6}
    counted = {"interface_bytes": 3e6, "exposed_seconds": 0.1, "cpu_seconds": 0.2, "wire_seconds": 0.3}
    case = {"workload": "Convnet(0.05)", "network": "200mbit+2ms", "hosts": 4, "method": method, "name": "Convnet"}
    turns = {"rounds": 2, "steps_per_round": 5, "timed_steps": 8, "warmup": 4}
    return case | figures | counted | turns | {"compute_seconds": 0.4, "ratio_to_compute": 1.25} | more
