"""How many files of the library one steady step enters: a reader who follows a step reads so many."""

import sys
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import gossamer

ROOT = Path(gossamer.__file__).parent
NETWORK = {"comm/loopback.py", "comm/loopback_world.py", "comm/generators.py"}
"""Stand in for the network."""


def files_of_a_step(algorithm: gossamer.Algorithm) -> set[str]:
    """The files that two ranks enter in their fifth step, from ``zero_grad()`` to the end of ``step()``."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            entered.add(path.relative_to(ROOT).as_posix())

    def train(_: int) -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(5):
            if step == 4:
                sys.setprofile(note)  # of this thread alone, and so of one rank
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        sys.setprofile(None)
        replica.close()

    gossamer.loopback(train, 2)
    return entered - NETWORK


@pytest.mark.parametrize(("algorithm", "limit"), [(gossamer.AllReduce(), 12), (gossamer.Gossip(), 15)], ids=repr)
def test_a_step_enters_no_more_files(algorithm: gossamer.Algorithm, limit: int) -> None:
    entered = files_of_a_step(algorithm)
    assert len(entered) > 1  # something was seen
    assert len(entered) <= limit, sorted(entered)
