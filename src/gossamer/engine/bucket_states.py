"""Bucket states: what an algorithm keeps of the buckets of one plan, and of their steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.comm.runner import CONTROL, Runner, Ticket
from gossamer.engine.unsent import INHERITED
from gossamer.memory import wide
from gossamer.state import MOMENTUM, RESIDUAL, WHOLE, Ledger, State, Unsettled, named

Kept = dict[str, dict[str, Tensor]]
"""``{key: {parameter name: tensor}}``."""


_BUCKET = "bucket "
_STEP = "step "


class BucketStates(list[State]):
    """A state for each bucket, in the plan's order, and one for the steps of each group of buckets of one handler."""

    def __init__(self, runner: Runner) -> None:
        super().__init__()
        self._runner = runner
        self.later: list[tuple[Ticket[None], list[tuple[State, State]]]] = []
        """Flows that still write, and the states that take what they write, each with the one that they write to."""
        self._buckets: list[Bucket] = []
        self.unsettled: Unsettled = set()
        """What a commit would change."""
        self.of_steps: dict[str, State] = {}
        """By group."""
        self.inherits: bool = False
        """Whether anything may be kept that the algorithm before this one has not sent."""

    def adopt(self, buckets: list[Bucket]) -> None:
        """Make a state for each of ``buckets``; what is kept of the buckets before is carried over by parameter name."""
        self.commit()
        kept, extras = self.by_name(), of_any_plan(self.extras_by_name())
        self._buckets = buckets
        for bucket in buckets:
            self.of_steps.setdefault(bucket.layout.group, State(torch.zeros(()), self.unsettled))
        self.load_by_name(kept, extras)

    def write_later(self, flow: Flow[None], label: str, states: Iterable[tuple[State, State]]) -> None:
        """Start a flow that writes to the second of each pair of ``states``; the first one will take it."""
        self.later.append((self._runner.submit(lambda: flow, label, CONTROL), list(states)))

    def complete(self) -> None:
        """Wait for the flows that still write, and take what they wrote. It is not committed by that."""
        flows, self.later = self.later, []
        for ticket, states in flows:
            self._runner.wait(ticket)
            for state, later in states:
                state.take(later)

    def commit(self, indices: Iterable[int] | None = None) -> None:
        """Keep what the flows wrote; ``indices``: of these buckets, and of their steps."""
        self.complete()
        for ledger in self._unsettled_of(indices):
            ledger.commit()

    def rollback(self, indices: Iterable[int] | None = None) -> None:
        """Drop what the flows wrote, and will write; ``indices``: as for :meth:`commit`, where no flow writes any more."""
        self.later = [(ticket, []) for ticket, _ in self.later]
        for ledger in self._unsettled_of(indices):
            ledger.rollback()

    def keep_where(self, broken: Tensor) -> None:
        """Drop it where ``broken`` holds, without asking whether it holds."""
        for state in self.all():
            state.keep_where(broken)

    @property
    def remembers(self) -> bool:
        """Whether anything is kept per element."""
        return any(state.items() for state in self)

    def rescale(self, factor: Tensor) -> None:
        """Gradients are ``factor`` (one number) times as large from now on: residuals and momenta become so too."""
        if factor.device.type == "cpu" and factor == 1:
            return
        for state in self:
            for name in (RESIDUAL, MOMENTUM):
                for kept in named(name, state.flats.kept) + named(name, state.flats.draft):
                    largest = torch.finfo(kept.dtype).max
                    kept.copy_((wide(kept) * factor.to(kept.device)).clamp(-largest, largest))

    def all(self) -> list[State]:
        """Those of the buckets, then those of the steps."""
        return [*self, *self.of_steps.values()]

    def _unsettled_of(self, indices: Iterable[int] | None) -> list[Ledger[Any]]:
        """What a commit would change of these buckets, and of their steps; None: of all."""
        if indices is None:
            return list(self.unsettled)
        chosen = [state for i in indices for state in (self[i], self.of_steps[self._buckets[i].layout.group])]
        return [ledger for state in chosen for ledger in (state.flats, state.extras) if ledger in self.unsettled]

    def drafts(self) -> list[Tensor]:
        """What the flows wrote and is not yet kept."""
        return [tensor for state in self.all() for tensor in state.drafts()]

    def by_name(self) -> Kept:
        """The elementwise state that is kept: tensors in the shape of their parameters."""
        kept: Kept = {}
        for bucket, state in zip(self._buckets, self, strict=True):
            for key, flat in state.flats.kept.items():
                kept.setdefault(key, {}).update(zip(bucket.layout.names, bucket.split(flat), strict=True))
        return kept

    def residual_share(self, sent: Sequence[Tensor] = ()) -> tuple[float, float]:
        """Squared L2 norms: of all residuals, and of ``sent``, or what the buckets hold (at a step's end, the gradients).
        Without any: 0."""
        residuals = [flat for state in self for flat in named(RESIDUAL, state.flats.current())]
        if not residuals:
            return 0.0, 0.0
        return _squared(residuals), _squared(list(sent) or [bucket.flat for bucket in self._buckets])

    def extras_named(self, name: str) -> list[Tensor]:
        """The extras of this key that buckets have as they are cut, by whatever part of an algorithm."""
        extras = [each for state in self for each in state.extras.current().items()]
        return [value for (key, owner), value in extras if owner == WHOLE and key.endswith(name)]

    def extras_by_name(self) -> Kept:
        """Everything else that is kept: by key, or by bucket and key; then by parameter."""
        kept: Kept = {}
        for index, state in enumerate(self):
            for (key, owner), value in state.extras.kept.items():
                kept.setdefault(f"{_BUCKET}{index}: {key}" if owner == WHOLE else key, {})[owner] = value
        for group, state in self.of_steps.items():
            kept |= {f"{_STEP}{group}: {key}": {WHOLE: value} for key, value in state.flats.kept.items()}
        return kept

    def load_by_name(self, kept: Mapping[str, Mapping[str, Tensor]], extras: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`by_name` and :meth:`extras_by_name` returned, whatever the plan is now."""
        self.complete()
        self.inherits = INHERITED in kept
        self.unsettled.clear()
        self[:] = [State(bucket.flat, self.unsettled) for bucket in self._buckets]
        for bucket, state in zip(self._buckets, self, strict=True):
            state.load({key: bucket.gather(tensors) for key, tensors in kept.items()})
            names = set(bucket.layout.names)
            state.extras.load({(k, n): t.clone() for k, owned in extras.items() for n, t in owned.items() if n in names})
            own = _of_place(extras, f"{_BUCKET}{bucket.index}: ")
            state.extras.kept |= {(key, WHOLE): value for key, value in own.items()}
        for group, state in self.of_steps.items():
            state.load(_of_place(extras, f"{_STEP}{group}: "))


def _squared(tensors: list[Tensor]) -> float:
    return sum(float(torch.linalg.vector_norm(wide(tensor))) ** 2 for tensor in tensors)


def of_any_plan(extras: Kept) -> Kept:
    """Of :meth:`BucketStates.extras_by_name`, what does not belong to buckets as they are cut."""
    return {key: owned for key, owned in extras.items() if not key.startswith(_BUCKET)}


def _of_place(extras: Mapping[str, Mapping[str, Tensor]], place: str) -> dict[str, Tensor]:
    return {key.removeprefix(place): owned[WHOLE].clone() for key, owned in extras.items() if key.startswith(place)}
