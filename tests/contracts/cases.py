"""What the batteries run on: every member of a family in a few configurations, and ways to execute it."""

import dataclasses
import importlib
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import codecs, loopback
from gossamer.algorithms import (
    Algorithm,
    AllReduce,
    ByteGrad,
    ChunkSparse,
    DiLoCo,
    Gossip,
    GossipGraD,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    PowerSGD,
    QuantizedGossip,
    ScatterReduce,
    SparseLoCo,
    after,
    by_size,
    in_parts,
    registry,
    sparta,
    streaming_diloco,
)
from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import Difference, computed
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.bucket_plan import make_layout
from gossamer.buckets import Bucket
from gossamer.codecs import Codec, TopPerChunk
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.sign import Sign
from gossamer.codecs.wire import narrow
from gossamer.comm.loopback import LoopbackRunner, current_runner
from gossamer.comm.ops import Decide, Flow, Start, Wait
from gossamer.state import State

WORLDS = [1, 2, 3, 8]

OFTEN = (2, 3, 4, 5, 7, 8, 12, 16, 24)
EVERY_WORLD = [world if world in OFTEN else pytest.param(world, marks=pytest.mark.slow) for world in range(2, 25)]
"""2 to 24 workers; ``make test`` takes some of each kind: odd, even, prime, powers of two."""

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "odd": [(7,), (3, 5), (), (2, 3, 1, 5)],
    "one": [(1,)],
    "empty": [(0,)],
    "with-empty": [(0, 3), (5,), (0,)],
    "kilo": [(1023,)],
}


def variants(cls: type) -> Iterator[Any]:
    """The defaults, and one instance per value of each ``Literal`` or ``bool`` field."""
    yield cls()
    hints = get_type_hints(cls)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        values = get_args(hint) if get_origin(hint) is Literal else (True, False) if hint is bool else ()
        yield from (cls(**{field.name: value}) for value in values if value != field.default)


def _stands(algorithm: Algorithm) -> bool:
    return getattr(algorithm, "exact_vectors", True)


def plain(**fields: Any) -> list[Algorithm]:
    """Every registered algorithm as it is, and combinations of them, with some fields replaced."""
    return [with_fields(algorithm, **fields) for algorithm in (*(cls() for cls in registry().values()), *combined())]


def combined() -> list[Algorithm]:
    """Other fields and combinations than :func:`variants` finds."""
    four_bits = ScatterReduce(codec=Quantize(bits=4), gather_below=0)
    return [
        four_bits,
        ScatterReduce(codec=Sign(), gather_below=0),
        ScatterReduce(residual="fp32", gather_below=0),
        ChunkSparse(chunk=16, density=0.3, bucket_bytes=200),
        ChunkSparse(chunk=16, density=0.3, codec=Quantize(), warmup=1, ramp=2, bucket_bytes=200),
        after(2, four_bits),
        by_size(100, small=AllReduce(wire="bf16"), large=four_bits),
        LowPrecisionDecentralized(codec=Quantize(bits=4)),
        LowPrecisionDecentralized(codec=Quantize(bits=2, rounding="stochastic"), rate=0.5),
        DiLoCo(averaging=four_bits, momentum=0.5),
        DiLoCo(averaging=Gossip(), momentum=0.5),
        SparseLoCo(averaging=Gathered(codec=TopPerChunk(density=0.3, chunk=64), decay=0.9), keep_unsent=False),
        ScatterReduce(codec=Quantize(bits=4), decay=0.9, gather_below=0),
        Hierarchical(AllReduce(), ranks_per_node=2),
        Hierarchical(ChunkSparse(chunk=16, bucket_bytes=200), ranks_per_node=3),
    ]


