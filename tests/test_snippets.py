"""What README.md and docs show runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gossamer

ROOT = Path(__file__).parent.parent


def snippet(page: str, word: str) -> str:
    """The only block of a page that has this word."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [block for block in blocks if word in block]
    return str(found)


def test_the_prediction_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(snippet("docs/choosing.md", "step_time"), "docs/choosing.md", "exec"), {})
    exact, gossip = (float(line.split()[-1]) for line in capsys.readouterr().out.splitlines())
    assert gossip < exact


def test_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand, in the order that docs/checkpoints.md shows."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    kept = [parameter.detach().clone() for parameter in model.parameters()]
    saving, going_on = snippet("docs/checkpoints.md", "torch.load").split("# every rank, to go on\n")
    names: dict[str, Any] = {"gossamer": gossamer, "torch": torch, "rank": 0}
    exec(compile(saving, "checkpoints.md", "exec"), names | {"model": model, "optimizer": optimizer, "replica": replica})
    other = nn.Linear(3, 2)
    names |= {
        "model": other,
        "optimizer": torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9),
        "algorithm": gossamer.Gossip(),
    }
    exec(compile(going_on, "checkpoints.md", "exec"), names)
    assert names["replica"].step == 1
    assert all(torch.equal(now, then) for now, then in zip(other.parameters(), kept, strict=True))


def test_how_checkpoints_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of docs/checkpoints.md, started again: it goes on where it was."""
    monkeypatch.chdir(tmp_path)
    code = compile(snippet("docs/checkpoints.md", "for epoch").replace("...  # train", "trained.append(epoch)"), "page", "exec")
    trained: list[int] = []
    for _ in range(2):
        model = nn.Linear(3, 2)
        exec(code, {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "trained": trained})
    assert trained == list(range(10))
