"""Agreement: proof that all ranks mean the same thing, by hashes in tensors; nothing is pickled over the wire."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.comm.ops import Flow, all_gather, all_reduce, broadcast
from gossamer.comm.runner import Runner, lane_for
from gossamer.errors import DisagreementError

_LONGEST = 2**16


def digest(text: str) -> int:
    """A 63-bit hash of a text, equal on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def agree(runner: Runner, facts: Mapping[str, str]) -> None:
    """Raise :class:`DisagreementError` on every rank unless all ranks hold the same ``facts`` (topic: description)."""
    if runner.world == 1:
        return
    mine = torch.tensor([digest(text) for text in facts.values()], dtype=torch.int64)
    everyone = runner.run(lambda: all_gather(mine), "the agreement on " + ", ".join(facts))
    for column, (topic, text) in enumerate(facts.items()):
        if len(set(everyone[:, column].tolist())) > 1:
            texts = _exchange_texts(runner, text)
            raise DisagreementError(f"rank {runner.rank}: ranks differ in {topic}: {_describe(texts)}")


def _exchange_texts(runner: Runner, text: str) -> list[str]:
    data = text.encode()[:_LONGEST]

    def flow() -> Flow[Tensor]:
        longest = yield from all_reduce(torch.tensor([len(data)], dtype=torch.int64), "max")
        padded = torch.zeros(int(longest.item()), dtype=torch.uint8)
        padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
        return (yield from all_gather(padded))

    rows = runner.run(flow, "the comparison of descriptions")
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in rows]


def _describe(texts: list[str]) -> str:
    """The first line in which texts differ, once per group of ranks that hold the same."""
    split = [text.split("\n") for text in texts]
    longest = max(len(lines) for lines in split)
    padded = [lines + ["(nothing)"] * (longest - len(lines)) for lines in split]
    place = next((i for i in range(longest) if len({lines[i] for lines in padded}) > 1), 0)
    groups: dict[str, list[int]] = {}
    for rank, lines in enumerate(padded):
        groups.setdefault(lines[place], []).append(rank)
    return "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {line}" for line, ranks in groups.items())


def same_from_rank(runner: Runner, tensors: Sequence[Tensor], source: int) -> None:
    """Overwrite ``tensors`` (any dtypes, any strides) with those of rank ``source``, one broadcast per dtype."""
    if runner.world == 1:
        return
    for group in _by_dtype(tensors):
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in group])
        flat = runner.run(lambda flat=flat: broadcast(flat, source), f"the broadcast of rank {source}'s values", lane_for(flat))  # type: ignore[misc]
        unflatten(flat, group)


def unflatten(flat: Tensor, tensors: list[Tensor]) -> None:
    """Copy consecutive pieces of ``flat`` into ``tensors``."""
    with torch.no_grad():
        for tensor, piece in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def checksum(tensors: list[Tensor]) -> str:
    """A hash over the bits of ``tensors``: equal on ranks that hold the same values."""
    hasher = hashlib.sha256()
    for tensor in tensors:
        dense = tensor.detach().contiguous().cpu().reshape(-1)
        hasher.update(dense.view(torch.uint8).numpy().tobytes() if dense.numel() else b"")
    return hasher.hexdigest()


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(groups.values())
