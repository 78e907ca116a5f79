"""Ring shuffle: every worker holds its share of the samples, and passes on each batch that it has used."""

import time
from collections import deque
from collections.abc import Iterator, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from gossamer.comm.connect import connect
from gossamer.comm.ops import permute
from gossamer.comm.runner import Ticket, lane_for
from gossamer.comm.topology import shift
from gossamer.data.deal import dealt, dealt_sizes
from gossamer.data.shares import batches_of, check_integers, cut, drawn, gathered
from gossamer.data.table import Layout, Table, count, load
from gossamer.errors import CommunicationError, ConfigurationError, UsageError
from gossamer.sync.agreement import agree
from gossamer.sync.backward import alarming

UNDER_WAY = 4
"""Batches that may travel at once: what arrives is needed in the next local epoch only, so a neighbour may be late."""


class RingShuffle(IterableDataset[Any]):
    """GossipGraD's distributed sample shuffle: batches that wander around the ring of workers while they are computed on.

    ::

        with gossamer.data.RingShuffle(my_share, batch_size=64) as shuffle:
            for epoch in range(epochs):
                for x, y in shuffle:  # one local epoch: len(shuffle) batches
                    …

    Every step, the batch in use is sent to rank − 1, and the one that rank + 1 uses arrives and takes its place, while
    forward and backward run. After one local epoch a worker holds what was its neighbour's share; over ``world`` local
    epochs every sample visits every worker exactly once. Nothing is read from disk again, and no worker ever holds more
    than about its share (plus the batches under way, at most four: so far a neighbour may fall behind before anyone waits).

    All ranks take the same number of batches, ⌈largest share / batch_size⌉. Where shares differ in size, a rank whose
    share would not fill them cuts it into that many of equal size (±1): no sample is lost, repeated or padded.

    What travels in a step is a batch as the dataset holds it: bytes rather than floats, where other messages fill the network.

    A batch is a structure like the dataset's items, of CPU tensors ``(n, *shape)`` that belong to the caller. A loop that
    is left early goes on where it stopped; every rank must leave it at the same batch. To wrap it:
    ``DataLoader(shuffle, batch_size=None, num_workers=0)``.

    Args:
        dataset: this rank's share: a tensor or array (a sample is a row), a tuple or dict of them, or any map-style dataset
            of tensors, arrays and numbers, which is read once and stacked.
        batch_size: samples per batch.
        group: a process group; the default group if none is given. Without any, a world of one.
        seed: of what is random (``mix`` and ``split``); the same on all ranks.
        mix: also compose the batches anew in every local epoch. Else samples that share a batch stay together for ever.
        deal: first deal the shares out among the ranks like cards, so that each holds some of everyone's samples. For shares
            that differ (sorted by label, by site): travelling alone brings every sample to every worker, but in each local
            epoch a worker still holds what another one brought. Sends (p−1)/p of a share, once. (Gossip among 8 workers on
            Fashion-MNIST sorted by label: 71 %, 75 % with samples that travel, and dealt out 89 % as if shuffled globally.)
        split: every rank gives the same whole dataset, and each takes a random share (sizes differ by at most one).
        timeout: seconds (or a ``timedelta``) that an exchange may take; the process group's by default.

    Raises:
        ConfigurationError: on every rank, if a share is empty, smaller than a batch, or too small for as many batches as the
            largest makes; or if the samples cannot be stacked.
        DisagreementError: on every rank, if samples or arguments differ between ranks.

    Source: Daily et al. 2018 (arXiv 1803.05880), the asynchronous distributed sample shuffle.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        group: Any = None,
        seed: int = 0,
        *,
        mix: bool = False,
        split: bool = False,
        deal: bool = False,
        timeout: float | timedelta | None = None,
    ) -> None:
        self._batch_size, self._seed, self._mix, self._deal = batch_size, seed, mix, deal
        self._epoch = self._step = 0
        self._pending: deque[tuple[Ticket[Tensor], Tensor]] = deque()
        self._closed = False
        self.waited_seconds = 0.0
        """For so long the loop has stood still for a batch that had not arrived, since the start."""
        self._home = self._free = torch.empty(0, dtype=torch.int64)
        self._runner = connect(group, None, timeout)
        try:
            with alarming(self._runner):
                check_integers(batch_size, seed)
                self._runner.agree_on_opening("gossamer.data.RingShuffle()")
                options = f"batch_size={batch_size}, seed={seed}, mix={mix}, split={split}, deal={deal}"
                agree(self._runner, {"the options of RingShuffle": options})
                self._open(dataset, split)
        except BaseException:
            self._runner.close(graceful=False)
            raise

    def _open(self, dataset: Any, split: bool) -> None:
        total, runner = count(dataset), self._runner
        if split:
            agree(runner, {"the size of the dataset to split": f"{total} samples"})
            chosen = drawn(total, f"{self._seed}/split")[runner.rank :: runner.world].tolist()
        else:
            chosen = list(range(total))
        brought = gathered(runner, len(chosen))
        self._sizes = dealt_sizes(brought) if self._deal else brought
        self._steps = batches_of(self._sizes, self._batch_size)
        table: Table = load(dataset, chosen)
        agree(runner, {"samples": str(table.layout), "their structure": str(table.layout.structure)})
        self._layout: Layout = table.layout
        rows = dealt(runner, table.rows, brought, f"{self._seed}/deal") if self._deal else table.rows
        self._storage = torch.zeros(self._steps * self._batch_size, table.layout.row_bytes, dtype=torch.uint8)
        self._place(rows)
        self._begin_epoch()

    # -- what the user calls ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per local epoch, equal on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """The rest of this local epoch; all of the next one if it is over."""
        if get_worker_info() is not None:
            raise UsageError("RingShuffle exchanges samples from the training process: use DataLoader(…, num_workers=0)")
        if self._step == self._steps:
            self._next_epoch()
        while self._step < self._steps:
            yield self._layout.unpack(self._advance())

    @property
    def epoch(self) -> int:
        """Local epochs completed, or the one under way (from 0)."""
        return self._epoch

    def samples(self) -> Any:
        """All samples that this rank holds now, in no particular order, as one batch. Waits for those under way."""
        self._land()
        left = [self._home[indices] for indices in self._using[self._step :]]
        come = [self._next_home[indices] for indices in self._coming[: self._step]]
        return self._layout.unpack(self._storage[torch.cat(left + come)])

    def state_dict(self) -> dict[str, Any]:
        """Where the shuffle stands: a few numbers, no samples; equal on all ranks."""
        return {"format": 1, "epoch": self._epoch, "step": self._step, "made for": self._description()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where :meth:`state_dict` was taken, on a shuffle of the same shares. Collective.

        Shares are moved there in one exchange (and the batches of the local epoch that was under way one by one).

        Raises:
            ConfigurationError: the state is of other shares, options or ranks.
            DisagreementError: ranks load different states.
        """
        with alarming(self._runner):
            if state.get("format") != 1 or state["made for"] != self._description():
                raise ConfigurationError(f"the state is of {state.get('made for')}; this is {self._description()}")
            agree(self._runner, {"the position in the data": f"epoch {state['epoch']}, batch {state['step']}"})
        self._complete_epoch()
        self._turn(state["epoch"] - self._epoch)
        self._epoch, self._step = state["epoch"], 0
        self._begin_epoch()
        while self._step < state["step"]:
            self._advance()

    def close(self) -> None:
        """Take in the batches under way and leave. Every rank closes at the same batch."""
        if self._closed:
            return
        self._closed = True
        try:
            self._land()
        finally:
            self._runner.close()

    def __enter__(self) -> "RingShuffle":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            if not isinstance(error, CommunicationError):  # the others know of those
                self._runner.alarm(f"rank {self._runner.rank}: {type(error).__name__}: {error}")
            self._runner.close(graceful=False)

    # -- one step -----------------------------------------------------------------------------------------------

    def _advance(self) -> Tensor:
        """The rows of the next batch; they leave for rank − 1, and what rank + 1 uses comes."""
        if self._closed:
            raise UsageError("the shuffle is closed")
        self._land(at_most=UNDER_WAY - 1)
        places = self._home[self._using[self._step]]
        message = torch.zeros(self._batch_size, self._storage.shape[1], dtype=torch.uint8)
        message[: len(places)] = self._storage[places]
        self._free = torch.cat([self._free, places])
        along = shift(1, self._runner.world)
        label = f"the samples of batch {self._step} in local epoch {self._epoch}"
        ticket = self._runner.submit(lambda: permute(message, along), label, lane_for(message))
        self._pending.append((ticket, self._coming[self._step]))
        self._step += 1
        return message[: len(places)]  # to be read only, while it is on the wire

    def _land(self, at_most: int = 0) -> None:
        """Put what has come where there is room, and wait until ``at_most`` so many batches are under way.

        Which samples they are, every rank knows by itself.
        """
        while self._pending and (len(self._pending) > at_most or self._runner.arrived(self._pending[0][0])):
            ticket, indices = self._pending.popleft()
            begin = time.perf_counter()
            rows = self._runner.wait(ticket)
            self.waited_seconds += time.perf_counter() - begin
            places, self._free = self._free[: len(indices)], self._free[len(indices) :]
            self._storage[places] = rows[: len(indices)]
            self._next_home[indices] = places

    # -- local epochs -------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        """Cut batches: of the share that this rank holds, and of the next rank's, which is going to come.

        Shares are numbered by the rank that brought them; in local epoch e, rank r uses share r + e.
        """
        share = (self._runner.rank + self._epoch) % self._runner.world
        coming = (share + 1) % self._runner.world
        self._using, self._coming = self._batches(share), self._batches(coming)
        self._next_home = torch.full((self._sizes[coming],), -1)

    def _batches(self, share: int) -> tuple[Tensor, ...]:
        """The samples of each batch of a share in this local epoch, as numbers within the share."""
        size = self._sizes[share]
        order = drawn(size, f"{self._seed}/{share}/{self._epoch}") if self._mix else torch.arange(size)
        return torch.split(order, cut(size, self._steps, self._batch_size))

    def _next_epoch(self) -> None:
        self._land()
        self._home = self._next_home
        self._epoch, self._step = self._epoch + 1, 0
        self._begin_epoch()

    def _complete_epoch(self) -> None:
        """Pass on the rest of a local epoch that is under way, unused."""
        while 0 < self._step < self._steps:
            self._advance()
        if self._step:
            self._next_epoch()

    def _turn(self, epochs: int) -> None:
        """Take over the share that is due in so many epochs, from the rank that holds it."""
        distance = epochs % self._runner.world
        if distance == 0:
            return
        held = self._storage[self._home]
        rows = torch.zeros(max(self._sizes), held.shape[1], dtype=torch.uint8)
        rows[: len(held)] = held
        along = shift(distance, self._runner.world)
        came = self._runner.run(lambda: permute(rows, along), "the samples of a share", lane_for(rows))
        share = (self._runner.rank + self._epoch + epochs) % self._runner.world
        self._place(came[: self._sizes[share]])

    def _place(self, rows: Tensor) -> None:
        """Put a whole share into the storage, which is empty."""
        self._storage[: len(rows)] = rows
        self._home = torch.arange(len(rows))
        self._free = torch.arange(len(rows), len(self._storage))

    def _description(self) -> str:
        options = f"batch_size={self._batch_size}, seed={self._seed}, mix={self._mix}, deal={self._deal}"
        return f"{options}, shares of {list(self._sizes)} samples {self._layout}"
