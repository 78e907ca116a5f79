"""Bucket plan: which parameters share a bucket, where in it each lies, and in which order buckets are launched."""

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

_BUFFER = " (buffer)"


def buffer_name(name: str) -> str:
    """The name under which a module's buffer travels with the weights: no parameter has it."""
    return name + _BUFFER


def name_of_buffer(name: str) -> str:
    """The reverse."""
    return name.removesuffix(_BUFFER)


def is_buffer(name: str) -> bool:
    """Whether that is what a name is of."""
    return name.endswith(_BUFFER)


@dataclass(frozen=True, slots=True)
class Segment:
    """The place of one parameter in a bucket: elements ``offset … offset + numel`` in the parameter's own strides."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int

    def view(self, flat: Tensor) -> Tensor:
        """The parameter-shaped view of a flat tensor."""
        return flat.as_strided(self.shape, self.stride, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Layout:
    """What a bucket holds: its segments in order, all of one dtype and on one device."""

    segments: tuple[Segment, ...]
    dtype: torch.dtype
    device: torch.device
    message: torch.dtype
    """The type of the flat tensor: that of the tensors, or of what is sent of them (``Algorithm.message_dtype``)."""
    handler: Any = None
    """The algorithm that handles it: see ``Algorithm.route``."""
    owner: int | None = None
    """The number of the optimizer whose parameters alone it holds, where several share a replica."""

    @property
    def kind(self) -> "Kind":
        """What the parameters that share a bucket have in common."""
        return self.dtype, self.device, self.handler, self.owner

    @property
    def handled(self) -> str:
        """Who handles it, in short."""
        by = "" if self.handler is None else f"by {type(self.handler).__name__}"
        return by if self.owner is None else f"{by} of optimizer {self.owner}"

    @property
    def group(self) -> str:
        """The name of what belongs to all buckets of one handler (and one optimizer)."""
        return repr(self.handler) if self.owner is None else f"{self.handler!r} of optimizer {self.owner}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(segment.numel for segment in self.segments)

    @property
    def nbytes(self) -> int:
        """Size of the tensors in bytes, before any encoding."""
        return self.numel * self.dtype.itemsize

    @property
    def names(self) -> tuple[str, ...]:
        """Parameter names, in order."""
        return tuple(segment.name for segment in self.segments)

    def split(self, flat: Tensor) -> list[Tensor]:
        """The parameter-shaped views of a flat tensor."""
        return [segment.view(flat) for segment in self.segments]

    def allocate(self) -> Tensor:
        """A zero flat tensor for this layout."""
        return torch.zeros(self.numel, dtype=self.message, device=self.device)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which parameters travel together, and in which order the buckets are launched: the same on every rank."""

    layouts: tuple[Layout, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every parameter name, in launch order."""
        return tuple(name for layout in self.layouts for name in layout.names)

    def lanes(self, count: int) -> tuple[int, ...]:
        """The lane of each bucket: the one that was given the fewest bytes so far."""
        given, chosen = [0] * count, []
        for layout in self.layouts:
            chosen.append(given.index(min(given)))
            given[chosen[-1]] += layout.nbytes
        return tuple(chosen)

    def to_dict(self) -> dict[str, Any]:
        """The order and the cuts, as plain lists of names."""
        return {"buckets": [list(layout.names) for layout in self.layouts]}

    def lines(self) -> str:
        """A line for each parameter, in order, of all that ranks must have alike: equal plans, equal lines."""
        return "\n".join(
            f"{s.name}: {layout.dtype} {list(s.shape)} in the order of strides {list(in_order(s.shape, s.stride))}, bucket "
            f"{index} {layout.handled}".rstrip()
            for index, layout in enumerate(self.layouts)
            for s in layout.segments
        )


def in_order(shape: Sequence[int], stride: Sequence[int]) -> tuple[int, ...]:
    """Strides that are equal exactly where elements follow each other in the same order: 0 where there is only one."""
    return tuple(each if size > 1 else 0 for size, each in zip(shape, stride, strict=True))


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it fills its memory densely (channels-last does); contiguous ones otherwise."""
    return torch.empty_like(tensor, device="meta", memory_format=torch.preserve_format).stride()


def make_layout(
    tensors: Mapping[str, Tensor], handler: Any = None, owner: int | None = None, message: torch.dtype | None = None
) -> Layout:
    """One bucket that holds ``tensors`` (all of one dtype, on one device) in the order given."""
    ends = list(accumulate(tensor.numel() for tensor in tensors.values()))
    segments = tuple(
        Segment(name, tuple(tensor.shape), dense_stride(tensor), end - tensor.numel(), tensor.numel())
        for (name, tensor), end in zip(tensors.items(), ends, strict=True)
    )
    first = next(iter(tensors.values()))
    return Layout(segments, first.dtype, first.device, message or first.dtype, handler, owner)


class Handler(Hashable, Protocol):
    """What a plan must know of the algorithm that handles a parameter."""

    @property
    def bucket_bytes(self) -> int:
        """The threshold of its buckets."""

    @property
    def traits(self) -> Any:
        """``traits.exact``: means come out exact."""

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which its buckets are packed."""


class Routing(Protocol):
    """What a plan must know of an algorithm."""

    def route(self, name: str, tensor: Tensor) -> Handler:
        """Who handles a parameter."""


@dataclass(frozen=True, slots=True)
class OneSize:
    """The routing of one handler: every bucket has the same threshold."""

    bucket_bytes: int
    traits: ClassVar[None] = None

    def route(self, name: str, tensor: Tensor) -> "OneSize":
        """Itself."""
        return self

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Tensors are packed as they are."""
        return dtype


Kind = tuple[torch.dtype, torch.device, Handler, int | None]
"""What the parameters of one bucket have in common: type, device, who handles them, and whose they are alone."""

NO_OWNERS: Mapping[str, int] = MappingProxyType({})
"""One optimizer, whose parameters all are."""

FIRST_BYTES = 2**20
"""Where gradients come one after the other, the first bucket closes at this size at the latest: the wire has work early."""


def make_plan(
    tensors: Mapping[str, Tensor], routing: Routing | int, together: bool = False, owners: Mapping[str, int] = NO_OWNERS
) -> Plan:
    """Cut ``tensors``, in the order given, into buckets of at least ``bucket_bytes`` each (the last of a kind: less).

    ``routing``: an algorithm, or the threshold alone. ``together``: all buckets will be there at the same time, so that
    what is left of a kind joins its bucket before, which has nothing to wait for. ``owners``: the optimizer of each parameter,
    by name, where several take turns (a generator's and a discriminator's). A pass then brings gradients that one of them will
    not use; what an algorithm loses of those, or keeps of them, must not reach the others', so that whatever is not averaged
    exactly travels in buckets of one optimizer's parameters.

    A bucket is launched when it is complete, so buckets stand in the order in which their last tensor comes.
    """
    routing = OneSize(routing) if isinstance(routing, int) else routing
    layouts: list[Layout] = []
    begun: set[Kind] = set()
    waiting: dict[Kind, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind = _kind(name, tensor, routing, owners)
        held = waiting.setdefault(kind, {})
        held[name] = tensor
        enough = kind[2].bucket_bytes
        if not together and kind not in begun:
            enough = min(enough, FIRST_BYTES)
        if sum(t.numel() * t.element_size() for t in held.values()) >= enough:
            begun.add(kind)
            layouts.append(_laid_out(waiting.pop(kind), kind))
    for kind, held in waiting.items():
        before = next((i for i in reversed(range(len(layouts))) if together and layouts[i].kind == kind), None)
        if before is None:
            layouts.append(_laid_out(held, kind))
        else:
            layouts[before] = _laid_out({name: tensors[name] for name in (*layouts[before].names, *held)}, kind)
    return Plan(tuple(layouts))


def _kind(name: str, tensor: Tensor, routing: Routing, owners: Mapping[str, int]) -> Kind:
    handler = routing.route(name, tensor)
    alone = name in owners and not handler.traits.exact
    return tensor.dtype, tensor.device, handler, owners[name] if alone else None


def _laid_out(tensors: Mapping[str, Tensor], kind: Kind) -> Layout:
    dtype, _, handler, owner = kind
    return make_layout(tensors, handler, owner, handler.message_dtype(dtype))


def plan_from_names(
    names: Iterable[Sequence[str]], tensors: Mapping[str, Tensor], routing: Routing, owners: Mapping[str, int] = NO_OWNERS
) -> Plan:
    """The plan with exactly these buckets, as saved by :meth:`Plan.to_dict`."""
    kinds = [(bucket, _kind(bucket[0], tensors[bucket[0]], routing, owners)) for bucket in names]
    return Plan(tuple(_laid_out({name: tensors[name] for name in bucket}, kind) for bucket, kind in kinds))
