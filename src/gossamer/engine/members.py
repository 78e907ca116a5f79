"""Members: the tensors whose values one optimizer's exchanges move, whole or in pieces, bucket by bucket."""

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor
from torch.optim import Optimizer

from gossamer.bucket_plan import in_order
from gossamer.buckets import Bucket
from gossamer.engine.history import variances, weight_of
from gossamer.errors import ConfigurationError, UsageError
from gossamer.pieces import cut, part_of

Current = Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The optimizer whose steps update the tensors: its place among several, and its parameters that are trained.

    ``changing``: see :func:`gossamer.engine.exact.change`. ``current``: see :class:`Members`. ``turns``: the numbers of the
    optimizers whose weights the last exchanges were of, in one list for all.
    """

    index: int = 0
    optimizer: Optimizer | None = None
    parameters: Sequence[Tensor] = ()
    changing: Callable[[], AbstractContextManager[None]] = nullcontext
    current: Current | None = None
    turns: MutableSequence[int] = field(default_factory=list)


class Members:
    """Tensors by name; ``of_buckets[index]``: those of a bucket, in its order, views of their memory if they are in pieces."""

    def __init__(self, rank: int, tensors: Mapping[str, Tensor], parts: int, current: Current | None = None) -> None:
        """``parts``: into how many they are cut. ``current``: tensors whose place others may have taken."""
        self._rank, self._parts, self._current = rank, parts, current
        self.may_move: bool = parts > 1 or current is not None
        """Whether :meth:`follow_moved` may have anything to do."""
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.variances: list[Tensor] = []
        """The running variances of modules among them."""
        self._buckets: Sequence[Bucket] = ()
        self.of_buckets: list[list[Tensor]] = []
        """The members of each bucket."""
        self._orders: dict[str, tuple[int, ...]] = {}
        self._places: list[tuple[int, tuple[int, ...]]] = []

    def pieces(self, others: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """What a plan is made of, by name: of these tensors, or of ``others`` where they have one of that name."""
        tensors = self.tensors if others is None else {name: others.get(name, t) for name, t in self.tensors.items()}
        pieces = cut(tensors, self._parts, weight_of)
        self._check_parts(pieces)
        return pieces

    def _check_parts(self, pieces: Mapping[str, Tensor]) -> None:
        """Raise if a step would exchange nothing."""
        if self._parts > 1 and (missing := set(range(self._parts)) - {part_of(name)[1] for name in pieces}):
            weights = [name for name in pieces if weight_of(part_of(name)[0]) == part_of(name)[0]]
            total = sum(pieces[name].numel() for name in weights)
            raise ConfigurationError(
                f"in_parts(): part {min(missing)} of {self._parts} of {total} weights (from "
                f"{next(iter(self.tensors), 'none')!r} on) would be empty: cut them into fewer parts"
            )

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Be the members of ``buckets``, which were planned for :meth:`pieces`."""
        self._buckets, self._orders = buckets, self._order()
        self._gather()

    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with ``tensors`` where they have replaced others (a module may assign a new tensor to a buffer)."""
        replaced = {name: t for name, t in tensors.items() if name in self.tensors and self.tensors[name] is not t}
        if replaced:
            self.tensors |= replaced
            self._gather()

    def follow_moved(self) -> None:
        """Go on with what others have taken the place of, and take pieces anew where an assignment to ``.data`` has moved a
        tensor."""
        if self._current is not None:
            self.follow(self._current())
        if self._where() != self._places:
            self._gather()

    def _gather(self) -> None:
        self._places = self._where()
        self._check_order()
        pieces = self.pieces()
        self.of_buckets = [[pieces[s.name] for s in bucket.segments] for bucket in self._buckets]
        self.variances = variances(self.tensors)

    def _where(self) -> list[tuple[int, tuple[int, ...]]]:
        """Where the tensors lie, and in which order, if pieces are views of their memory."""
        return [] if self._parts == 1 else [(t.data_ptr(), t.stride()) for t in self.tensors.values()]

    def _check_order(self) -> None:
        """Raise if a tensor that is cut into pieces lies in another order than where they were planned: the same piece would be
        other elements, for this rank and for what has not been added yet."""
        for name, order in self._order().items() if self._parts > 1 else ():
            if order != self._orders.get(name, order):
                raise UsageError(
                    f"rank {self._rank}: parameter {name!r} has another order of strides ({order}, before "
                    f"{self._orders[name]}), and in_parts() cuts it along its memory: choose the memory format before "
                    "replicate()"
                )

    def _order(self) -> dict[str, tuple[int, ...]]:
        return {name: in_order(tensor.shape, tensor.stride()) for name, tensor in self.tensors.items()}