def mixed() -> list[Algorithm]:
    """Combinations that move gradients and weights: a single exchange of theirs says little, a training loop does."""
    return [
        after(2, Gossip(), before=ScatterReduce()),
        after(2, AllReduce(), before=Gossip(wire="fp32")),
        after(4, ChunkSparse(chunk=16, density=0.3, bucket_bytes=200), before=PowerSGD(rank=1)),
        by_size(100, small=GossipGraD(), large=Gossip()),
        Hierarchical(after(4, Gossip(), before=ScatterReduce()), inner=ByteGrad(), ranks_per_node=2),
        in_parts(3, Gossip()),
        in_parts(2, Gossip(ahead=1.0)),
        after(2, GossipGraD(ahead=0.5)),
        in_parts(2, GossipGraD()),
        in_parts(2, QuantizedGossip()),
        Hierarchical(in_parts(2, Gossip()), ranks_per_node=2),
        Hierarchical(Gossip(), ranks_per_node=2),
        Hierarchical(Gossip(), inner=ByteGrad(), ranks_per_node=3),
        in_parts(2, DiLoCo(every=1)),
        Hierarchical(DiLoCo(every=2, averaging=ScatterReduce()), ranks_per_node=2),
        after(2, LocalSGD(every=2)),
        streaming_diloco(every=4, fragments=2, delay=3, merge=0.5),
        sparta(DiLoCo(every=3), share=0.1),
        Hierarchical(streaming_diloco(every=4, fragments=2, delay=3), ranks_per_node=2),
        DiLoCo(every=2, averaging=LowPrecisionDecentralized(codec=TopPerChunk(density=0.3, chunk=64))),
        DiLoCo(every=2, lag=2),
        DiLoCo(every=2, lag=2, averaging=Gossip()),
    ]


def algorithms(subject: str | None = None, exact: bool = False, **fields: Any) -> list[Algorithm]:
    """Every registered algorithm in every variant, and combinations of them, with some fields replaced."""
    # A named form of another algorithm (QSGD) is tested as it is, and so is what all lossy ones have in common.
    forms = {cls for cls in registry().values() if any(base in registry().values() for base in cls.__mro__[1:])}
    known = [
        v for cls in registry().values() for v in ([cls()] if cls in forms else variants(cls)) if v.traits.exact or _stands(v)
    ]
    chosen = [a for a in (*known, *combined()) if subject in (None, a.subject) and a.traits.exact >= exact]
    return [with_fields(variant, **fields) for variant in chosen]


