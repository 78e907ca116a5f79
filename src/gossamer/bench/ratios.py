"""Ratio: how long one method takes relative to another in the same rounds, and how far that is from round to round."""

import statistics
from collections.abc import Sequence
from importlib.util import find_spec

from gossamer.errors import ConfigurationError

ENOUGH = 6
"""Rounds from which a ratio has an interval: of fewer, the bootstrap's is the range from the lowest to the highest."""

SPREAD = f"95 % interval; of fewer than {ENOUGH} rounds: lowest to highest"
"""What a table calls ``ratio_low`` and ``ratio_high``."""


def compare(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median of the paired ratios, from where to where, and the median step times.

    ``ratio_low`` and ``ratio_high``: the ends of a 95 % bootstrap interval of the median; of fewer than ``ENOUGH`` rounds the
    lowest and the highest ratio that was measured. That is a range, not an interval: it says nothing of the next run.
    """
    middle, low, high = paired_ratio(seconds, reference)
    medians = {"step_seconds": statistics.median(seconds), "reference_seconds": statistics.median(reference)}
    return medians | {"ratio": middle, "ratio_low": low, "ratio_high": high}


def paired_ratio(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """Median of the paired ratios, and from where to where; see :func:`compare`."""
    ratios = [own / other for own, other in zip(seconds, reference, strict=True)]
    return statistics.median(ratios), *ends(ratios)


def require_scipy() -> None:
    """ConfigurationError if what intervals are made with is not installed."""
    if find_spec("scipy") is None:
        raise ConfigurationError("intervals need scipy: pip install '.[bench]' where gossamer's sources are")


def ends(values: Sequence[float]) -> tuple[float, float]:
    """Those of the interval of the median; of fewer than ``ENOUGH`` values the lowest and the highest: see :func:`compare`."""
    return interval(values) if len(values) >= ENOUGH else (min(values), max(values))


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % bootstrap interval of the median."""
    import numpy as np
    from scipy.stats import bootstrap

    if min(values) == max(values):
        return values[0], values[0]
    made = bootstrap((np.array(values),), np.median, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    return float(made.low), float(made.high)
