"""Local: what ranks compute for an exchange: codecs, sums and copies, by running its flow without a network."""

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.bucket_plan import make_plan
from gossamer.buckets import Bucket
from gossamer.comm.echo import EchoPort
from gossamer.comm.ops import AllGather, AllToAll, Group, Op, Permute, Push, drive
from gossamer.planning.links import Pattern, wait_for
from gossamer.state import State

ELEMENTS = 2**18
"""Of the bucket by which it is told: 1 MiB in fp32."""


_PATTERNS: dict[type[Op], Pattern] = {Permute: "pair", Push: "pair", AllToAll: "all", AllGather: "all"}
"""By what pattern the links of an operation are measured; of all others a ring."""


class Counting(EchoPort):
    """Counts what is sent."""

    def __init__(self, world: int) -> None:
        super().__init__(0, world)
        self.sent: Counter[Pattern] = Counter()
        """Bytes by pattern."""

    def start(self, op: Op, group: Group | None = None) -> Tensor:
        world = len(self._everyone if group is None else group)
        self.sent[_PATTERNS.get(type(op), "ring")] += op.traffic(world).bytes
        return super().start(op, group)


class Exchanged:
    """One bucket that an algorithm exchanges with itself, again and again."""

    def __init__(self, algorithm: Algorithm, world: int, nodes: tuple[Group, ...] | None, device: torch.device) -> None:
        numbers = torch.randn(512, ELEMENTS // 512, generator=torch.Generator().manual_seed(0)).to(device)
        weights = algorithm.subject == "weights"
        plan = make_plan({"weight": numbers}, algorithm, together=weights)
        self._buckets = [Bucket(index, layout) for index, layout in enumerate(plan.layouts)]
        self._states = [State(bucket.flat) for bucket in self._buckets]
        self._algorithm, self._numbers, self._step = algorithm, numbers, 0
        self._world, self._nodes = world, nodes
        self._port = Counting(world)

    @property
    def pattern(self) -> Pattern:
        """The one by which most of its bytes travel."""
        return max(self._port.sent, key=lambda pattern: self._port.sent[pattern], default="ring")

    def best_of(self, times: int, now: Callable[[], float]) -> float:
        """Seconds of one exchange by the clock ``now``: the least of several, after one that is not counted."""
        seconds = []
        for _ in range(1 + times):
            begin = now()
            self()
            wait_for(self._numbers.device)
            seconds.append(now() - begin)
        return min(seconds[1:])

    def __call__(self) -> None:
        """Once, with everything that is due at the next step at which anything is."""
        self._step += 1
        while not self._algorithm.cadence.due(self._step):
            self._step += 1
        context = Context(self._step, 0, tuple(range(self._world)), self._nodes)
        for bucket, state in zip(self._buckets, self._states, strict=True):
            bucket.renew()
            bucket.flat.copy_(self._numbers.reshape(-1))
            drive(bucket.layout.handler.exchange(bucket, state, context), self._port)
            state.commit()
