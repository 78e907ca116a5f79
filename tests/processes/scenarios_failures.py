"""Scenarios: what goes wrong without ending a process. Every rank returns what it was told, and after how long."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from gossamer import AllReduce, Gossip
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_reduce
from gossamer.comm.torch import board as failure_board
from gossamer.state import State
from processes.scenarios_features import mlp, numbers
from processes.worker import Here


@dataclass
class Told:
    """What a rank raised, and when it did the wrong thing (or would have)."""

    kind: str
    text: str
    begin: float
    end: float
    warnings: Sequence[str] = ()


def told(action: Callable[[], Any]) -> dict[str, Any]:
    """What an action raises, which must be an error of gossamer's."""
    begin, kind, text = time.time(), "nothing", ""
    try:
        action()
    except gossamer.GossamerError as error:
        kind, text = type(error).__name__, str(error)
    return {"kind": kind, "text": text, "begin": begin, "end": time.time()}


def small(algorithm: Algorithm | None = None) -> Algorithm:
    return algorithm or AllReduce(bucket_bytes=2048)


def begin(here: Here, algorithm: Algorithm | None = None, **options: Any) -> tuple[nn.Module, Optimizer, Callable[[int], None]]:
    """A replicated model that has trained for two steps, and the function for one more."""
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    here.replicate(model, optimizer, small(algorithm), **options)

    def train(step: int) -> None:
        optimizer.zero_grad()
        model(numbers(here, step, 8, 10)).square().mean().backward()
        optimizer.step()

    train(0)
    train(1)
    return model, optimizer, train


def many(train: Callable[[int], None]) -> Callable[[], None]:
    """Train on and on."""

    def body() -> None:
        for step in range(2, 40):
            train(step)

    return body


# -- ranks that differ ----------------------------------------------------------------------------------------------


def start(here: Here, *, odd: dict[str, Any], rank: int | None = 1, **usual: Any) -> dict[str, Any]:
    """Replicate with the usual arguments, but with some ``odd`` ones on one rank (or on all)."""
    chosen = {"model": mlp, "algorithm": None, "optimizer": lambda m: AdamW(m.parameters())} | usual
    if rank is None or here.rank == rank:
        chosen |= odd
    model, algorithm = chosen.pop("model")(), chosen.pop("algorithm")
    optimizer = chosen.pop("optimizer")(model)
    return told(lambda: here.replicate(model, optimizer, algorithm, **chosen))


def different_algorithms(here: Here) -> dict[str, Any]:
    return start(here, odd={"algorithm": Gossip()})


def different_fields(here: Here) -> dict[str, Any]:
    return start(here, odd={"algorithm": AllReduce(wire="fp16")})


def different_shapes(here: Here) -> dict[str, Any]:
    return start(here, odd={"model": lambda: nn.Sequential(nn.Linear(10, 41), nn.Linear(41, 3))})


def different_names(here: Here) -> dict[str, Any]:
    return start(here, odd={"model": lambda: nn.ModuleDict({"other": mlp()})})


def different_dtypes(here: Here) -> dict[str, Any]:
    return start(here, odd={"model": lambda: mlp().float()})


def different_freezing(here: Here) -> dict[str, Any]:
    def frozen() -> nn.Module:
        model = mlp()
        model[0].bias.requires_grad_(False)
        return model

    return start(here, odd={"model": frozen})


def different_optimizers(here: Here) -> dict[str, Any]:
    return start(here, odd={"optimizer": lambda m: SGD(m.parameters(), lr=0.1)})


def different_buffers(here: Here) -> dict[str, Any]:
    return start(here, odd={"buffers": "local"})


def different_scalers(here: Here) -> dict[str, Any]:
    return start(here, odd={"scaler": torch.amp.GradScaler("cpu")})


def wrong_timeout(here: Here) -> dict[str, Any]:
    return start(here, odd={"timeout": -1})


def wrong_kind_of_timeout(here: Here) -> dict[str, Any]:
    return start(here, odd={"timeout": "soon"})


def wrong_buffers(here: Here) -> dict[str, Any]:
    return start(here, odd={"buffers": "sometimes"})


def wrong_scaler(here: Here) -> dict[str, Any]:
    return start(here, odd={"scaler": 65536.0})


