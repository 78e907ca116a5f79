"""Simulation: what a training step would take on a described network, without a network and without data."""

from gossamer.simulate.prediction import StepTime, step_time
from gossamer.simulate.profile import Compute, Link, Transport

__all__ = ["Compute", "Link", "StepTime", "Transport", "step_time"]
