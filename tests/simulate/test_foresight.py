"""Predictions beside committed measurements, none of which they are made of."""

from statistics import median

from benchmarks.studies.foresight import RESULTS, Point, predict, predictable, summary
from gossamer.bench.rows import read_rows


def test_the_overlapped_forward_pass_is_predicted_on_every_network() -> None:
    rows = [row for row in read_rows(RESULTS / "bounds" / "results.jsonl") if predictable(row)]
    found = [Point("bounds", row, predict(row)) for row in rows if "overlap_forward" in row["method"]]
    assert len(found) == 9
    errors = [abs(point.error) for point in found]
    assert median(errors) <= 0.02
    assert max(errors) <= 0.05
    assert "| overlap_forward | 9 |" in "\n".join(summary(found))