def class_instead_of_algorithm(here: Here) -> dict[str, Any]:
    return start(here, odd={"algorithm": AllReduce})


def foreign_optimizer_on_one_rank(here: Here) -> dict[str, Any]:
    return start(here, odd={"optimizer": lambda m: AdamW(mlp().parameters())})


def foreign_optimizer_on_all_ranks(here: Here) -> dict[str, Any]:
    return start(here, odd={"optimizer": lambda m: AdamW(mlp().parameters())}, rank=None)


def optimizer_with_some_parameters(here: Here) -> dict[str, Any]:
    return start(here, odd={"optimizer": lambda m: AdamW(m[0].parameters())})


def wrapped_in_ddp(here: Here) -> dict[str, Any]:
    return start(here, odd={"model": lambda: DistributedDataParallel(mlp())}, rank=None)


def wrapped_in_fsdp1(here: Here) -> dict[str, Any]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    device = torch.device("cpu")
    return start(here, odd={"model": lambda: FullyShardedDataParallel(mlp(), device_id=device)}, rank=None)


def error_of_another_kind_in_replicate(here: Here) -> dict[str, Any]:
    """Rank 1 has no room for the buckets, or the like: no error of gossamer's."""
    if here.rank != 1:
        return told(lambda: begin(here))
    register = torch.optim.Optimizer.register_step_post_hook
    torch.optim.Optimizer.register_step_post_hook = out_of_memory  # type: ignore[method-assign, assignment]
    try:
        return told(lambda: begin(here))
    except MemoryError:
        return told(lambda: None)
    finally:
        torch.optim.Optimizer.register_step_post_hook = register  # type: ignore[method-assign]


def out_of_memory(optimizer: torch.optim.Optimizer, hook: Any) -> None:
    raise MemoryError("on purpose")


def replicated_twice(here: Here) -> dict[str, Any]:
    model, optimizer, _ = begin(here)
    return told(lambda: here.replicate(model, optimizer))


def late_at_the_start(here: Here) -> dict[str, Any]:
    if here.rank == 2:
        time.sleep(5.0)
    return start(here, odd={}, timeout=3.0)


# -- a loop that goes wrong -----------------------------------------------------------------------------------------


def parameter_added_on_one_rank(here: Here) -> dict[str, Any]:
    model, _, train = begin(here)
    if here.rank == 1:
        model[0].register_parameter("extra", nn.Parameter(torch.zeros(3)))
    return told(many(train))


def parameter_replaced_on_all_ranks(here: Here) -> dict[str, Any]:
    model, _, train = begin(here)
    model[0].bias = nn.Parameter(torch.zeros(40, dtype=torch.float64))
    return told(many(train))


def layer_replaced_with_gossip(here: Here) -> dict[str, Any]:
    model, _, train = begin(here, Gossip(bucket_bytes=2048))
    if here.rank == 1:
        model[2] = nn.Linear(40, 40).double()
    return told(many(train))


def group_added_to_the_optimizer(here: Here) -> dict[str, Any]:
    _, optimizer, train = begin(here)
    if here.rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return told(many(train))


def model_converted(here: Here) -> dict[str, Any]:
    """Rank 1 changes a layer's dtype between backward and step."""
    model, optimizer, train = begin(here)

    def body() -> None:
        model(numbers(here, 2, 8, 10)).square().mean().backward()
        if here.rank == 1:
            model[0].half()
        optimizer.step()
        many(train)()

    return told(body)


def step_without_backward(here: Here, algorithm: Algorithm | None = None) -> dict[str, Any]:
    """On rank 1 the loss does not depend on any parameter."""
    _, optimizer, train = begin(here, algorithm)

    def body() -> None:
        if here.rank != 1:
            many(train)()
        optimizer.zero_grad()
        loss = torch.zeros(3, requires_grad=True).sum()
        loss.backward()
        optimizer.step()

    return told(body)


def no_parameter_reached(here: Here) -> dict[str, Any]:
    return step_without_backward(here)


def no_parameter_reached_with_gossip(here: Here) -> dict[str, Any]:
    return step_without_backward(here, Gossip(bucket_bytes=2048))


def forgotten_no_sync(here: Here) -> dict[str, Any]:
    """Rank 1 steps after a backward inside no_sync() only."""
    _, _, train = begin(here)

    def body() -> None:
        with here.replicas[0].no_sync():
            train(2)

    return told(body if here.rank == 1 else many(train))


