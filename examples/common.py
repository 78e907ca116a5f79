"""Common to the examples: options, start-up and end."""

import argparse
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import gossamer
from gossamer.algorithms import registry

ALGORITHMS = {name.lower(): algorithm for name, algorithm in registry().items()}

_totals: dict[torch.device, torch.Tensor] = {}


def positive(text: str) -> int:
    """A number of steps, for argparse."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def option_parser(description: str | None, steps: int | None, eval_every: int) -> argparse.ArgumentParser:
    """The options of every example."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", default="gossip", choices=["none", "ddp", *ALGORITHMS], help="none: every rank alone")
    parser.add_argument("--wire", choices=["fp32", "fp16", "bf16"], help="precision on the wire; the method's own by default")
    parser.add_argument("--steps", type=int, default=steps, help="stop after so many steps")
    parser.add_argument("--seconds", type=float, help="stop at the first evaluation after so many seconds of training")
    parser.add_argument("--eval-every", type=positive, default=eval_every, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--log-to", metavar="FILE", default="-", help="JSON lines from rank 0; standard output by default")
    parser.add_argument("--save-to", metavar="FILE", type=Path, help="the trained model's state dict")
    return parser


def chosen_algorithm(options: argparse.Namespace) -> gossamer.Algorithm:
    """The algorithm that ``--method`` and ``--wire`` name."""
    algorithm = ALGORITHMS[options.method]
    if options.wire is None:
        return algorithm()
    if "wire" not in {field.name for field in fields(algorithm)}:
        raise SystemExit(f"--wire: {algorithm.__name__} has no choice of wire")
    return algorithm(wire=options.wire)


def start(options: argparse.Namespace) -> tuple[int, int, torch.device]:
    """Join the process group that the launcher describes; returns rank, world size and device."""
    if options.wire and options.method in ("none", "ddp"):
        raise SystemExit(f"--wire is for gossamer's algorithms, not for --method {options.method}")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    elif options.method == "ddp":  # DDP wants a process group even in a world of one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = torch.device(options.device)
    return (dist.get_rank(), dist.get_world_size(), device) if dist.is_initialized() else (0, 1, device)


def consensus(replica: gossamer.Replica | None) -> AbstractContextManager[Any]:
    """Where replicas may differ: inside, the model is their average."""
    return replica.consensus() if replica is not None else nullcontext()


def mean_over_ranks(value: float, device: torch.device) -> float:
    """The mean of a number that every rank has."""
    if not dist.is_initialized():
        return value
    # One tensor for all calls: a thread of the process group may let go of it later than this one. It needs the
    # interpreter if it is the last to do so, and at the end of a run the interpreter may be gone: the process aborts.
    total = _totals.setdefault(device, torch.zeros(1, dtype=torch.float64, device=device))
    dist.all_reduce(total.fill_(value))
    return float(total.item()) / dist.get_world_size()


def finish(options: argparse.Namespace, rank: int, net: nn.Module, replica: gossamer.Replica | None) -> None:
    """Save the model if that is wanted, and leave."""
    with consensus(replica):
        if options.save_to and rank == 0:
            torch.save(net.state_dict(), options.save_to)
    if replica is not None:
        replica.close()


def leave() -> None:
    """End the process group, after all that used it is gone: DDP's last reference to it can wait for itself for ever.

    Among several, end the process with it: a thread of the group that still lets go of something would ask for the
    interpreter while that is taken down, and the process would abort at its very end.
    """
    if not dist.is_initialized():
        return
    alone = dist.get_world_size() == 1
    dist.destroy_process_group()
    if not alone:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
