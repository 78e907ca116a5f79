"""One rank of the study of faults: trains, is killed at a moment if it is the victim, and says what it was told.

Arguments: algorithm, victim, moment (of a kill; "lab" where the lab causes the fault when the victim writes ``training``), the
folder of checkpoints.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer import checkpoint

TIMEOUT = 12.0
"""Seconds: of exchanges and of the process group."""

STEPS, AT = 30, 5
SAVED = 3
"""The step of a checkpoint that is complete before the one of step ``AT`` is begun."""

SAVING = {name: f"in checkpoint.save, {name}" for name in ("before its file", "amid its file", "before the manifest")}
"""Moments of a save of one rank."""


class Here(torch.autograd.Function):
    """Calls something in the midst of a backward pass, after the last layer's gradients have left."""

    action = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        Here.action()
        return grad


def say(**what: object) -> None:
    """Write a line that the study reads."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def save(folder: str, step: int, call: Callable[[str], None], **what: Any) -> None:
    """A checkpoint of a step; ``call`` is called before this rank's file is written, when it is half there, and when whole."""
    write, rename = torch.save, os.replace

    def half(contents: Any, path: Any) -> None:
        write(contents, path)
        call(SAVING["amid its file"])  # the file lies under its other name

    def renamed(part: Any, path: Any) -> None:
        rename(part, path)
        call(SAVING["before the manifest"])

    call(SAVING["before its file"])
    torch.save, os.replace = cast(Any, half), cast(Any, renamed)
    try:
        checkpoint.save(folder, step, **what)
    finally:
        torch.save, os.replace = write, rename


def main() -> None:
    """Train, and report."""
    name, victim, moment, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    rank = int(os.environ["RANK"])

    def at(where: str) -> None:
        if rank == victim and where == moment:
            say(fault_at=time.time())
            for part in Path(folder).rglob("*.part") if moment == SAVING["amid its file"] else ():
                if part.name.startswith(f"rank{rank}-"):
                    os.truncate(part, part.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    told: dict[str, object] = {"rank": rank, "error": "", "text": ""}
    try:
        train(getattr(gossamer, name), rank == victim, at, folder if moment in SAVING.values() else None)
    except Exception as error:
        told |= {"error": type(error).__name__, "text": str(error)}
    say(**told, end=time.time())
    sys.exit(1 if told["error"] else 0)


def train(algorithm: type, is_victim: bool, call: Callable[[str], None], folder: str | None) -> None:
    """A script as users write it; ``call`` is called with the name of each moment, ``folder`` is where it saves, if it does."""
    call("before init_process_group")
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    head = nn.Linear(256, 64)
    whole = nn.Sequential(model, head)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.01)
    call("before replicate")  # after the seconds that torch's optimizers take to be imported
    replica = gossamer.replicate(whole, optimizer, algorithm(bucket_bytes=2**18), timeout=TIMEOUT)
    for step in range(STEPS):
        optimizer.zero_grad()
        if step == AT and is_victim:
            say(training=True, fault_at=time.time())
        if step == AT:
            Here.action = staticmethod(lambda: call("in backward"))
        hidden: torch.Tensor = cast(Any, Here).apply(model(torch.randn(8, 256)))
        head(hidden).square().mean().backward()
        if step == AT:
            call("before the optimizer's step")
        optimizer.step()
        if step == AT:
            call("after the optimizer's step")
        if folder is not None and step in (SAVED, AT):
            what = {"model": whole, "optimizer": optimizer, "replica": replica}
            save(folder, step, call if step == AT else lambda where: None, **what)
    call("before close")
    replica.close(average=True)
    call("after close")
    dist.barrier()
    dist.destroy_process_group()
    call("after destroy_process_group")


if __name__ == "__main__":
    main()
