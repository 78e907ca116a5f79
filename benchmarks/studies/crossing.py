"""Crossing: when a quality, smoothed over five evaluations, first reaches a target."""

import itertools
import statistics
from collections.abc import Sequence

WINDOW = 5
"""Evaluations of which the median counts, at the time of the middle one."""

Points = Sequence[tuple[float, float]]
"""Seconds of training, and the quality then."""


def smoothed(points: Points) -> list[tuple[float, float]]:
    """Medians of ``WINDOW`` evaluations, each at the time of the middle one; fewer than ``points`` by ``WINDOW - 1``."""
    windows = [points[start : start + WINDOW] for start in range(len(points) - WINDOW + 1)]
    return [(window[WINDOW // 2][0], statistics.median(quality for _, quality in window)) for window in windows]


def reaches(quality: float, target: float, measure: str) -> bool:
    """Whether a quality is as good as the target: at most that of a ``"loss"``, at least that of anything else."""
    return quality <= target if measure == "loss" else quality >= target


def crossing(points: Points, target: float, measure: str) -> float | None:
    """Seconds at which the smoothed quality first reaches the target, on the line between two medians; None if never."""
    medians = smoothed(points)
    if medians and reaches(medians[0][1], target, measure):
        return medians[0][0]
    for (t0, q0), (t1, q1) in itertools.pairwise(medians):
        if reaches(q1, target, measure):
            return t0 + (target - q0) / (q1 - q0) * (t1 - t0)
    return None