def data_end_early(here: Here) -> dict[str, Any]:
    """Rank 1 has no more data, and closes its replica."""
    _, _, train = begin(here)
    if here.rank == 1:
        here.close()
        return told(lambda: None)
    return told(many(train))


class Raises(torch.autograd.Function):
    """Raises in its backward, when told to."""

    now: ClassVar[bool] = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        if Raises.now:
            raise ArithmeticError("the user's own")
        return grad


def error_in_backward(here: Here) -> dict[str, Any]:
    """Rank 1 raises half-way through its backward, catches that, and goes on as if nothing had been."""
    model = nn.Sequential(mlp(), nn.Linear(3, 3).double())
    optimizer = AdamW(model.parameters())
    here.replicate(model, optimizer, small())

    def train(step: int) -> None:
        optimizer.zero_grad()
        model[1](Raises.apply(model[0](numbers(here, step, 8, 10)))).square().mean().backward()
        optimizer.step()

    def body() -> None:
        for step in range(40):
            Raises.now = here.rank == 1 and step == 3
            try:
                train(step)
            except ArithmeticError:
                assert step == 3

    return told(body)


@dataclass(frozen=True, kw_only=True)
class Faulty(Algorithm, register=False):
    """An exact all-reduce with a mistake on rank 1, at step 2, in bucket ``where``."""

    where: int = 0
    mistake: str = "raise"

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        wrong = ctx.rank == 1 and ctx.step == 2 and bucket.index == self.where
        if wrong and self.mistake == "raise":
            raise ZeroDivisionError("a mistake in the algorithm")
        mean = yield from all_reduce(bucket.flat / ctx.world)
        return mean[:-1] if wrong else mean


def algorithm_raises_in_first_bucket(here: Here) -> dict[str, Any]:
    return told(many(begin(here, Faulty(bucket_bytes=1))[2]))


def algorithm_raises_in_second_bucket(here: Here) -> dict[str, Any]:
    return told(many(begin(here, Faulty(bucket_bytes=1, where=1))[2]))


class FaultyPrompt(Faulty, register=False):
    """The same on the main thread; or something is started after a wait."""

    @property
    def traits(self) -> Traits:
        return Traits(prompt=True)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        mean = yield from super().exchange(bucket, state, ctx)
        if ctx.step == 2 and self.mistake == "late":
            yield from all_reduce(mean)
        return mean


def prompt_algorithm_raises(here: Here) -> dict[str, Any]:
    return told(many(begin(here, FaultyPrompt(bucket_bytes=1, where=1))[2]))


def prompt_algorithm_starts_late(here: Here) -> dict[str, Any]:
    return told(many(begin(here, FaultyPrompt(bucket_bytes=1, mistake="late"))[2]))


def algorithm_returns_the_wrong_shape(here: Here) -> dict[str, Any]:
    return told(many(begin(here, Faulty(bucket_bytes=1, where=1, mistake="shape"))[2]))


def sparse_gradient(here: Here) -> dict[str, Any]:
    model = nn.Sequential(nn.Embedding(10, 3))
    optimizer = SGD(model.parameters(), lr=0.1)
    here.replicate(model, optimizer)
    model[0].sparse = True  # where replicate() has not seen it
    return told(lambda: model(torch.tensor([1, 2])).sum().backward())


def state_of_another_run(here: Here) -> dict[str, Any]:
    """Rank 1 loads a state that was saved by another algorithm."""
    begin(here)
    replica = here.replicas[0]
    state = replica.state_dict()
    if here.rank == 1:
        state["algorithm"] = "Gossip()"
    return told(lambda: replica.load_state_dict(state))


def state_of_another_step(here: Here) -> dict[str, Any]:
    """Rank 1 loads a state that was saved later than the others' (with another plan, that would end in garbage)."""
    _, _, train = begin(here)
    replica = here.replicas[0]
    early = replica.state_dict()
    train(2)
    late = replica.state_dict()
    return told(lambda: replica.load_state_dict(late if here.rank == 1 else early))


