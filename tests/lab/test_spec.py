"""Lab specification: checked when it is written down."""

import json
from typing import Any

import pytest

from gossamer.lab import LabSpec


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"hosts": 0}, "hosts is 0"),
        ({"hosts": 251}, "hosts is 251"),
        ({"hosts": 2.0}, "whole number"),
        ({"hosts": True}, "whole number"),
        ({"hosts": 2, "procs_per_host": 0}, "procs_per_host is 0"),
        ({"hosts": 2, "rate": "fast"}, "is no rate"),
        ({"hosts": 2, "rate": "1gbit,"}, "is no rate"),
        ({"hosts": 2, "rate": "1gbit,1gbit,1gbit"}, "3 rates for 2 hosts"),
        ({"hosts": 2, "rate": []}, "0 rates for 2 hosts"),
        ({"hosts": 2, "rate": 200e6}, r"200000000\.0 is no rate: write for example 200mbit"),
        ({"hosts": 2, "rate": ["1gbit", None]}, "None is no rate"),
        ({"hosts": 2, "latency": "soon"}, "is no duration"),
        ({"hosts": 2, "latency": 0}, "0 is no duration: write for example 2ms"),
        ({"hosts": 2, "slow": {2: 3.0}}, "slow names host 2"),
        ({"hosts": 2, "slow": {1: 0.5}}, "factor must be"),
        ({"hosts": 2, "slow": {1: float("nan")}}, "factor must be"),
        ({"hosts": 2, "slow": {1: "3"}}, "host 1 is slowed by '3': the factor must be a number"),
        ({"hosts": 2, "slow_by": "magic"}, "slow_by is 'magic'"),
        ({"hosts": 2, "slow_links": {2: "1gbit"}}, "slow_links names host 2"),
        ({"hosts": 2, "slow_links": {1: "fast"}}, "is no rate"),
        ({"hosts": 2, "shaping": "magic"}, "shaping is 'magic'"),
        ({"hosts": 2, "timeout": 0}, "timeout is 0"),
        ({"hosts": 2, "timeout": float("inf")}, "timeout is inf"),
        ({"hosts": 2, "timeout": "60"}, "timeout is '60': it must be a positive number of seconds"),
    ],
)
def test_refuses(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LabSpec(**fields)


def test_an_unknown_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="speed"):
        LabSpec(hosts=2, speed="1gbit")  # type: ignore[call-arg]


def test_one_rate_is_every_hosts() -> None:
    assert [rate.bps for rate in LabSpec(hosts=3, rate="200mbit").rates] == [200e6] * 3


def test_rates_per_host() -> None:
    for rate in ("200mbit, 50mbit,none", ["200mbit", "50mbit", "none"]):
        assert [each.bps for each in LabSpec(hosts=3, rate=rate).rates] == [200e6, 50e6, None]


def test_one_link_may_be_slower() -> None:
    assert [rate.bps for rate in LabSpec(hosts=3, rate="200mbit", slow_links={1: "50mbit"}).rates] == [200e6, 50e6, 200e6]


def test_survives_json() -> None:
    links = {"rate": "200mbit,1gbit,1gbit,none", "slow_links": {3: "50mbit"}}
    spec = LabSpec(hosts=4, latency="2ms", slow={2: 3.0}, slow_by="telling", timeout=9, procs_per_host=2, **links)
    again = LabSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert (again.rates, again.slow, again.latency_s, again.timeout) == (spec.rates, spec.slow, 0.002, 9)
    assert (again.slow_by, again.rates[3].bps, again.world) == ("telling", 50e6, 8)
