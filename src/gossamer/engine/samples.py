"""Samples: on how many each worker has trained since an exchange, so that it counts by them in the next mean."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gossamer.algorithms.blocks.shares import factor
from gossamer.buckets import Bucket
from gossamer.comm.ops import all_gather
from gossamer.comm.runner import CONTROL, Runner, Ticket
from gossamer.engine.bucket_states import Kept
from gossamer.engine.history import weight_of
from gossamer.engine.statistics import Statistics
from gossamer.errors import UsageError
from gossamer.pieces import part_of

SAMPLES = "(samples)"
"""The name under which their numbers are saved."""


class Samples:
    """The samples since each bucket's last exchange. None: workers count alike."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self.begin()

    def begin(self) -> None:
        """Those so far belong to other exchanges."""
        self._before = self._statistics.samples or 0.0
        self._until: dict[int, float] = {}

    def _since(self, index: int) -> float | None:
        seen = self._statistics.samples
        return None if seen is None else seen - self._until.get(index, self._before)

    def take(self, index: int) -> float | None:
        """The samples since the last exchange of a bucket, whose next one begins."""
        since = self._since(index)
        if self._statistics.samples is not None:
            self._until[index] = self._statistics.samples
        return since

    def saved(self, buckets: Sequence[Bucket]) -> Kept:
        """Their numbers, by parameter, as buckets may be others where they are loaded."""
        if self._statistics.samples is None:
            return {}
        numbers = [(bucket, torch.tensor(self._since(bucket.index), dtype=torch.float64)) for bucket in buckets]
        return {SAMPLES: {name: number for bucket, number in numbers for name in bucket.layout.names}}

    def load(self, kept: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Bucket]) -> None:
        """Put back what :meth:`saved` returned. Parameters may have been cut into other pieces there, and what is remembered of
        them may not have been among them: it has the number of its weight."""
        self.begin()
        if SAMPLES not in kept:
            return
        self._statistics.samples = seen = self._before
        numbers = kept[SAMPLES]
        of_whole = {part_of(name)[0]: number for name, number in numbers.items()}
        for bucket in buckets:
            name = bucket.layout.names[0]
            whole = part_of(name)[0]
            known = (numbers.get(name), of_whole.get(whole), of_whole.get(weight_of(whole)))
            self._until[bucket.index] = seen - next((float(number) for number in known if number is not None), 0.0)


class GradientShare:
    """With how much this worker's gradients count in the mean of a pass."""

    def __init__(self, runner: Runner, statistics: Statistics) -> None:
        self._runner, self._statistics, self._samples = runner, statistics, Samples(statistics)
        self._calls = 0
        self._ticket: Ticket[Tensor] | None = None
        self._factor: Tensor | None = None

    def ask(self, step: int, may_have_none: bool, averages: bool) -> None:
        """A pass begins, and if it ``averages``: tell the others the samples of this rank, and learn theirs meanwhile.
        ``may_have_none``: nobody has to have counted any (``join()``)."""
        self._ticket = self._factor = None
        count = self._samples.take(0)
        if count is None or not averages:
            return
        calls, self._calls = self._calls, self._statistics.weighings
        if calls == self._calls and not may_have_none:
            raise UsageError(
                f"rank {self._runner.rank}: weigh() was called before other passes, and not before that of step {step}: call "
                "it before each backward pass whose gradients are exchanged"
            )
        mine = torch.tensor([count], dtype=torch.float64)
        self._ticket = self._runner.submit(lambda: all_gather(mine), f"numbers of samples at step {step}", CONTROL)

    def scale(self, flat: Tensor) -> None:
        """Scale the gradients in a bucket that is about to leave, in place."""
        if self._ticket is None:
            return
        if self._factor is None:
            with self._statistics.exposed():
                self._factor = factor(self._runner.wait(self._ticket).flatten(), self._runner.rank)
        flat.mul_(self._factor.to(flat.device))
