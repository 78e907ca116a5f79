"""Statistics: what a replica counts about its own communication."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gossamer.comm.runner import Runner
from gossamer.engine.loop import Subscriber
from gossamer.engine.noise import NoiseScale, noise_scale


@dataclass
class Statistics(Subscriber):
    """Counters of one replica on this rank. ``exposed_seconds``: the training loop stood still for communication."""

    runner: Runner
    sizes: Sequence[int] = ()
    """Of each optimizer, the bytes of its parameters' gradients."""
    exposed_seconds: float = 0.0
    noise: NoiseScale | None = None
    """Of the gradients, if it is measured."""
    samples: float | None = None
    """How many this rank has counted (``Replica.weigh``); None: ranks count alike."""
    weighings: int = 0
    """How often it has counted any."""
    gradient_bytes: int = 0
    """Size of the gradients of every optimizer step so far, before any encoding."""
    _begun: float = field(init=False)
    _ended: dict[str, float] = field(default_factory=dict)
    """The totals at the end of the last step."""
    _last: dict[str, float] = field(default_factory=dict)
    """What the last step has added to them."""

    def __post_init__(self) -> None:
        self._begun = self.runner.now()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the time inside as exposed."""
        begin = self.runner.now()
        try:
            yield
        finally:
            self.exposed_seconds += self.runner.now() - begin

    def totals(self) -> dict[str, float]:
        """Bytes, messages and seconds since the start."""
        meters = self.runner.meters()
        return {
            "bytes_sent": sum(meter.bytes for meter in meters),
            "messages_sent": sum(meter.messages for meter in meters),
            "exposed_seconds": self.exposed_seconds,
            "wire_seconds": sum(meter.wire_seconds for meter in meters),
            # Each by itself: a lane that waits at the moment has counted that, and not yet the time of its flow.
            "local_seconds": sum(max(0.0, meter.busy_seconds - meter.wire_seconds) for meter in meters),
            "elapsed_seconds": self.runner.now() - self._begun,
        }

    def after_step(self, index: int) -> None:
        """Count what the step took. Those of the first optimizer are the steps of which :meth:`read` tells the last one."""
        self.gradient_bytes += self.sizes[index]
        if index == 0:
            now = self.totals()
            self._last = {name: max(0.0, total - self._ended.get(name, 0.0)) for name, total in now.items()}
            self._ended = now

    def read(self, step: int, shares: Sequence[tuple[float, float]]) -> dict[str, float]:
        """All counters: totals since the start, what the last step took, and how much the algorithm saves and keeps back.

        ``shares``: see ``BucketStates.residual_share``.
        """
        totals, world = self.totals(), self.runner.world
        exact, sent = 2 * (world - 1) / world * self.gradient_bytes, totals["bytes_sent"]
        kept_back, held = sum(mine for mine, _ in shares), sum(held for _, held in shares)
        noise = None if self.noise is None else noise_scale([self.noise.sums()], world)
        return {
            **({} if self.noise is None else {"noise_scale": math.nan if noise is None else noise}),
            "step": step,
            "compression_ratio": exact / sent if sent else 1.0,
            "residual_norm": math.sqrt(kept_back / held) if held else 0.0,
            **totals,
            **{f"{name}_last_step": self._last.get(name, 0.0) for name in totals},
        }
