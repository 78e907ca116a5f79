"""Cluster files: what they say, and how a wrong one is refused, with file, line and key."""

from pathlib import Path

import pytest

from gossamer.errors import ConfigurationError
from gossamer.simulate import Link, Machines, Pauses, Processor, Stragglers, Transport
from gossamer.simulate.cluster_file import find_cluster, read_cluster, shipped, with_machines

WHOLE = """\
name = "16 x 8 V100, TCP"
[machines]
count = 16
devices = 8
device = "V100"
sites = 2
[links.between]
rate = "100gbit"
efficiency = 0.90
ceiling = "20gbit"
latency = "50us"
window = "8MB"
all_reduce = ["ring", "tree"]
[links.inside]
rate = "1200gbit"
latency = "5us"
[links.across]
rate = "1gbyte"
[links.own]
3 = { rate = "1gbit" }
[processor]
cores = 2
copy = "4GB/s"
kernels = { "8 bits, encode" = "1.5GB/s" }
[stragglers]
jitter = 0.03
slow = { "15" = 2.0 }
pauses = { every = "1min", seconds = "500ms" }
"""


def read(tmp_path: Path, text: str):
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    return read_cluster(file)


def test_a_file_says_all_that_a_cluster_has(tmp_path: Path) -> None:
    cluster = read(tmp_path, WHOLE)
    tcp = Transport(efficiency=0.9, ceiling=20e9, window=8e6, all_reduce=("ring", "tree"))
    assert cluster.name == "16 x 8 V100, TCP"
    assert cluster.machines == Machines(count=16, devices=8, device="V100", sites=2)
    assert cluster.between == Link(bandwidth=100e9, latency=50e-6, transport=tcp)
    assert cluster.inside == Link(bandwidth=1.2e12, latency=5e-6)
    assert cluster.across == Link(bandwidth=8e9)
    assert cluster.own == {3: Link(bandwidth=1e9, latency=50e-6, transport=tcp)}, "what it does not say is as between"
    assert cluster.processor == Processor(cores=2, copy=4e9, kernels={"8 bits, encode": 1.5e9})
    assert cluster.stragglers == Stragglers(jitter=0.03, slow={15: 2.0}, pauses=Pauses(every=60, seconds=0.5))


LEAST = '[machines]\ncount = 4\n[links.between]\nrate = "1gbit"\n'


def test_little_is_enough(tmp_path: Path) -> None:
    cluster = read(tmp_path, LEAST)
    assert (cluster.world, cluster.between, cluster.name) == (4, Link(bandwidth=1e9), "cluster")


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("count = 4\ncoumt = 5", r"line 3, machines\.coumt: unknown key; did you mean count\?"),
        ('rate = "1gbit"\nspeed = 1', r"line 5, links\.between\.speed: unknown key; known: rate, latency"),
        ("[link]\n[machines]", r"line 1, link: unknown key; did you mean links\?"),
        ('rate = "100ms"', r"line 4, links\.between\.rate: '100ms' is no rate: write for example 10gbit"),
        ("rate = 100", r"line 4, links\.between\.rate: 100 has no unit"),
        ('rate = "1gbit"\nlatency = "1gbit"', r"line 5, links\.between\.latency: '1gbit' is no duration"),
        ('rate = "1gbit"\nlatency = 0.001', r"line 5, links\.between\.latency: 0\.001 has no unit"),
        ('rate = "1gbit"\nwindow = "8s"', r"line 5, links\.between\.window: '8s' is no amount of memory"),
        ('rate = "0gbit"', r"line 4, links\.between\.rate: bandwidth must be a positive number"),
        ('rate = "1gbit"\nefficiency = 1.2', r"line 5, links\.between\.efficiency: efficiency must be a share"),
        ('rate = "1gbit"\nall_reduce = ["star"]', r"line 5, links\.between\.all_reduce: all_reduce must be"),
        ('rate = "1gbit"\nall_reduce = [["ring"]]', r"line 5, links\.between\.all_reduce: all_reduce must be"),
        ("count = 0", r"line 2, machines\.count: count must be a whole number, at least 1; got 0"),
        ("count = 4\nsites = 3", "line 1, machines: 4 machines cannot stand in 3 sites"),
        ("devices = 4", "line 1, machines: does not say count"),
        ("count = 4\n[stragglers]\njitter = 7", r"line 4, stragglers\.jitter: jitter must be a share"),
        ('count = 4\n[stragglers]\nslow = { "9" = 2.0 }', r"line 4, stragglers\.slow: stragglers\.slow names machine 9"),
        ('count = 4\n[stragglers]\nslow = { a = 2.0 }', r"line 4, stragglers\.slow\.a: must be the number of a machine"),
        ("count = 4\n[stragglers]\nslow = 3", r"line 4, stragglers\.slow: must be a table; got 3"),
        ('count = 4\n[stragglers]\npauses = { every = "2s" }', r"line 4, stragglers\.pauses: does not say seconds"),
        ('count = 4\n[links.across]\nrate = "1gbit"', r"line 3, links\.across: across= is the link between sites"),
        ("count =", "at line 2"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_told_with_file_line_and_key(tmp_path: Path, wrong: str, complaint: str) -> None:
    """``wrong`` takes the place of the rate, of the number of machines, or of the first line."""
    before = 'rate = "1gbit"' if wrong.startswith("rate") else "[machines]" if wrong.startswith("[") else "count = 4"
    with pytest.raises(ConfigurationError, match=f"cluster.toml.*{complaint}") as raised:
        read(tmp_path, LEAST.replace(before, wrong))
    assert str(raised.value).count("cluster.toml") == 1, "the place is said once"


@pytest.mark.parametrize(
    ("cut", "complaint"), [("[links", "no table .links."), ("[machines]\ncount = 4\n", "no table .machines.")]
)
def test_a_file_without_machines_or_links_is_refused(tmp_path: Path, cut: str, complaint: str) -> None:
    text = LEAST.partition(cut)[0] if cut == "[links" else LEAST.replace(cut, "")
    with pytest.raises(ConfigurationError, match=complaint):
        read(tmp_path, text)


@pytest.mark.parametrize("name", shipped())
def test_shipped_clusters_are_read_by_name(name: str) -> None:
    cluster = find_cluster(name)
    assert cluster.world > 1
    assert cluster.name != name, "each says what it is"


def test_another_number_of_machines_keeps_what_is_said_of_those_that_are_left(tmp_path: Path) -> None:
    cluster = read(tmp_path, WHOLE)
    fewer = with_machines(cluster, 4)
    assert (fewer.machines.count, fewer.world, fewer.stragglers.slow) == (4, 32, {})
    assert fewer.own == cluster.own


def test_a_name_that_is_not_known_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigurationError, match=r"no file bagau; did you mean bagua\?"):
        find_cluster("bagau")


def test_a_script_in_the_place_of_a_cluster_is_told_where_it_belongs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    with pytest.raises(ConfigurationError, match=r"train\.py is no cluster: write .* --model .*train\.py"):
        find_cluster(str(script))
