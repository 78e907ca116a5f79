"""Rates: read as tc reads them, refused where they say nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.lab.rates import parse_duration, parse_rate


@pytest.mark.parametrize(
    ("text", "bps"),
    [
        ("200mbit", 200e6),
        ("1gbit", 1e9),
        ("500kbit", 500e3),
        ("25mbyte", 200e6),
        ("1.5Gbit", 1.5e9),
        (" 200 Mbit ", 200e6),
        (".5gbit", 500e6),
        ("8000bit", 8e3),
        ("unshaped", None),
        ("none", None),
    ],
)
def test_reads(text: str, bps: float | None) -> None:
    assert parse_rate(text).bps == bps


@pytest.mark.parametrize(
    "text",
    [
        *("", "fast", "200", "mbit", "-1mbit", "0mbit", "nanmbit", "infbit", "1e3mbit", "200mbit/s", "200 mbit 3"),
        *("1,5gbit", "99999gbit", "10bit", "200tbit"),
    ],
)
def test_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="is no rate"):
        parse_rate(text)


def test_refusals_say_what_to_write() -> None:
    with pytest.raises(ValueError, match="write 200mbit for megabits"):
        parse_rate("200")
    with pytest.raises(ValueError, match=r"bits or bytes\?"):
        parse_rate("200mbps")


@settings(deadline=None)
@given(st.integers(min_value=8, max_value=34_000_000))
def test_what_was_written_reads_the_same(kbit: int) -> None:
    rate = parse_rate(f"{kbit}kbit")
    assert parse_rate(rate.text) == rate
    assert rate.bps == kbit * 1000


@pytest.mark.parametrize(("text", "burst"), [("1mbit", 16_000), ("200mbit", 50_000), ("1gbit", 250_000), ("none", 0)])
def test_burst_is_16_kb_or_2_ms(text: str, burst: int) -> None:
    assert parse_rate(text).burst == burst


@pytest.mark.parametrize(("text", "seconds"), [("2ms", 0.002), ("500us", 0.0005), ("0.1s", 0.1), ("0", 0), ("0ms", 0)])
def test_reads_durations(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "2", "-1ms", "ms", "soon", "1m", "nanms"])
def test_refuses_durations(text: str) -> None:
    with pytest.raises(ValueError, match="is no duration"):
        parse_duration(text)
