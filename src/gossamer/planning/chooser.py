"""Chooser: a replica that begins with plain all-reduce, measures, and goes on with what a plan says; perhaps again and again.

Note [collective decisions]: everything here happens at the end of steps of the same number on all ranks, from figures that all
have exchanged, so that all ranks measure, choose and switch together.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from gossamer.comm.ops import maximum
from gossamer.engine.acceptance import accept
from gossamer.engine.agreement import values_of_all
from gossamer.engine.assembly import Parts
from gossamer.engine.noise import NoiseScale, noise_scale
from gossamer.planning.candidates import Fidelity, candidates, overlapped
from gossamer.planning.facts import nodes_of
from gossamer.planning.plan import Plan, planned
from gossamer.planning.profile import STEPS, StepProfile
from gossamer.replica import Replica
from gossamer.simulate.profile import Compute

_logger = logging.getLogger("gossamer")

LEARNING = 2
"""Steps before the watched ones: in the first the order of gradients is learned, and memory is made."""

WINDOW = 8
"""Steps whose median is one observation."""

TOLERATED, GAIN, IN_A_ROW = 0.2, 0.1, 3
"""By which share an observation must differ from what was expected to disagree; what a switch must gain; how many observations
must disagree one after the other."""


@dataclass
class Wish:
    """What the user wants to be chosen. ``path``: where the plan is kept; ``switch``: choose again when the network changes."""

    fidelity: Fidelity
    path: Path | None = None
    switch: bool = False


def make(parts: Parts, compute: Compute, fidelity: Fidelity, noise: float | None) -> Plan:
    """Measure, and choose on rank 0 for all. Collective, while nothing is under way."""
    overlap = parts.overlap is not None
    found = candidates(fidelity, parts.optimizers, nodes_of(parts.runner), noise)
    asked = partial(accept, buffers=parts.buffers_asked, scaler=parts.scaler)
    return planned(
        parts.runner,
        parts.model,
        parts.optimizers,
        compute,
        overlapped(found) if overlap else found,
        fidelity,
        overlap,
        asked,
        noise,
    )


class Chooser:
    """Watches the first steps, then makes the plan and lets the replica go on with it."""

    def __init__(self, replica: Replica, parts: Parts, wish: Wish) -> None:
        self._replica, self._parts, self._wish = replica, parts, wish
        self._profile = StepProfile(parts.model, parts.trainable, parts.optimizers[0], parts.runner.now)
        self._profile.hook()
        self._noise = NoiseScale(parts.runner.world)
        if parts.gradients is not None:
            parts.gradients.exchange.noise = self._noise
        self._taken = 0
        self._then: Watch | None = None

    def after_step(self) -> None:
        """A step is over."""
        if self._then is not None:
            self._then.after_step()
        if self._taken == LEARNING + STEPS:
            return
        self._taken += 1
        self._profile.end_step()
        if self._taken == LEARNING + STEPS:
            self._choose()

    def _choose(self) -> None:
        replica, parts, wish = self._replica, self._parts, self._wish
        self._profile.release()
        compute = self._profile.compute(parts.runner, LEARNING)
        replica.wait_for_exchanges()
        if parts.gradients is not None:
            parts.gradients.exchange.noise = parts.statistics.noise
        noise = noise_scale(values_of_all(parts.runner, self._noise.sums()), parts.runner.world)
        plan = make(parts, compute, wish.fidelity, noise)
        if wish.switch:
            self._then = Watch(replica, parts, wish, plan)
        if parts.runner.rank == 0:
            if wish.path is not None:
                plan.save(wish.path)
            _logger.info(
                "plan (fidelity=%r, measured in %.1f s): %s. %s", wish.fidelity, plan.facts.seconds, plan.method, plan.why
            )
        if plan.algorithm != replica.algorithm:
            replica.switch(plan.algorithm)


class Watch:
    """Compares steps with what a plan expects of them, and chooses again where they disagree for long."""

    def __init__(self, replica: Replica, parts: Parts, wish: Wish, plan: Plan) -> None:
        self._replica, self._parts, self._wish, self._plan = replica, parts, wish, plan
        self._expected = plan.row.step_seconds
        self._seconds: list[float] = []
        self._last: float | None = None
        self._disagreed = 0

    def after_step(self) -> None:
        """A step is over."""
        now = self._parts.runner.now()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        if len(self._seconds) == WINDOW:
            self._compare()

    def _compare(self) -> None:
        runner, mine = self._parts.runner, torch.tensor([median(self._seconds)], dtype=torch.float64)
        self._seconds = []
        slowest = float(runner.run(lambda: maximum(mine, runner.world), "what a step takes").item())
        apart = abs(slowest / self._expected - 1) > TOLERATED
        self._disagreed = self._disagreed + 1 if apart else 0
        if self._disagreed == IN_A_ROW:
            self._choose_again(slowest)

    def _choose_again(self, observed: float) -> None:
        """Measure anew. Where nothing is gained, what is observed is expected from now on."""
        replica, parts, before = self._replica, self._parts, self._plan
        self._disagreed, self._last = 0, None
        replica.wait_for_exchanges()
        plan = make(parts, before.facts.compute, self._wish.fidelity, before.facts.noise)
        if plan.of(before.method, before.overlap_forward).seconds <= (1 + GAIN) * plan.row.seconds:
            self._expected = observed
            return
        if parts.runner.rank == 0:
            _logger.info(
                "a step takes %.4g ms instead of %.4g: from %s to %s after step %d. %s",
                1e3 * observed, 1e3 * self._expected, before.method, plan.method, replica.step, plan.why
            )  # fmt: skip
        self._plan, self._expected = plan, plan.row.step_seconds
        replica.switch(plan.algorithm)
