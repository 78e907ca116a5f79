"""State: what an algorithm remembers about a bucket, written in transactions."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from gossamer.memory import reused

K = TypeVar("K")

RESIDUAL = "residual"
"""The name under which algorithms keep what they have not sent yet."""

MOMENTUM, OUTER_WEIGHTS, DELTAS = "momentum", "outer weights", "deltas"
"""The endings of names under which they keep what follows from means: ranks of another number take the mean of it."""

BEGUN = "begun"
"""The extra of a parameter whose outer weights are known: one that a loaded state did not know has none."""

WHOLE = ""
"""The owner of an extra that belongs to the bucket as it is cut, and not to one of its parameters."""


def named(name: str, values: Mapping[str, Tensor | None]) -> list[Tensor]:
    """What is there under this name, by whatever part of an algorithm (:meth:`State.scoped`)."""
    return [value for key, value in values.items() if value is not None and key.endswith(name)]


class Ledger(Generic[K]):
    """Tensors by key. What is written is kept from :meth:`commit` on, or forgotten at :meth:`rollback`.

    ``unsettled``: where a ledger stands that a commit would change. Of many buckets most exchanges leave most alone, and an
    exact all-reduce all of them.
    """

    def __init__(self, unsettled: "Unsettled | None" = None) -> None:
        self._unsettled: Unsettled = set() if unsettled is None else unsettled
        self.kept: dict[K, Tensor] = {}
        self.draft: dict[K, Tensor | None] = {}
        """None: to be dropped."""
        self.spare: dict[K, Tensor] = {}
        """What will not be kept again: memory for what is written next, on the host, where new memory is not free."""

    def get(self, key: K) -> Tensor | None:
        """The last value written, committed or not."""
        return self.draft.get(key, self.kept.get(key))

    def load(self, values: Mapping[K, Tensor | None]) -> None:
        """Keep exactly ``values``, leaving out what is None."""
        self.draft, self.spare = {}, {}
        self.kept = {key: value for key, value in values.items() if value is not None}
        self._unsettled.discard(self)

    def write(self, values: Mapping[K, Tensor | None]) -> None:
        """Have these values from the next commit on, until then beside what is kept; None: to be dropped."""
        self.draft |= values
        self._unsettled.add(self)

    def keep_where(self, broken: Tensor, chosen: Callable[[K], bool]) -> None:
        """Where ``broken`` (one boolean, on the tensors' device) holds, write again what is kept: zeros, if nothing fits. Of
        the ``chosen`` keys."""
        for key, draft in self.draft.items():
            if draft is None or not chosen(key):
                continue
            kept = self.kept.get(key)
            if kept is None or kept.shape != draft.shape:
                kept = torch.zeros_like(draft)
            draft.copy_(torch.where(broken.reshape(()), kept.to(draft.dtype), draft))

    def commit(self) -> None:
        """Keep what was written."""
        self.spare = {}
        for key, value in self.draft.items():
            self._set_aside(key, self.kept.pop(key, None))
            if value is not None:
                self.kept[key] = value
        self._settle()

    def rollback(self) -> None:
        """Forget what was written."""
        for key, value in self.draft.items():
            self._set_aside(key, value)
        self._settle()

    def _settle(self) -> None:
        self.draft = {}
        (self._unsettled.add if self.spare else self._unsettled.discard)(self)

    def _set_aside(self, key: K, value: Tensor | None) -> None:
        if value is not None and value.device.type == "cpu":
            self.spare[key] = value

    def current(self) -> dict[K, Tensor]:
        """The last values written, committed or not."""
        return {key: value for key, value in (self.kept | self.draft).items() if value is not None}


Unsettled = set[Ledger[Any]]


class State:
    """Named flat tensors, each with one value per element of a bucket (a residual, a replica, a momentum).

    Reading an unknown name gives zeros. Writing keeps the old tensor until :meth:`commit`, so that an exchange which
    is aborted half-way loses nothing; write a new tensor, do not modify the one that was read.

    *Extras* are tensors of any other shape. One that belongs to a parameter (a factor of its gradient) follows it to
    another bucket; one that belongs to the bucket (owner ``WHOLE``: a choice of its chunks) is dropped when the cuts
    change, so an algorithm must do without it.
    """

    def __init__(self, like: Tensor, unsettled: Unsettled | None = None) -> None:
        # Not the tensor itself: a bucket gives its first one away, and it would be kept for nothing.
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self.flats: Ledger[str] = Ledger(unsettled)
        self.extras: Ledger[tuple[str, str]] = Ledger(unsettled)

    def __getitem__(self, name: str) -> Tensor:
        value = self.flats.get(name)
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device) if value is None else value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.flats.write({name: value.contiguous()})  # parameters' shares are views of it

    def __contains__(self, name: str) -> bool:
        return self.flats.get(name) is not None

    def get(self, name: str) -> Tensor | None:
        """What is there under this name; None if nothing is."""
        return self[name] if name in self else None  # noqa: SIM401  (this is what it would call)

    def written(self, name: str) -> Tensor | None:
        """What was written under this name since the last commit; None if nothing was."""
        return self.flats.draft.get(name)

    def touched(self, name: str) -> bool:
        """Whether anything was written, or dropped, under this name since the last commit."""
        return name in self.flats.draft

    def fresh(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor like ``like``, of type ``dtype`` if that is given, for the next value of ``name``: in
        the memory of one that will not be kept again, if that fits."""
        return reused(self.flats.spare.pop(name, None), like, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.flats.current())

    def extra(self, key: str, owner: str = WHOLE) -> Tensor | None:
        """The extra of this key that ``owner`` has; None if there is none."""
        return self.extras.get((key, owner))

    def set_extra(self, key: str, value: Tensor, owner: str = WHOLE) -> None:
        """Write an extra: a new tensor, as with the flat ones."""
        self.extras.write({(key, owner): value})

    def later(self) -> "State":
        """A state of its own that begins with everything written here so far; what is written there comes by :meth:`take`."""
        other = copy.copy(self)
        other.flats, other.extras = Ledger(), Ledger()
        other.flats.kept, other.extras.kept = self.flats.current(), self.extras.current()
        return other

    def take(self, later: "State") -> None:
        """Keep what was written to a state that :meth:`later` returned."""
        self.flats.write(later.flats.draft)
        self.extras.write(later.extras.draft)

    def scoped(self, prefix: str) -> "State":
        """A view of this state in which every key begins with ``prefix``: two algorithms may share a bucket."""
        return _Scoped(self, prefix)

    def forget(self) -> None:
        """Keep nothing of this state (or of this view of one) from the next commit on."""
        self._forget("")

    def _forget(self, prefix: str) -> None:
        self.flats.write({name: None for name in self.flats.current() if name.startswith(prefix)})
        self.extras.write({(key, owner): None for key, owner in self.extras.current() if key.startswith(prefix)})

    def items(self) -> list[tuple[str, Tensor]]:
        """The flat tensors, as they were written last."""
        return list(self.flats.current().items())

    def drafts(self) -> list[Tensor]:
        """What was written since the last commit."""
        written = (*self.flats.draft.values(), *self.extras.draft.values())
        return [tensor for tensor in written if tensor is not None]

    def load(self, values: Mapping[str, Tensor | None]) -> None:
        """Keep exactly these flat tensors, leaving out what is None."""
        self.flats.load(values)

    def keep_where(self, broken: Tensor) -> None:
        """Where ``broken`` holds, undo what was written since the last commit, without asking whether it holds."""
        self._keep_where(broken, "")

    def _keep_where(self, broken: Tensor, prefix: str) -> None:
        self.flats.keep_where(broken, lambda name: name.startswith(prefix))
        self.extras.keep_where(broken, lambda key: key[0].startswith(prefix))

    def commit(self) -> None:
        """Make everything written since the last commit the state to keep."""
        self.flats.commit()
        self.extras.commit()

    def rollback(self) -> None:
        """Forget everything written since the last commit."""
        self.flats.rollback()
        self.extras.rollback()


class _Scoped(State):
    """A view of another state."""

    def __init__(self, origin: State, prefix: str) -> None:
        self._shape, self._dtype, self._device = origin._shape, origin._dtype, origin._device
        self.flats, self.extras = origin.flats, origin.extras
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(self._prefix + name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(self._prefix + name, value)

    def __contains__(self, name: str) -> bool:
        return super().__contains__(self._prefix + name)

    def written(self, name: str) -> Tensor | None:
        return super().written(self._prefix + name)

    def touched(self, name: str) -> bool:
        return super().touched(self._prefix + name)

    def fresh(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return super().fresh(self._prefix + name, like, dtype)

    def _forget(self, prefix: str) -> None:
        super()._forget(self._prefix + prefix)

    def _keep_where(self, broken: Tensor, prefix: str) -> None:
        super()._keep_where(broken, self._prefix + prefix)

    def scoped(self, prefix: str) -> State:
        return super().scoped(self._prefix + prefix)

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in super().__iter__() if name.startswith(self._prefix))

    def extra(self, key: str, owner: str = WHOLE) -> Tensor | None:
        return super().extra(self._prefix + key, owner)

    def set_extra(self, key: str, value: Tensor, owner: str = WHOLE) -> None:
        super().set_extra(self._prefix + key, value, owner)
