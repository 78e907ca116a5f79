"""Networks: how they are written, and what their lines reach."""

import json
import os

import pytest

from gossamer.bench import link
from gossamer.bench.cases import Case
from gossamer.bench.catalogue import find_workload, is_emulated
from gossamer.bench.in_lab import lab_json
from gossamer.bench.link import rings
from gossamer.bench.network import Network, parse_network
from gossamer.errors import ConfigurationError


@pytest.mark.parametrize(
    ("text", "network"),
    [
        ("200mbit", Network("200mbit")),
        ("unshaped/slow-host=2.5x", Network("unshaped", slow_host=2.5)),
        ("1gbit+2ms/slow-link=50mbit", Network("1gbit", "2ms", slow_link="50mbit")),
        ("1gbit/slow-host=3x/slow-link=50mbit", Network("1gbit", slow_link="50mbit", slow_host=3.0)),
    ],
)
def test_reads(text, network):
    assert parse_network(text) == network


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("200mbit/slow-link", "neither slow-link=RATE nor"),
        ("200mbit/slow=50mbit", "neither slow-link=RATE nor"),
        ("200mbit/slow-host=2", "'2' is no factor"),
        ("200mbit/slow-host=1x", "'1x' is no factor"),
        ("200mbit/slow-host=1000x", "up to 100x"),
        ("200mbit/slow-link=1gbit/slow-link=50mbit", "a network is a rate"),
        ("/slow-host=2x", "a network is a rate"),
        ("200mbit+", "a network is a rate"),
        ("200mbit/slow-link=fast", "'fast' is no rate"),
        ("fast", "'fast' is no rate"),
    ],
)
def test_says_what_it_expected(text, complaint):
    with pytest.raises(ConfigurationError, match=complaint):
        Case("Convnet(1)", text, 4).spec()


def test_the_last_host_is_the_slow_one():
    spec = Case("Convnet(1)", "200mbit/slow-link=50mbit/slow-host=2x", 3).spec()
    assert [rate.bps for rate in spec.rates] == [200e6, 200e6, 50e6]
    assert (spec.slow, spec.slow_by) == ({2: 2.0}, "telling")
    assert Case("train.py", "200mbit/slow-host=2x", 3).spec().slow_by == "stopping"
    with pytest.raises(ConfigurationError, match="2 hosts or more"):
        Case("Convnet(1)", "200mbit/slow-host=2x", 1).spec()


def test_an_emulated_model_is_told_from_a_file():
    assert is_emulated("AlexNet(2)")
    assert not is_emulated("AlexNet.py")


def test_emulated_compute_takes_longer_on_a_slow_host(monkeypatch):
    monkeypatch.setitem(os.environ, "GOSSAMER_LAB_SLOWDOWN", "3")
    slow = find_workload("Convnet(0.5)").build_model()
    monkeypatch.delitem(os.environ, "GOSSAMER_LAB_SLOWDOWN")
    usual = find_workload("Convnet(0.5)").build_model()
    assert sum(slow._seconds) == pytest.approx(3 * sum(usual._seconds)) == pytest.approx(1.5)


def test_there_is_a_ring_for_every_rate():
    assert rings([2.0, 2.0, 2.0]) == [[0, 1, 2]]
    assert rings([2.0, 1.0, 2.0, 3.0]) == [[0, 1, 2, 3], [0, 2, 3]]
    assert rings([2.0, 1.0]) == [[0, 1]]


def test_a_cluster_without_addresses_of_the_old_kind_has_no_line(monkeypatch):
    """A name server that knows IPv6 only."""
    for name, value in {"MASTER_ADDR": "::1", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOSSAMER_LAB", raising=False)
    for name, answer in {"get_rank": 0, "get_world_size": 2, "get_backend": "gloo"}.items():
        monkeypatch.setattr(link.dist, name, lambda answer=answer: answer)
    monkeypatch.setattr(link, "of_all", lambda own: [own, own])
    assert link.plain_tcp() == []


@pytest.mark.slow
def test_every_rank_has_the_rate_of_its_own_line(tmp_path, namespaces):
    script = tmp_path / "lines.py"
    script.write_text(
        "import json, torch.distributed as dist\n"
        "from gossamer.bench.link import plain_tcp\n"
        "dist.init_process_group('gloo')\n"
        "found = plain_tcp()\n"
        "print(json.dumps({'rank': dist.get_rank(), 'lines': [max(each) for each in found]}))\n"
        "dist.destroy_process_group()\n"
    )
    found = lab_json(Case("train.py", "80mbit/slow-link=20mbit", 3).spec(), [str(script)])
    assert len(found) == 3
    assert len({json.dumps(each["lines"]) for each in found}) == 1
    usual, _, slow = found[0]["lines"]
    assert 0.6 * 20e6 < slow < 20e6 < usual < 80e6