def with_fields(algorithm: Algorithm, **fields: Any) -> Algorithm:
    """A copy with some fields replaced; chunks become small enough for the buckets, and times alone for a few steps, in which
    most elements are sent."""
    if isinstance(algorithm, ChunkSparse) and "bucket_bytes" in fields:
        fields["chunk"] = min(algorithm.chunk, fields["bucket_bytes"] // 8)
    if isinstance(algorithm, LocalSGD):
        fields["every"] = 2
    if isinstance(algorithm, SparseLoCo) and algorithm.keep_unsent:
        fields["averaging"] = Gathered(codec=TopPerChunk(density=0.5, chunk=64), clip=True, residual="fp32")
    return dataclasses.replace(algorithm, **fields)


def all_codecs() -> list[Codec]:
    """Every codec of the package in every variant."""
    for module in pkgutil.iter_modules(codecs.__path__):
        importlib.import_module(f"{codecs.__name__}.{module.name}")
    return [codec for cls in descendants(Codec) if cls.__module__.startswith(codecs.__name__) for codec in variants(cls)]


def descendants(cls: type) -> list[Any]:
    """Every concrete class below ``cls``, in the same order in every process (tests that run side by side need that)."""
    below = {c for child in cls.__subclasses__() for c in (child, *descendants(child))}
    # A dataclass with slots is made of another class of the same name, which lives until it is collected.
    there = (c for c in below if getattr(sys.modules.get(c.__module__), c.__qualname__, None) is c)
    concrete = [c for c in there if not getattr(c, "__abstractmethods__", None)]
    return sorted(concrete, key=lambda c: (c.__module__, c.__qualname__))


def own_runner() -> LoopbackRunner:
    """The runner of the rank that calls; only inside ``loopback``."""
    runner = current_runner()
    assert runner is not None
    return runner


# -- one exchange, without a training loop ---------------------------------------------------------------------------


def bucket_of(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: str = "cpu", algorithm: Algorithm | None = None
) -> Bucket:
    """A bucket with one segment per shape; as a replica has it with ``algorithm``, if that is given."""
    tensors = {f"p{i}": torch.empty(s, dtype=dtype, device=device) for i, s in enumerate(shapes)}
    message = None if algorithm is None else algorithm.message_dtype(dtype)
    return Bucket(0, make_layout(tensors, message=message))


def noise(world: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """One tensor per rank."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype) for _ in range(world)]


@dataclasses.dataclass
class Outcome:
    """What one rank has after some exchanges."""

    results: list[Tensor]
    state: State


def exchange(algorithm: Algorithm, inputs: Sequence[Sequence[Tensor]], abort_after: int | None = None) -> list[Outcome]:
    """Run one bucket through successive exchanges in loopback; ``inputs[step][rank]``. Returns one outcome per rank.

    With ``abort_after``, every exchange is first tried once and abandoned after so many commands.
    """

    def body(rank: int) -> Outcome:
        runner, mine = own_runner(), inputs[0][rank]
        bucket = bucket_of([tuple(mine.shape)], mine.dtype, mine.device.type, algorithm)
        outcome = Outcome([], State(bucket.flat))
        for step, tensors in enumerate(inputs):
            bucket.renew()
            if abort_after is not None:
                narrow(bucket.flat, tensors[rank].reshape(-1))
                attempt(runner, algorithm, bucket, outcome.state, step, abort_after)
                bucket.renew()
            narrow(bucket.flat, tensors[rank].reshape(-1))
            result = runner.run(lambda: flow_of(algorithm, bucket, outcome.state, runner, step), f"step {step}")
            outcome.results.append(result.clone())
            settle(algorithm, outcome.state, result)
            assert not any(shares_memory(result, outcome.state[key]) for key in outcome.state), "the result is given away"
        return outcome

    return loopback(body, len(inputs[0]))


def settle(algorithm: Algorithm, state: State, result: Tensor) -> None:
    """What a replica does at the end of a step: gradients that brought something non-finite leave no trace."""
    if algorithm.subject == "weights" or all(
        tensor.isfinite().all() for tensor in (result, *state.drafts()) if tensor.is_floating_point()
    ):
        state.commit()
    else:
        state.rollback()


def gossip(algorithm: Algorithm, tensors: Sequence[Tensor], steps: int) -> list[Tensor]:
    """What weights become, rank by rank, when nothing but ``algorithm`` moves them."""

    def body(rank: int) -> Tensor:
        runner, bucket = own_runner(), bucket_of([tuple(tensors[rank].shape)], tensors[rank].dtype, algorithm=algorithm)
        state, weights = State(bucket.flat), tensors[rank].clone()
        for step in range(steps):
            narrow(bucket.flat, weights)
            weights.add_(runner.run(lambda step=step: flow_of(algorithm, bucket, state, runner, step), f"step {step}"))
            state.commit()
        return weights

    return loopback(body, len(tensors))


def flow_of(algorithm: Algorithm, bucket: Bucket, state: State, runner: LoopbackRunner, step: int) -> Flow[Tensor]:
    """The flow of one bucket at ``step``."""
    result = yield from algorithm.exchange(bucket, state, Context(step, runner.rank, runner.members))
    return computed(result, bucket.layout.dtype) if isinstance(result, Difference) else result


class Aborted(Exception):
    """The network failed, so to speak."""


def attempt(runner: LoopbackRunner, algorithm: Algorithm, bucket: Bucket, state: State, step: int, commands: int) -> None:
    """Start an exchange and abandon it; whatever was kept must be as before."""
    before = kept(state)
    try:
        runner.run(lambda: cut(flow_of(algorithm, bucket, state, runner, step), commands), f"abandoned step {step}")
    except Aborted:
        state.rollback()
    after = kept(state)
    assert before.keys() == after.keys(), "an abandoned exchange was committed"
    assert all(same_bits(before[key], after[key]) for key in before), "an abandoned exchange wrote into kept state"


def kept(state: State) -> dict[str, Tensor]:
    """A copy of what a state holds."""
    return {key: state[key].clone() for key in state}


def cut(flow: Flow[Tensor], commands: int) -> Flow[Tensor]:
    """``flow``, until it has yielded so many commands and wants the next."""
    reply: Any = None
    for _ in range(commands):
        try:
            command = flow.send(reply)
        except StopIteration:
            break
        reply = yield command
    flow.close()
    raise Aborted


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, dtype and every bit (so NaN equals itself)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def shares_memory(a: Tensor, b: Tensor) -> bool:
    """Whether writing one may change the other."""
    return a.numel() > 0 and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def stacked(outcomes: Sequence[Outcome], step: int = -1) -> Tensor:
    """The results of one step, ``(world, n)``."""
    return torch.stack([outcome.results[step] for outcome in outcomes])


# -- what a flow asked for ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassThrough(Algorithm, register=False):
    """A wrapper in five lines."""

    inner: Algorithm

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        return (yield from self.inner.exchange(bucket, state, ctx))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tapped(Algorithm, register=False):
    """Another algorithm, with everything that it yields and returns written down by step and bucket."""

    inner: Algorithm
    tape: dict[tuple[int, int], list[str]] = dataclasses.field(repr=False, compare=False)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        return self._written_down(bucket, self.inner.exchange(bucket, state, ctx), ctx)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.inner.message_dtype(dtype)

    def _written_down(self, bucket: Bucket, flow: Flow[Any], ctx: Context) -> Flow[Any]:
        tape = self.tape.setdefault((ctx.step, bucket.index), [])
        result = yield from tapped(flow, tape)
        tape.append(f"returns {type(result).__name__}{list(result.shape)}")
        return result

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        flow = self.inner.finish(buckets, states, state, ctx)
        return None if flow is None else tapped(flow, self.tape.setdefault((ctx.step, -1), []))


def tap(algorithm: Algorithm, tape: dict[tuple[int, int], list[str]]) -> Algorithm:
    """``algorithm`` with a tape."""
    return Tapped(inner=algorithm, tape=tape)


def tapped(flow: Flow[Any], tape: list[str]) -> Flow[Any]:
    """Pass commands through, and write them down."""
    reply: Any = None
    while True:
        try:
            command = flow.send(reply)
        except StopIteration as stop:
            return stop.value
        tape.append(describe(command))
        reply = yield command


def describe(command: Start | Wait | Decide) -> str:
    """A command in words."""
    if isinstance(command, Start):
        return f"start {command.op}"
    return "wait" if isinstance(command, Wait) else f"decide {command.name}"


# -- a training loop --------------------------------------------------------------------------------------------------


class Oddities(nn.Module):
    """A small model of awkward parameters: odd sizes, a scalar, an empty one, channels-last, tied, unused, frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32, other: torch.dtype | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3, padding=1).to(memory_format=torch.channels_last)
        self.body = nn.Linear(27, 5)
        self.tied = nn.Linear(27, 5)
        self.tied.weight = self.body.weight
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.to(dtype)
        if other is not None:
            self.head.to(other)
        self.hollow = nn.Parameter(torch.zeros(2, 0, dtype=torch.float16))  # a bucket of its own, with nothing in it

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.conv(x)).flatten(1)
        x = torch.tanh(self.body(x) + self.tied(x)) * self.scale * self.frozen + self.empty.sum() + self.hollow.sum()
        return self.head(x.to(self.head.weight.dtype)).square().mean()


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32, size: int = 4) -> Tensor:
    """The data of one rank at one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(size, 2, 3, 3, generator=generator, dtype=torch.float64).to(dtype)


def make_training(
    algorithm: Algorithm | None, seed: int = 0, lr: float = 0.05, **options: Any
) -> tuple[Oddities, torch.optim.Optimizer, gossamer.Replica | None]:
    """The odd model with AdamW (or what the algorithm asks for), replicated unless there is no algorithm."""
    torch.manual_seed(seed)
    model = Oddities(**options)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trainable, lr=lr, eps=1e-3)
    if algorithm is not None and algorithm.traits.takes_momentum:
        optimizer = torch.optim.SGD(trainable, lr=lr, momentum=0.9)
    return model, optimizer, None if algorithm is None else gossamer.replicate(model, optimizer, algorithm)


def train_step(model: Oddities, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    """Forward, backward, update."""
    optimizer.zero_grad()
    model(data).backward()
    optimizer.step()


def weights(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
