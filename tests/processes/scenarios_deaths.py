"""Scenarios: a process ends in mid-training, in one of several ways; the others say what they were told, and end too.

Each is a script of its own: what it raises ends its process, and nothing is closed by hand.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer import AllReduce, Gossip
from gossamer.algorithms import all_reduce
from gossamer.comm.torch import board as failure_board
from processes.scenarios_features import mlp, numbers
from processes.worker import Here, ends_the_process, threads

STEP = 4
"""The step in which the victim ends."""


class Ends(torch.autograd.Function):
    """Does something in the middle of a backward pass, after the last layer's bucket was sent."""

    action: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Ends.action()
        return grad


def make(here: Here, **options: Any) -> tuple[nn.Module, SGD, gossamer.Replica]:
    model = nn.Sequential(mlp(), nn.Linear(3, 3).double())
    optimizer = SGD(model.parameters(), lr=0.1)
    kind = {"AllReduce": AllReduce, "Ring": AllReduce, "Gossip": Gossip}[here.argument("algorithm")]
    if here.argument("algorithm") == "Ring":
        all_reduce.SMALL = 0  # nothing is gathered
    return model, optimizer, gossamer.replicate(model, optimizer, kind(bucket_bytes=16), **options)


def train(here: Here, model: nn.Module, optimizer: SGD, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model[1](Ends.apply(model[0](numbers(here, step, 8, 10)))).square().mean().backward()
        optimizer.step()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ArithmeticError("the user's own mistake")


def script(here: Here, name: str, body: Callable[[], None]) -> None:
    """Run a script's body; saves what it raises, and when."""
    try:
        body()
    except BaseException as error:
        told = {"kind": type(error).__name__, "text": str(error), "end": time.time()}
        here.save({name: {"value": told, "error": "", "traceback": "", "seconds": 0.0}})
        raise


@ends_the_process
def dies(here: Here) -> None:
    """The victim is killed, or raises, half-way through its backward pass."""
    model, optimizer, _ = make(here)
    train(here, model, optimizer, range(STEP))
    if here.rank == int(here.argument("victim")):

        def action() -> None:
            here.mark()
            (kill if here.argument("way") == "kill" else fail)()

        Ends.action = staticmethod(action)
    script(here, "dies", lambda: train(here, model, optimizer, range(STEP, 400)))


@ends_the_process
def ends_early(here: Here) -> None:
    """The victim's data end, and so does its script, as scripts end."""
    model, optimizer, _ = make(here)
    victim = here.rank == int(here.argument("victim"))
    script(here, "ends_early", lambda: train(here, model, optimizer, range(STEP if victim else 400)))
    here.mark()
    dist.destroy_process_group()


@ends_the_process
def never_comes(here: Here) -> None:
    """The victim's script has a mistake in the line that calls replicate()."""

    def body() -> None:
        model = mlp()
        if here.argument("before") == "a replica":  # which is closed again: what it could say is said
            gossamer.replicate(model, SGD(model.parameters(), lr=0.1), AllReduce()).close()
        if here.rank == int(here.argument("victim")):
            here.mark()
            AllReduce(wirre="fp16")
        gossamer.replicate(model, SGD(model.parameters(), lr=0.1), AllReduce())

    script(here, "never_comes", body)


@ends_the_process
def is_killed_before_replicate(here: Here) -> None:
    """After init_process_group, before anything of gossamer's: nobody has a word of it. Another rank is merely late."""
    victim = here.rank == int(here.argument("victim"))
    dist.barrier()  # all are connected
    if victim:
        here.mark()
        kill()
    if here.rank == int(here.argument("late")):
        time.sleep(15)
    script(here, "is_killed_before_replicate", lambda: make(here))


@ends_the_process
def waits_for_rank_2(here: Here) -> None:
    """Rank 2 stands still for as long as the test wants it to; the test does something meanwhile."""
    model, optimizer, _ = make(here, timeout=float(here.argument("timeout")))
    train(here, model, optimizer, range(STEP))
    if here.rank == 2:
        here.mark()
    here.say("training")
    if here.rank == 2 and here.argument("pause") != "0":
        time.sleep(float(here.argument("pause")))
    script(here, "waits_for_rank_2", lambda: train(here, model, optimizer, range(STEP, int(here.argument("steps")))))
    here.say("done")


@ends_the_process
def gives_up(here: Here) -> None:
    """Rank 2 is busy for long; the others give up after two seconds, tidy up as scripts do, and end."""
    model, optimizer, replica = make(here, timeout=2.0)
    train(here, model, optimizer, range(STEP))
    here.mark()
    if here.rank == 2:
        time.sleep(float(here.argument("busy")))
    try:
        script(here, "gives_up", lambda: train(here, model, optimizer, range(STEP, 400)))
    finally:
        if here.argument("tidy") == "yes":
            replica.close()
        dist.destroy_process_group()


@ends_the_process
def is_interrupted(here: Here) -> None:
    """Rank 2 is busy; the test sends Ctrl-C to the others, which wait (in an exchange, or in replicate())."""
    where = here.argument("where")
    failure_board.WARN_AFTER = 60.0
    if where == "replicate" and here.rank == 2:
        here.say("busy")
        time.sleep(60)

    def body() -> None:
        here.say("waiting" if where == "replicate" else "starting")
        model, optimizer, _ = make(here)
        train(here, model, optimizer, range(STEP))
        if here.rank == 2:
            here.say("busy")
            time.sleep(60)
        here.say("waiting")
        train(here, model, optimizer, range(STEP, 400))

    script(here, "is_interrupted", body)


@ends_the_process
def ends_well(here: Here) -> None:
    """An ordinary script; it closes nothing, and gossip is still under way when it ends. Rank 0 may end first or last."""
    model, optimizer, _ = make(here)
    train(here, model, optimizer, range(STEP))
    order = here.argument("order")
    time.sleep(1.0 if (order == "last") == (here.rank == 0) else 0.0)
    if order == "destroyed":
        dist.destroy_process_group()


@ends_the_process
def leaves_nothing(here: Here) -> list[str]:
    """A script that tidies up; the names of the threads that are left."""
    importlib.import_module("torch.distributed.nn.functional")  # as an optimizer's first step does by way of torch._dynamo
    model, optimizer, replica = make(here)
    train(here, model, optimizer, range(STEP))
    replica.close()
    dist.barrier()
    dist.destroy_process_group()
    end = time.monotonic() + 10.0  # one that was joined is listed for a moment longer
    while any("gloo" in name for name in threads()) and time.monotonic() < end:
        time.sleep(0.02)
    return threads()


@ends_the_process
def speaks(here: Here) -> None:
    """With logging turned on, rank 0 says what is replicated; the others are quiet."""
    import logging

    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    model, optimizer, _ = make(here)
    train(here, model, optimizer, range(STEP))
