"""Lab: scripts on emulated hosts with a slow network between them, on one machine. Imports no torch."""

from gossamer.lab.launcher import LabError, run_lab
from gossamer.lab.rates import Rate, parse_rate
from gossamer.lab.result import LabResult
from gossamer.lab.spec import LabSpec, Shaping

__all__ = ["LabError", "LabResult", "LabSpec", "Rate", "Shaping", "parse_rate", "run_lab"]
