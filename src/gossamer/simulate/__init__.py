"""Simulation: what a training step would take on a described network, without a network and without data."""

from gossamer.simulate.cluster import Cluster, Machines, Pauses, Processor, Stragglers
from gossamer.simulate.prediction import StepTime, step_time
from gossamer.simulate.profile import Compute, Link, Transport

__all__ = [
    "Cluster",
    "Compute",
    "Link",
    "Machines",
    "Pauses",
    "Processor",
    "StepTime",
    "Stragglers",
    "Transport",
    "step_time",
]
