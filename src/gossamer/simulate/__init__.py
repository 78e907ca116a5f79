"""Simulation: what a training step would take on a described network, without a network and without data."""

from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.training import StepTime, step_time

__all__ = ["Compute", "Link", "StepTime", "step_time"]
