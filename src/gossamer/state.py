"""State: what an algorithm remembers about a bucket, written in transactions."""

import copy
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.ledger import Ledger
from gossamer.memory import reused

RESIDUAL = "residual"
"""The name under which algorithms keep what they have not sent yet."""

WHOLE = ""
"""The owner of an extra that belongs to the bucket as it is cut, and not to one of its parameters."""


def named(name: str, values: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Those that are there under this name, by whatever part of an algorithm (:meth:`State.scoped`)."""
    return [value for key, value in values.items() if value is not None and key.endswith(name)]


class State:
    """Named flat tensors, each with one value per element of a bucket (a residual, a replica, a momentum).

    Reading an unknown name gives zeros. Writing keeps the old tensor until :meth:`commit`, so that an exchange which
    is aborted half-way loses nothing; write a new tensor, do not modify the one that was read.

    *Extras* are tensors of any other shape. One that belongs to a parameter (a factor of its gradient) follows it to
    another bucket; one that belongs to the bucket (owner ``WHOLE``: a choice of its chunks) is dropped when the cuts
    change, so an algorithm must do without it.
    """

    def __init__(self, like: Tensor) -> None:
        # Not the tensor itself: a bucket gives its first one away, and it would be kept for nothing.
        self._shape, self._dtype, self._device = like.shape, like.dtype, like.device
        self.flats: Ledger[str] = Ledger()
        self.extras: Ledger[tuple[str, str]] = Ledger()
        self.vouched: list[tuple[Sequence[Tensor], Sequence[Tensor]]] = []
        """Proxies of finiteness, and the tensors of the exchange under way that they stand for: see :meth:`vouch`."""

    def __getitem__(self, name: str) -> Tensor:
        value = self.flats.get(name)
        return torch.zeros(self._shape, dtype=self._dtype, device=self._device) if value is None else value

    def __setitem__(self, name: str, value: Tensor) -> None:
        self.flats.draft[name] = value.contiguous()  # parameters' shares are views of it

    def __contains__(self, name: str) -> bool:
        return self.flats.get(name) is not None

    def get(self, name: str) -> Tensor | None:
        """What is there under this name; None if nothing is."""
        return self[name] if name in self else None  # noqa: SIM401  (this is what it would call)

    def written(self, name: str) -> Tensor | None:
        """What was written under this name since the last commit; None if nothing was."""
        return self.flats.draft.get(name)

    def fresh(self, name: str, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """An uninitialised tensor like ``like``, of type ``dtype`` if that is given, for the next value of ``name``: in
        the memory of one that will not be kept again, if that fits."""
        return reused(self.flats.spare.pop(name, None), like, dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.flats.kept)

    def extra(self, key: str, owner: str = WHOLE) -> Tensor | None:
        """The extra of this key that ``owner`` has; None if there is none."""
        return self.extras.get((key, owner))

    def set_extra(self, key: str, value: Tensor, owner: str = WHOLE) -> None:
        """Write an extra: a new tensor, as with the flat ones."""
        self.extras.draft[key, owner] = value

    def vouch(self, witnesses: Sequence[Tensor], *tensors: Tensor) -> None:
        """Declare cheap proxies of finiteness for ``tensors`` (the result, or what was written here): these are finite exactly
        if all ``witnesses`` are, and the overflow check reads only the witnesses.
        """
        self.vouched.append((witnesses, tensors))

    def withdraw(self, tensor: Tensor) -> None:
        """Remove ``tensor`` from what :meth:`vouch` declared, because it is going to be changed."""
        self.vouched[:] = [(witnesses, [each for each in of if each is not tensor]) for witnesses, of in self.vouched]

    def later(self) -> "State":
        """A state of its own that begins with everything written here so far; what is written there comes by :meth:`take`."""
        other = copy.copy(self)
        other.flats, other.extras, other.vouched = self.flats.later(), self.extras.later(), []
        return other

    def take(self, later: "State") -> None:
        """Keep what was written to a state that :meth:`later` returned."""
        self.flats.take(later.flats)
        self.extras.take(later.extras)

    def scoped(self, prefix: str) -> "State":
        """A view of this state in which every key begins with ``prefix``: two algorithms may share a bucket."""
        return _Scoped(self, prefix)

    def forget(self) -> None:
        """Keep nothing of this state (or of this view of one) from the next commit on."""
        self._forget("")

    def _forget(self, prefix: str) -> None:
        self.flats.draft |= {name: None for name in self.flats.kept if name.startswith(prefix)}
        self.extras.draft |= {(key, owner): None for key, owner in self.extras.kept if key.startswith(prefix)}

    def items(self) -> list[tuple[str, Tensor]]:
        """The flat tensors that are kept, as of the last commit, whatever was written since."""
        return self.flats.items()

    @property
    def changed(self) -> bool:
        """Whether anything was written, or is to be dropped, since the last commit."""
        return bool(self.flats.draft or self.extras.draft)

    @property
    def at_rest(self) -> bool:
        """Whether :meth:`commit` would change nothing: of many buckets, most exchanges of weights leave most alone."""
        return not self.vouched and self.flats.at_rest and self.extras.at_rest

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

    def commit(self, revocable: bool = False) -> None:
        """Make everything written since the last commit the state to keep; ``revocable``: :meth:`undo` may still forget it."""
        self.vouched = []
        self.flats.commit()
        self.extras.commit()
        if not revocable:
            self.confirm()

    def confirm(self) -> None:
        """What was committed is used: there is no way back behind it."""
        self.flats.confirm()
        self.extras.confirm()

    def undo(self) -> None:
        """Keep again what was kept at the last :meth:`confirm`."""
        self.flats.undo()
        self.extras.undo()

    def rollback(self) -> None:
        """Forget everything written since the last commit."""
        self.vouched = []
        self.flats.rollback()
        self.extras.rollback()


class _Scoped(State):
    """A view of another state."""

    def __init__(self, origin: State, prefix: str) -> None:
        self._shape, self._dtype, self._device = origin._shape, origin._dtype, origin._device
        self.flats, self.extras, self.vouched = origin.flats, origin.extras, origin.vouched
        self._prefix = prefix

    def __getitem__(self, name: str) -> Tensor:
        return super().__getitem__(self._prefix + name)

    def __setitem__(self, name: str, value: Tensor) -> None:
        super().__setitem__(self._prefix + name, value)

    def __contains__(self, name: str) -> bool:
        return super().__contains__(self._prefix + name)

    def written(self, name: str) -> Tensor | None:
        return super().written(self._prefix + name)

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
