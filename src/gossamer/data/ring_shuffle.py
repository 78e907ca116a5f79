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
from gossamer.comm.runner import Ticket, alarming, give_up, lane_for
from gossamer.comm.topology import shift
from gossamer.data.answering import Answering, answering
from gossamer.data.collation import collated_again
from gossamer.data.opening import opened
from gossamer.data.options import Options, place_in
from gossamer.data.shares import batches_in, drawn
from gossamer.data.table import Layout
from gossamer.engine.agreement import agree
from gossamer.errors import UsageError

UNDER_WAY = 4
"""Batches that may travel concurrently: what arrives is needed in the next local epoch only, so a neighbour may be late."""


class RingShuffle(IterableDataset[Any]):
    """GossipGraD's distributed sample shuffle: batches that wander around the ring of workers while they are computed on.

    ::

        from gossamer.data import RingShuffle

        with RingShuffle(my_share, batch_size=64) as shuffle:
            for epoch in range(epochs):
                for x, y in shuffle:  # one local epoch: len(shuffle) batches
                    …

    It is iterated as it is. A ``DataLoader`` around it needs ``batch_size=None``, as the batches are made here:
    ``DataLoader(shuffle, batch_size=None, num_workers=0)``; with its default of 1 it is refused.

    Every step, the batch in use is sent to rank − 1, and the one that rank + 1 uses arrives and takes its place, while
    forward and backward run. After one local epoch a worker holds what was its neighbour's share; over ``world`` local
    epochs every sample visits every worker exactly once. Nothing is read from disk again, and no worker ever holds more
    than about its share (plus the batches under way, at most four: so far a neighbour may fall behind before anyone waits).

    All ranks take the same number of batches, ⌈largest share / batch_size⌉. Where shares differ in size, a rank whose
    share would not fill them cuts it into that many of equal size (±1): no sample is lost, repeated or padded. So batches of
    the same step may then differ in size between ranks, and a sample of a smaller batch counts for more in the mean over
    the ranks; ``drop_last`` makes all of them full.

    What travels in a step is a batch as the dataset holds it: bytes rather than floats, where other messages fill the network.

    A batch is a structure like the dataset's items, of CPU tensors ``(n, *shape)`` that belong to the caller. A loop that
    is left early goes on where it stopped; every rank must leave it at the same batch. More in ``docs/shuffle.md``.

    Args:
        dataset: this rank's share: a tensor or array (a sample is a row), a tuple or dict of them, or any map-style dataset
            of tensors, arrays and numbers, which is read once and stacked.
        batch_size: samples per batch.
        group: a process group; the default group if none is given. Without any, a world of one.
        seed: of what is random (``shuffle``, ``mix``, ``split`` and ``deal``); the same on all ranks.
        shuffle: put every share in random order once, before its batches are cut. Else a share that is sorted by label makes
            batches of one label, for ever. Moves nothing.
        mix: compose the batches anew in every local epoch. Else samples that share a batch stay together for ever.
        deal: first deal the shares out among the ranks like cards, so that each holds some of everyone's samples. For shares
            that differ (sorted by label, by site): travelling alone brings every sample to every worker, but in each local
            epoch a worker still holds what another one brought. Sends (p−1)/p of a share, once. (Gossip among 8 workers on
            Fashion-MNIST sorted by label: 72 %, 76 % with samples that travel, and dealt out 88 % as if shuffled globally.)
        split: every rank gives the same whole dataset, and each takes a random share (sizes differ by at most one).
        drop_last: only full batches: ⌊smallest share / batch_size⌋ of them, on all ranks. What is left of a share is not used
            in this local epoch, but travels on with the rest. Others are left over in the next one: over any k local epochs
            a sample of a share of n, of which m are used, is used ⌊k·m/n⌋ or ⌈k·m/n⌉ times (with ``mix``: on average).
        timeout: seconds (or a ``timedelta``) that an exchange may take; the process group's by default.
        replica: of the model that is trained with these samples, if its exchanges may lag (``lag=``): while this rank waits
            for samples, it goes on answering ranks that wait for its weights.

    Raises:
        ConfigurationError: on every rank, if an option is out of range; if a share is empty, smaller than a batch, or too
            small for as many batches as the largest makes; or if the samples cannot be stacked.
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
        shuffle: bool = True,
        mix: bool = False,
        split: bool = False,
        deal: bool = False,
        drop_last: bool = False,
        timeout: float | timedelta | None = None,
        replica: Answering | None = None,
    ) -> None:
        self._replica = replica
        self._epoch = self._step = 0
        self._pending: deque[tuple[Ticket[Tensor], Tensor]] = deque()
        self._closed = False
        self.waited_seconds: float = 0.0
        """For so long the loop has stood still for a batch that had not arrived, since the start."""
        self._home = self._free = torch.empty(0, dtype=torch.int64)
        self._runner = connect(group, None, timeout)
        try:
            self._options = Options(
                batch_size=batch_size, seed=seed, shuffle=shuffle, mix=mix, split=split, deal=deal, drop_last=drop_last
            )
            self._runner.agree_on_opening("gossamer.data.RingShuffle()")
            agree(self._runner, {"the options of RingShuffle": str(self._options)})
            self._open(dataset)
        except BaseException as error:
            give_up(self._runner, error)
            raise

    def _open(self, dataset: Any) -> None:
        runner, options = self._runner, self._options
        self._sizes, self._steps, table = opened(runner, dataset, options)
        self._widest = max(options.batch_size, -(-max(self._sizes) // self._steps))  # with what is left over behind a batch
        self._layout: Layout = table.layout
        self._storage = torch.zeros(self._steps * self._widest, table.layout.row_bytes, dtype=torch.uint8)
        self._place(table.rows)
        if options.shuffle:  # samples stay where they are, and have other numbers
            self._home = drawn(len(table.rows), f"{options.seed}/order of {runner.rank}")
        self._begin_epoch()

    # -- what the user calls ------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Batches per local epoch, equal on all ranks."""
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        """The rest of this local epoch; all of the next one if it is over."""
        if get_worker_info() is not None:
            raise UsageError("RingShuffle exchanges samples from the training process: use DataLoader(…, num_workers=0)")
        if collated_again():
            raise UsageError(
                "RingShuffle makes the batches itself, and this DataLoader would put batches of them together: "
                "use DataLoader(…, batch_size=None)"
            )
        return self._batches_left()

    def _batches_left(self) -> Iterator[Any]:
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
        self._receive()
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
            ConfigurationError: the state is of other shares, options or ranks, or it is no state of a shuffle.
            DisagreementError: ranks load different states.
        """
        with alarming(self._runner):
            epoch, step = place_in(state, self._description(), self._steps)
            agree(self._runner, {"the position in the data": f"epoch {epoch}, batch {step}"})
        self._complete_epoch()
        self._turn(epoch - self._epoch)
        self._epoch, self._step = epoch, 0
        self._begin_epoch()
        while self._step < step:
            self._advance()

    def close(self) -> None:
        """Take in the batches under way and leave. Every rank closes at the same batch."""
        if self._closed:
            return
        self._closed = True
        try:
            self._receive()
        finally:
            self._runner.close()

    def __enter__(self) -> "RingShuffle":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            give_up(self._runner, error)

    # -- one step -----------------------------------------------------------------------------------------------

    def _advance(self) -> Tensor:
        """The rows of the next batch; they leave for rank − 1, and what rank + 1 uses comes."""
        if self._closed:
            raise UsageError("the shuffle is closed")
        self._receive(at_most=UNDER_WAY - 1)
        places = self._home[self._using[self._step]]
        message = torch.zeros(self._widest, self._storage.shape[1], dtype=torch.uint8)
        message[: len(places)] = self._storage[places]
        self._free = torch.cat([self._free, places])
        along = shift(1, self._runner.world)
        label = f"the samples of batch {self._step} in local epoch {self._epoch}"
        ticket = self._runner.submit(lambda: permute(message, along), label, lane_for(message))
        self._pending.append((ticket, self._coming[self._step]))
        self._step += 1
        # To be read only, while it is on the wire; what is left over of a share travels behind the batch.
        return message[: len(places)][: self._options.batch_size]

    def _receive(self, at_most: int = 0) -> None:
        """Put what has come where there is room, and wait until ``at_most`` so many batches are under way.

        Which samples they are, every rank knows by itself.
        """
        while self._pending and (len(self._pending) > at_most or self._runner.arrived(self._pending[0][0])):
            ticket, indices = self._pending.popleft()
            begin = time.perf_counter()
            rows = self._runner.wait(ticket, None if self._replica is None else answering(self._replica))
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
        return batches_in(self._epoch, share, self._sizes[share], self._steps, self._options)

    def _next_epoch(self) -> None:
        self._receive()
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
        return f"{self._options}, shares of {list(self._sizes)} samples {self._layout}"
