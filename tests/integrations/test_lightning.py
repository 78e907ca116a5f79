"""``GossamerStrategy`` in Lightning's Trainer: two processes, against Lightning's DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ranks import HERE, run

pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed (pip install '.[integrations]')")

SCRIPT = HERE / "train_lightning.py"


def apart(one: list[float], other: list[float]) -> float:
    return (torch.tensor(one) - torch.tensor(other)).abs().max().item()


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def train(tmp_path: Path, kind: str, *options: str) -> list[Any]:
    folder = tmp_path / f"{kind}-{len(options)}"
    folder.mkdir(exist_ok=True)
    return run(SCRIPT, tmp_path, kind, str(folder), *options)


def test_the_exact_one_trains_as_ddp_does_and_resumes(tmp_path: Path) -> None:
    """Eight batches of each rank in an epoch, two to a step, clipped."""
    theirs, ours = train(tmp_path, "ddp"), train(tmp_path, "exact")
    assert ours[0]["steps"] == ours[0]["exchanges"] == 2 * 4
    assert ours[0]["weights"] == ours[1]["weights"]
    assert apart(ours[0]["weights"], theirs[0]["weights"]) < 1e-12
    assert apart(flat(ours[0]["validated"]), flat(theirs[0]["validated"])) < 1e-12
    went_on = train(tmp_path, "exact", str(tmp_path / "exact-0" / "epoch=1.ckpt"))
    whole = train(tmp_path, "exact", "whole", "once")
    assert went_on[0]["weights"] == whole[0]["weights"]
    assert went_on[0]["steps"] == 16


@pytest.mark.parametrize("kind", ["exact", "gossip"])
def test_what_a_callback_unfreezes_is_replicated_from_then_on(tmp_path: Path, kind: str) -> None:
    ours = train(tmp_path, kind, "unfreeze")
    first, last = ours[0]["validated"]
    assert first != last, "the first layer trains in the second epoch"
    assert (ours[0]["own"] == ours[1]["own"]) is (kind == "exact")
    assert ours[0]["weights"] == ours[1]["weights"]


def test_gossip_validates_and_saves_the_average_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    ours = train(tmp_path, "gossip")
    assert ours[0]["exchanges"] == 8
    assert ours[0]["own"] != ours[1]["own"]
    assert ours[0]["weights"] == ours[1]["weights"], "after fit() the module is the average"
    assert ours[0]["validated"] == ours[1]["validated"], "validated is the average"
    assert ours[0]["saved"]["net.0.weight"] == ours[0]["validated"][-1]
    went_on = train(tmp_path, "gossip", str(tmp_path / "gossip-0" / "epoch=1.ckpt"))
    whole = train(tmp_path, "gossip", "whole", "once")
    assert [each["own"] for each in went_on] == [each["own"] for each in whole]
