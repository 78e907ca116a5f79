"""Agreement: proof that all ranks mean the same thing, by hashes in tensors; nothing is pickled over the wire."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch import Tensor

from gossamer.bucket_plan import Plan
from gossamer.comm.ops import Flow, all_gather, broadcast, maximum
from gossamer.comm.runner import Runner, lane_for
from gossamer.engine.plain import read, written
from gossamer.errors import DisagreementError
from gossamer.memory import has_values, stored

T = TypeVar("T")

_LONGEST = 2**12
"""Bytes of a line that are shown."""


def digest(text: str) -> int:
    """A 63-bit hash of a text, equal on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def agree(runner: Runner, facts: Mapping[str, str], hint: str = "") -> None:
    """Raise :class:`DisagreementError` on every rank unless all ranks hold the same ``facts`` (topic: description). ``hint``:
    what may be the reason, and what to do."""
    if runner.world == 1:
        return
    mine = torch.tensor([digest(text) for text in facts.values()], dtype=torch.int64)
    everyone = runner.run(lambda: all_gather(mine), "the agreement on " + ", ".join(facts))
    for column, (topic, text) in enumerate(facts.items()):
        if len(set(everyone[:, column].tolist())) > 1:
            texts = _exchange_texts(runner, _first_that_differs(runner, text.split("\n")))
            reason = hint and f". {hint}"
            raise DisagreementError(f"rank {runner.rank}: ranks differ in {topic}: {_describe(texts)}{reason}")


def agree_on_plan(runner: Runner, plan: Plan) -> Plan:
    """The plan, if all ranks have the same. Collective, wherever one is adopted: what lies in another order would be averaged
    with other elements."""
    hint = "Give all ranks the same model, in the same memory format, before replicate()"
    agree(runner, {"the plan of buckets": plan.lines()}, hint)
    return plan


def _first_that_differs(runner: Runner, lines: list[str]) -> str:
    """The first line that is not the same on all ranks."""
    world = runner.world

    def flow() -> Flow[Tensor]:
        longest = yield from maximum(torch.tensor([len(lines)], dtype=torch.int64), world)
        mine = [digest(line) for line in lines] + [-1] * (int(longest.item()) - len(lines))
        return (yield from all_gather(torch.tensor(mine, dtype=torch.int64)))

    everyone = runner.run(flow, "the search for what differs")
    place = int((everyone != everyone[0]).any(dim=0).to(torch.int64).argmax())
    return lines[place] if place < len(lines) else "(nothing)"


def _exchange_texts(runner: Runner, text: str) -> list[str]:
    data = text.encode()[:_LONGEST]

    def flow() -> Flow[Tensor]:
        longest = yield from maximum(torch.tensor([len(data)], dtype=torch.int64), runner.world)
        padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        return (yield from all_gather(padded))

    rows = runner.run(flow, "the comparison of descriptions")
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def values_of_all(runner: Runner, value: T) -> list[T]:
    """What every rank has, by rank: numbers, strings, and containers of them. Collective."""
    own = written(value)

    def flow() -> Flow[tuple[Tensor, Tensor]]:
        sizes = yield from all_gather(torch.tensor([len(own)], dtype=torch.int64))
        padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        padded[: len(own)] = own
        return sizes, (yield from all_gather(padded))

    sizes, rows = runner.run(flow, "what every rank has")
    return [read(row[: int(size)]) for row, size in zip(rows, sizes, strict=True)]


def _describe(texts: list[str]) -> str:
    """The texts of the ranks, once per group of ranks that hold the same."""
    groups: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        groups.setdefault(text, []).append(rank)
    if len(groups) == 1:
        return f"what lies behind the first {_LONGEST} bytes of {texts[0]}"
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {line}" for line, ranks in groups.items())


def same_from_rank(runner: Runner, tensors: Sequence[Tensor], source: int, what: str = "") -> None:
    """Overwrite ``tensors`` with those of rank ``source``: as bytes, so that any dtype travels.

    For each device in messages of up to ``PORTION`` bytes: many small tensors in one, a large one in several.
    """
    if runner.world == 1:
        return
    for group in _by_device(list(chain.from_iterable(map(stored, tensors)))):
        for portion in in_portions(group, _as_bytes, PORTION):
            flat = torch.cat(portion)
            label = what or f"the broadcast of rank {source}'s values"
            flat = runner.run(lambda flat=flat: broadcast(flat, source), label, lane_for(flat))  # type: ignore[misc]
            for piece, came in zip(portion, flat.split([len(piece) for piece in portion]), strict=True):
                piece.copy_(came)


PORTION = 2**26
"""Bytes of the largest message in which values are broadcast or averaged: so much memory is needed beside the model."""


def in_portions(tensors: Sequence[Tensor], flat: Callable[[Tensor], Tensor], most: int) -> Iterator[list[Tensor]]:
    """What ``flat`` makes of ``tensors``, cut and put together, in order: up to ``most`` elements in each list. What is written
    there is in the tensors when the last list has been used."""
    # Through .data: a value that autograd has saved may be overwritten with the same one (two forwards, one backward).
    whole = [flat(tensor.data) for tensor in tensors]
    yield from _portions(whole, most)
    for tensor, came in zip(tensors, whole, strict=True):
        if came.data_ptr() != tensor.data_ptr():  # a copy, because its elements do not follow each other
            tensor.data.copy_(came.view(tensor.dtype).view(tensor.shape))


def _portions(whole: Sequence[Tensor], most: int) -> Iterator[list[Tensor]]:
    """Flat tensors, cut and put together, in order: views of up to ``most`` elements in each list."""
    portion: list[Tensor] = []
    room = most
    for tensor in whole:
        begin = 0
        while begin < len(tensor):
            piece = tensor[begin : begin + room]
            portion.append(piece)
            begin, room = begin + len(piece), room - len(piece)
            if not room:
                yield portion
                portion, room = [], most
    if portion:
        yield portion


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def checksum(tensors: Iterable[Tensor]) -> str:
    """A hash over the bits of ``tensors``: equal on ranks that hold the same values. Tensors without values are left out."""
    hasher = hashlib.sha256()
    for tensor in filter(has_values, chain.from_iterable(map(stored, tensors))):
        for portion in _as_bytes(tensor).split(_HASHED):
            # A copy: torch refuses to resize a storage for ever that numpy has seen once.
            hasher.update(portion.to("cpu", copy=True).numpy())
    return hasher.hexdigest()


_HASHED = 2**22
"""Bytes that are copied to be hashed, at a time."""


def _by_device(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.device, []).append(tensor)
    return list(groups.values())
