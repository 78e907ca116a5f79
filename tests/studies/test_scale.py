"""What was measured over the number of workers, beside what the clocked runner predicts from the same rows."""

import pytest

from benchmarks.studies import scale
from gossamer.bench.results import Results
from gossamer.errors import ConfigurationError

SECONDS, RATE = 0.3, 47e6


def a_row(method: str, hosts: int, **more) -> dict:
    figures = {"step_seconds": 0.5, "payload_bytes": 2e6, "messages": 6.0, "interface_bytes": 2.1e6, "cpu_seconds": 0.02}
    case = {"workload": f"Convnet({SECONDS})", "network": "50mbit", "hosts": hosts, "name": "Convnet"}
    return case | {"method": method, "tcp_bits_per_second": RATE} | figures | more


def rows_of(method: str, *hosts: int) -> list[dict]:
    return [row for n in hosts for row in (a_row("compute", n, step_seconds=SECONDS + 0.01), a_row(method, n))]


def test_a_prediction_knows_layers_rate_and_compute() -> None:
    gossip = scale.predict(a_row("Gossip(wire='bf16')", 4), SECONDS + 0.01)
    assert gossip.bytes_per_step == pytest.approx(2 * 1_630_090, rel=1e-3)
    assert gossip.step_seconds == pytest.approx(8 * 2 * 1_630_090 / RATE, rel=0.02)  # its message takes longer than compute
    with_momentum = scale.predict(a_row("GossipGraD()", 4), SECONDS + 0.01)
    assert with_momentum.bytes_per_step == 2 * gossip.bytes_per_step
    exact = scale.predict(a_row("AllReduce()", 4), SECONDS + 0.01)
    # The layer that is most of it is ready early in the backward pass: little of that hides its all-reduce.
    assert exact.step_seconds == pytest.approx(SECONDS + 8 * 1.5 * 4 * 1_630_090 / RATE, rel=0.2)
    assert exact.compute_seconds == pytest.approx(SECONDS + 0.01)


def test_every_emulated_host_has_a_line_of_its_own() -> None:
    """Also where an algorithm says that some of them are one machine."""
    in_pairs, alone = (scale.predict(a_row(f"Hierarchical(ranks_per_node={n})", 4), SECONDS + 0.01) for n in (2, 1))
    assert in_pairs.wire_seconds > 0.9 * alone.wire_seconds > 0


@pytest.mark.parametrize("method", ["ddp", "compute", "OneBitAdam()"])
def test_what_the_clock_cannot_run_has_no_prediction(method: str) -> None:
    assert scale.predict(a_row(method, 4), SECONDS) is None


def test_points_follow_methods_and_workers() -> None:
    rows = [*rows_of("AllReduce()", 8, 2), *rows_of("ddp", 2), a_row("horovod", 2, missing="not installed")]
    rows += [a_row("QSGD()", 2, failed="it fell over")]
    shown = [(point.row["method"], point.row["hosts"]) for point in scale.points(rows)]
    assert shown == [("compute", 2), ("compute", 2), ("compute", 8), ("AllReduce()", 2), ("AllReduce()", 8), ("ddp", 2)]


def test_a_row_is_predicted_with_the_compute_of_its_own_run() -> None:
    ahead, behind = (
        scale.points([a_row("compute", 4, step_seconds=SECONDS + 0.2), a_row("Gossip()", 4, compute_seconds=SECONDS + more)])[1]
        for more in (0.01, 0.1)
    )
    assert ahead.predicted is not None
    assert behind.predicted is not None
    assert ahead.predicted.compute_seconds == pytest.approx(SECONDS + 0.01)
    assert behind.predicted.compute_seconds == pytest.approx(SECONDS + 0.1)


def test_compute_alone_must_be_there() -> None:
    with pytest.raises(ConfigurationError, match="no method `compute`"):
        scale.points([a_row("AllReduce()", 4)])


def test_only_emulated_models_are_predicted() -> None:
    row = a_row("AllReduce()", 4) | {"workload": "examples/02_convnet.py"}
    with pytest.raises(ConfigurationError, match="emulated"):
        scale.predict(row, SECONDS)


def test_the_table_and_the_picture(tmp_path, monkeypatch) -> None:
    Results(tmp_path / "results.jsonl").add([*rows_of("AllReduce()", 2, 4), a_row("ddp", 2), a_row("Gossip()", 2, memory=1.25)])
    monkeypatch.setattr("sys.argv", ["scale", str(tmp_path)])
    scale.main()
    lines = (tmp_path / "scale.md").read_text().splitlines()
    assert len(lines) == 2 + 6
    predicted = scale.predict(a_row("AllReduce()", 4), SECONDS + 0.01)
    measured = f"| 500 | {1e3 * predicted.step_seconds:.0f} | {0.5 / predicted.step_seconds:.3f} | 2.00 |"
    assert any("`AllReduce()` | 4 " in line and measured in line for line in lines)
    assert lines[-1].endswith("| 1.25 |")
    assert (tmp_path / "scale.png").stat().st_size > 10_000


def test_nothing_measured_says_how(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sys.argv", ["scale", str(tmp_path)])
    with pytest.raises(SystemExit, match="by gossamer bench --suite scale"):
        scale.main()
