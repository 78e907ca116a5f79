"""A training script for DDP works after one line is changed and one import added."""

import difflib
from pathlib import Path

import pytest
import torch

from integrations.ranks import HERE, run

SCRIPT = HERE / "nano.py"


def changed(folder: Path, algorithm: str) -> Path:
    """The script with gossamer in place of DDP."""
    before = SCRIPT.read_text()
    after = before.replace(
        "model = DDP(model)", f"model = gossamer.DistributedDataParallel(model, optimizer, gossamer.{algorithm})"
    )
    after = after.replace("import torch.nn as nn\n", "import torch.nn as nn\nimport gossamer\n")
    lines = [line for line in difflib.unified_diff(before.splitlines(), after.splitlines(), n=0) if line[:1] in "+-"]
    assert len(lines) - 2 == 3, "one line is changed and one is added"
    place = folder / "changed.py"
    place.write_text(after)
    return place


def apart(one: dict[str, list[float]], other: dict[str, list[float]]) -> float:
    return (torch.tensor(one["weights"]) - torch.tensor(other["weights"])).abs().max().item()


def test_a_script_in_the_style_of_nano_gpt_trains_as_with_ddp_and_resumes(tmp_path: Path) -> None:
    """Six steps of two passes, of which the first is not synchronised; saved; six more in new processes."""
    script = changed(tmp_path, "AllReduce()")
    for options in ((), ("--resume",)):
        ends = []
        for name, file in (("ddp", SCRIPT), ("gossamer", script)):
            (tmp_path / name).mkdir(exist_ok=True)
            ends.append(run(file, tmp_path, str(tmp_path / name), *options))
        (theirs, _), (ours, others) = ends
        assert ours["weights"] == others["weights"]
        assert apart(theirs, ours) < 1e-9
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-9)
        assert ours["keys"] == theirs["keys"]
        assert ours["exchanges"] == 6


@pytest.mark.slow
def test_the_same_script_gossips(tmp_path: Path) -> None:
    ours, others = run(changed(tmp_path, "Gossip()"), tmp_path, str(tmp_path))
    assert ours["exchanges"] == 6
    assert 0 < apart(ours, others) < 0.1