def lanes() -> set[threading.Thread]:
    """Those of earlier scenarios among them: a rank that left in peace may still wait for one that failed."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("gossamer-lane")}


def close_after_a_failure(here: Here) -> dict[str, Any]:
    """What is under way when a run fails does not make close() wait, and ends soon."""
    before = lanes()
    _, _, train = begin(here, Gossip(bucket_bytes=2048), timeout=4.0)
    if here.rank == 1:
        time.sleep(6.0)
    report = told(many(train))
    moment = time.time()
    told(here.replicas[0].close)
    assert time.time() - moment < 1.0
    while lanes() - before:
        # Without the cut of its connections it would wait for a minute.
        assert time.time() - moment < 5.0, "a lane still waits for the network"
        time.sleep(0.01)
    return report


def used_after_close(here: Here) -> dict[str, Any]:
    begin(here)
    here.replicas[0].close()
    return told(here.replicas[0].state_dict)


# -- late ranks -----------------------------------------------------------------------------------------------------


@contextmanager
def warnings_after(seconds: float) -> Iterator[list[str]]:
    """The warnings of gossamer, which come after ``seconds``."""
    kept: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            kept.append(record.getMessage())

    handler, before = Keep(logging.WARNING), failure_board.WARN_AFTER
    logger = logging.getLogger("gossamer")
    logger.addHandler(handler)
    failure_board.WARN_AFTER, logger.propagate = seconds, False
    try:
        yield kept
    finally:
        logger.removeHandler(handler)
        failure_board.WARN_AFTER, logger.propagate = before, True


def merely_late(here: Here, algorithm: Algorithm | None = None, after: float = 2.0, sleep: float = 5.0) -> dict[str, Any]:
    """Rank 2 takes a break in mid-training: a warning that names it, and training goes on."""
    with warnings_after(after) as kept:
        _, _, train = begin(here, algorithm)
        kept.clear()
        if here.rank == 2:
            time.sleep(sleep)
        report = told(lambda: [train(step) for step in range(2, 6)])
    return report | {"warnings": kept}


def late(here: Here) -> dict[str, Any]:
    return merely_late(here)


def late_with_gossip(here: Here) -> dict[str, Any]:
    return merely_late(here, Gossip(bucket_bytes=2048))


def late_by_twelve_seconds(here: Here) -> dict[str, Any]:
    return merely_late(here, after=failure_board.WARN_AFTER, sleep=12.0)


def too_late(here: Here) -> dict[str, Any]:
    """Rank 2 comes after the timeout: every rank is told, rank 2 when it comes."""
    _, _, train = begin(here, timeout=4.0)
    if here.rank == 2:
        time.sleep(6.0)
    return told(many(train))


def too_late_in_a_ring(here: Here) -> dict[str, Any]:
    """The main thread itself waits for the operation."""
    _, _, train = begin(here, FaultyPrompt(where=-1), timeout=4.0)
    if here.rank == 2:
        time.sleep(6.0)
    return told(many(train))


def consensus_on_one_rank(here: Here) -> dict[str, Any]:
    """Rank 1 evaluates as one does with DDP, alone."""
    with warnings_after(2.0):
        _, _, train = begin(here, Gossip(bucket_bytes=2048))

        def go_on() -> None:
            if here.rank == 1:
                with here.replicas[-1].consensus():
                    pass
            many(train)()

        return told(go_on)


def forward_on_one_rank(here: Here) -> dict[str, Any]:
    """Rank 1 evaluates in training mode, alone: nothing is synchronised there."""
    with warnings_after(2.0):
        model = nn.Sequential(nn.Linear(10, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).double()
        optimizer = SGD(model.parameters(), lr=0.1)
        here.replicate(model, optimizer, small())

        def body() -> None:
            for step in range(40):
                optimizer.zero_grad()
                if here.rank == 1 and step == 2:
                    model(numbers(here, 99, 8, 10))
                model(numbers(here, step, 8, 10)).square().mean().backward()
                optimizer.step()

        return told(body)


def late_in_a_ring(here: Here) -> dict[str, Any]:
    _, _, train = begin(here, FaultyPrompt(where=-1))
    if here.rank == 2:
        time.sleep(2.5)
    return told(lambda: train(2))


def too_late_with_gossip(here: Here) -> dict[str, Any]:
    _, _, train = begin(here, Gossip(bucket_bytes=2048), timeout=4.0)
    if here.rank == 2:
        time.sleep(6.0)
    return told(many(train))
