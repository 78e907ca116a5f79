"""Shards sorted by label, and batches of them that stay or travel."""

import sys
from itertools import islice

import pytest
import torch

import gossamer
from benchmarks.studies import shuffle
from benchmarks.studies.convergence import Training
from benchmarks.studies.shuffle import ARMS, MIXED, SHUFFLED, shard, staying, train_on, travelling
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError

from .kept import run_all, table

LABELS = torch.arange(80) % 4
INPUTS = torch.arange(80.0).reshape(80, 1)


def test_other_settings_are_other_rows(tmp_path, monkeypatch):
    """What was trained with one algorithm is not taken for what another is asked for."""
    trained = []
    monkeypatch.setattr(shuffle, "find_workload", lambda name: a_workload())

    def train_on(workload, run, algorithm, batch):
        trained.append((run.method, algorithm, batch))
        return {"loss": 1.0}

    monkeypatch.setattr(shuffle, "train_on", train_on)
    for arguments in ([], ["--algorithm", "GossipGraD()"], ["--algorithm", "GossipGraD()"], ["--batch", "8"]):
        monkeypatch.setattr(sys, "argv", ["shuffle", "--seeds", "1", "--save-to", str(tmp_path), *arguments])
        shuffle.main()
    settings = [("Gossip()", 64), ("GossipGraD()", 64), ("Gossip()", 8)]
    assert trained == [(arm, *each) for each in settings for arm in ARMS]


def test_shards_are_sorted_and_hold_everything_once():
    shards = [shard(INPUTS, LABELS, rank, 4) for rank in range(4)]
    assert [labels.unique().tolist() for _, labels in shards] == [[0], [1], [2], [3]]
    assert torch.cat([inputs for inputs, _ in shards]).sort(0).values.equal(INPUTS)


def test_what_stays_shows_a_worker_its_own_label_only():
    batches = list(islice(staying(shard(INPUTS, LABELS, 2, 4), 5, 2, 0), 12))
    assert {int(label) for _, labels in batches for label in labels} == {2}
    assert sorted(torch.cat([inputs for inputs, _ in batches[:4]]).flatten().tolist()) == INPUTS[LABELS == 2].flatten().tolist()


@pytest.mark.parametrize("mix", [False, True])
def test_what_travels_shows_every_worker_everything_in_one_turn(mix):
    def body(rank):
        source = travelling(shard(INPUTS, LABELS, rank, 4), 5, 0, mix=mix)
        seen = [inputs for inputs, _ in islice(source, 4 * 4)]
        source.close()
        return torch.cat(seen).flatten().sort().values

    for seen in gossamer.loopback(body, 4):
        assert seen.tolist() == INPUTS.flatten().tolist()


def a_workload(**more):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(160, 4, generator=generator)
    labels = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()

    def shuffled(rank, world, seed):
        order = torch.randperm(160, generator=torch.Generator().manual_seed(seed))[rank::world]
        while True:
            for chosen in order.split(10):
                yield inputs[chosen], labels[chosen]

    def quality(model):
        return {"accuracy": float((model(inputs).argmax(1) == labels).float().mean())}

    return Workload(
        "small",
        build_model=lambda: torch.nn.Linear(4, 4),
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
        random_batch=lambda generator: (inputs[:10], labels[:10]),
        loss=torch.nn.functional.cross_entropy,
        training_batches=shuffled,
        quality=quality,
        **{"training_samples": lambda: (inputs, labels)} | more,
    )


def test_every_arm_trains_and_is_kept(tmp_path):
    def train(workload, run):
        return train_on(workload, run, "Gossip()", 10)

    runs = [Training("small", arm, 4, 32, 0) for arm in ARMS]
    rows = run_all(a_workload(), runs, tmp_path / "shuffle.jsonl", train)
    found = {row["method"]: row["quality"]["accuracy"] for row in rows}
    assert list(found) == list(ARMS)
    assert found[SHUFFLED] > 0.8
    assert found[MIXED] > 0.6
    again = run_all(a_workload(), runs, tmp_path / "shuffle.jsonl", None)
    assert {row["method"]: row["quality"]["accuracy"] for row in again} == found


def test_a_workload_without_samples_is_refused():
    with pytest.raises(ConfigurationError, match="training_samples"):
        train_on(a_workload(training_samples=None), Training("small", MIXED, 4, 1, 0), "Gossip()", 10)


def test_globally_shuffled_data_come_in_batches_of_the_size_that_is_asked_for(monkeypatch):
    found = []

    def train(workload, run, batches):
        found.append(list(islice(batches(1, 4, 3), 5)))
        return {}

    monkeypatch.setattr(shuffle, "train", train)
    for batch in (8, 10):
        train_on(a_workload(), Training("small", SHUFFLED, 4, 1, 3), "Gossip()", batch)
    eights, tens = found
    own = list(islice(a_workload().training_batches(1, 4, 3), 5))
    assert all(ours.equal(theirs) for pair in zip(tens, own, strict=True) for ours, theirs in zip(*pair, strict=True))
    assert {len(labels) for _, labels in eights} == {8}
    for column in (0, 1):
        assert torch.cat([each[column] for each in eights]).equal(torch.cat([each[column] for each in own])[:40])


def test_the_table_sets_the_arms_beside_globally_shuffled_data():
    about = {"workload": "convnet", "workers": 8, "steps": 936}
    rows = [about | {"method": arm, "seed": 0, "quality": {"accuracy": 0.9 - 0.01 * i}} for i, arm in enumerate(ARMS)]
    lines = table(rows)
    assert len(lines) == 2 + len(ARMS)
    assert "+0.000" in lines[2]
    assert "-4.000" in lines[-1]
