"""``GossamerStrategy`` in Fabric: two processes, against Fabric's DDP."""

from pathlib import Path

import pytest
import torch

from integrations.ranks import HERE, run

pytest.importorskip("lightning_fabric", reason="lightning_fabric is not installed (pip install '.[integrations]')")

SCRIPT = HERE / "train_fabric.py"


def test_fabric_trains_saves_and_resumes(tmp_path: Path) -> None:
    """Eight steps of two passes, the first of which is not synchronised: exact as with DDP; gossip resumes bit for bit."""
    theirs, ours = (run(SCRIPT, tmp_path, kind, str(tmp_path)) for kind in ("ddp", "exact"))
    assert ours[0]["exchanges"] == 8
    assert ours[0]["weights"] == ours[1]["weights"]
    assert (torch.tensor(ours[0]["weights"]) - torch.tensor(theirs[0]["weights"])).abs().max() < 1e-12
    whole = run(SCRIPT, tmp_path, "gossip", str(tmp_path))
    assert whole[0]["own"] != whole[1]["own"]
    assert whole[0]["weights"] == whole[1]["weights"]
    went_on = run(SCRIPT, tmp_path, "gossip", str(tmp_path), "resume")
    assert [each["own"] for each in went_on] == [each["own"] for each in whole]
