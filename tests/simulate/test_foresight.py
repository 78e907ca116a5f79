"""Predictions beside committed measurements, none of which they are made of."""

from statistics import median

from benchmarks.studies.foresight import RESULTS, Point, order, points, predict, predictable, summary
from gossamer.bench.rows import read_rows


def test_the_overlapped_forward_pass_is_predicted_on_every_network() -> None:
    rows = [row for row in read_rows(RESULTS / "bounds" / "results.jsonl") if predictable(row)]
    found = [Point("bounds", row, predict(row)) for row in rows if "overlap_forward" in row["method"]]
    assert len(found) == 9
    errors = [abs(point.error) for point in found]
    assert median(errors) <= 0.02
    assert max(errors) <= 0.05
    assert "| overlap_forward | 9 |" in "\n".join(summary(found))


def test_what_is_computed_on_a_shared_processor_is_predicted_from_one_network() -> None:
    """Of 24 rows with real compute, six calibrate the processor, by processor time; the others are judged."""
    found = list(points([RESULTS / "peers", RESULTS / "relaxations"]))
    judged = sorted(abs(point.error) for point in found if not point.calibrates)
    assert (len(found), len(judged)) == (24, 18)
    assert median(judged) <= 0.07
    assert sum(error <= 0.15 for error in judged) >= 17
    assert all(point.kind == "real compute" for point in found if not point.calibrates)
    assert "22 of 22 right" in order(found)
