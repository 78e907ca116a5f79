"""Golden traces: the operations, bytes and messages of every step, for every algorithm and combination, in loopback.

``python -m contracts.traces`` (in ``tests``) records them anew; the test beside it compares with what is recorded.
"""

import dataclasses
import json
import re
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

import gossamer
from gossamer import AllReduce, ChunkSparse, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Quantize, Sign
from gossamer.comm import digraph
from gossamer.comm.loopback import LoopbackPort

from .cases import algorithms, batch, combined, make_training, mixed, train_step, weights, with_fields

RECORDED = Path(__file__).with_name("traces.json")
WORLDS = [2, 4, 8]
STEPS = 8

Steps = list[str]
"""What one rank did in each step, in words."""


COARSE = ScatterReduce(codec=Quantize(bits=2), exact_vectors=False, residual="fp32", bucket_bytes=200)
SIGNS = ScatterReduce(codec=Sign(block=8), bucket_bytes=200)
SPARSE = ChunkSparse(chunk=16, density=0.3, exact_vectors=False, bucket_bytes=200)
RANKED = PowerSGD(rank=1, exact_vectors=False, bucket_bytes=200)
SHORT = AllReduce(bucket_bytes=200)

COMBINATIONS = [
    *(
        f"after(3, {then}, before={before})"
        for before in ("COARSE", "SIGNS", "SPARSE", "RANKED")
        for then in ("SHORT", "COARSE", "SPARSE", "Gossip(bucket_bytes=200)", "Hierarchical(ranks_per_node=2)")
    ),
    "after(3, AllReduce(), before=Hierarchical(COARSE, inner=COARSE, ranks_per_node=2))",
    "after(5, SPARSE, before=after(2, ByteGrad(), before=COARSE))",
    "after(5, after(2, LocalSGD(every=2), before=COARSE), before=after(3, Gossip(), before=AllReduce()))",
    "after(3, Gossip(), before=PushSum(topology=RandomPush()))",
    "after(3, in_parts(2, Gossip()), before=COARSE)",
    "after(3, by_size(100, small=AllReduce(), large=COARSE), before=by_size(50, small=COARSE, large=AllReduce()))",
    "by_size(100, small=Gossip(every=2), large=Gossip(every=3))",
    "by_size(100, small=Gossip(), large=after(3, Gossip(), before=AllReduce()))",
    "by_size(100, small=Hierarchical(Gossip(), ranks_per_node=2), large=Gossip())",
    "by_size(100, small=GossipGraD(history=False), large=GossipGraD())",
    "by_size(100, small=GossipGraD(late=True), large=GossipGraD(late=True))",
    "in_parts(2, QuantizedGossip(every=2))",
    "in_parts(3, LocalSGD(every=1))",
    "in_parts(2, DiLoCo(every=1, delay=0))",
    "Hierarchical(DiLoCo(every=2, delay=0), ranks_per_node=2)",
    "after(3, LocalSGD(every=2, delay=0), before=Gossip(bucket_bytes=200))",
    "Hierarchical(after(3, COARSE, before=SPARSE), inner=SPARSE, ranks_per_node=2)",
    "Hierarchical(by_size(100, small=Gossip(every=2), large=Gossip()), inner=COARSE, ranks_per_node=2)",
    "Hierarchical(LocalSGD(every=3), inner=SPARSE, ranks_per_node=4)",
]


def subjects() -> dict[str, Algorithm]:
    """Every algorithm in every variant, and combinations of them, by a name that says what was asked for."""
    alone = {spelled(each): each for each in algorithms(bucket_bytes=200) if each not in made()}
    return {
        **alone,
        **{f"combined, {number}": each for number, each in enumerate(made())},
        **{f"mixed, {number}": each for number, each in enumerate(mixed())},
        **{text: eval(text, {**vars(digraph), **vars(gossamer), **globals()}) for text in COMBINATIONS},
    }


def made() -> list[Algorithm]:
    """:func:`combined`, with short buckets."""
    return [with_fields(each, bucket_bytes=200) for each in combined()]


def spelled(algorithm: Algorithm) -> str:
    """An algorithm by the fields in which it is not the default."""
    given = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    default = with_fields(type(algorithm)(), bucket_bytes=200)
    other = [f"{name}={value!r}" for name, value in given.items() if value != getattr(default, name)]
    return f"{type(algorithm).__name__}({', '.join(other)})"


_here = threading.local()


@contextmanager
def taped() -> Iterator[None]:
    """Inside, every rank of a loopback world counts the operations that it starts, in a counter of its own thread."""
    start = LoopbackPort.start

    def noting(port: LoopbackPort, op: Any, group: Any = None) -> Any:
        world, rank = port._world.size, port._rank
        members = tuple(range(world)) if group is None else group
        sent = op.sent(len(members), members.index(rank))
        among = "" if len(members) == world else f" of {list(members)}"
        _here.tape[f"{op}{among}"] += 1
        _here.bytes, _here.messages = _here.bytes + sent.bytes, _here.messages + sent.rounds
        return start(port, op, group)

    LoopbackPort.start = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        LoopbackPort.start = start  # type: ignore[method-assign]


def trace(algorithm: Algorithm, world: int) -> tuple[list[Steps], list[Tensor]]:
    """What the first and the last rank do in each of some steps, and every rank's weights after them."""

    def body(rank: int) -> tuple[Steps, Tensor]:
        _here.tape, _here.bytes, _here.messages = Counter(), 0, 0
        model, optimizer, replica = make_training(algorithm)
        assert replica is not None
        said = []
        for step in range(STEPS):
            _here.tape, _here.bytes, _here.messages = Counter(), 0, 0
            train_step(model, optimizer, batch(step, rank))
            replica.wait_for_exchanges()
            said.append(sentence(_here.bytes, _here.messages, _here.tape))
        replica.close(average=True)
        return said, weights(model)

    with taped():
        said, trained = zip(*loopback(body, world), strict=True)
    return [said[0], said[-1]], list(trained)


def load() -> dict[str, dict[str, list[Steps]]]:
    """The recorded traces, by algorithm and world."""
    recorded = json.loads(RECORDED.read_text())
    operations = recorded["operations"]

    def said(nbytes: int, messages: int, *counts: int) -> str:
        return sentence(nbytes, messages, {operations[op]: count for count, op in zip(counts[::2], counts[1::2], strict=True)})

    steps = [said(*row) for row in recorded["steps"]]
    return {
        name: {world: [[steps[number] for number in rank] for rank in ranks] for world, ranks in worlds.items()}
        for name, worlds in recorded["traces"].items()
    }


def record() -> None:
    """Record all of them. Each operation is written once, and each step by the numbers of its operations."""
    traces = {name: {str(w): trace(algorithm, w)[0] for w in WORLDS} for name, algorithm in subjects().items()}
    each = [step for worlds in traces.values() for ranks in worlds.values() for rank in ranks for step in rank]
    steps = {step: number for number, step in enumerate(dict.fromkeys(each))}
    operations = {op: n for n, op in enumerate(dict.fromkeys(op for step in steps for op in parsed(step)[2]))}
    rows = [[*parsed(s)[:2], *(n for op, count in parsed(s)[2].items() for n in (count, operations[op]))] for s in steps]
    numbered = {n: {w: [[steps[s] for s in rank] for rank in ranks] for w, ranks in ws.items()} for n, ws in traces.items()}
    tables = {"operations": lines(operations), "steps": lines(rows), "traces": lines(numbered)}
    RECORDED.write_text("{" + ",\n".join(f'"{name}":{table}' for name, table in tables.items()) + "}\n")


def lines(table: Iterable[Any]) -> str:
    """A table with a line for each entry."""
    compact = partial(json.dumps, separators=(",", ":"))
    if isinstance(table, dict) and not all(isinstance(value, int) for value in table.values()):
        return "{\n" + ",\n".join(f"{compact(key)}:{compact(value)}" for key, value in table.items()) + "\n}"
    return "[\n" + ",\n".join(map(compact, table)) + "\n]"


def sentence(nbytes: int, messages: int, operations: Mapping[str, int]) -> str:
    """A step in words."""
    return f"{nbytes} bytes, {messages} messages: " + "; ".join(f"{n} {op}" for op, n in sorted(operations.items()))


def parsed(step: str) -> tuple[int, int, dict[str, int]]:
    """The reverse of :func:`sentence`."""
    nbytes, messages, said = re.fullmatch(r"(\d+) bytes, (\d+) messages: (.*)", step).groups()  # type: ignore[union-attr]
    operations = (each.split(" ", 1) for each in said.split("; ") if each)
    return int(nbytes), int(messages), {op: int(count) for count, op in operations}


if __name__ == "__main__":
    print(f"gossamer {gossamer.__version__}: {len(subjects())} algorithms among {WORLDS} ranks, {STEPS} steps")
    record()
