"""Chooser: a replica that begins with plain all-reduce, measures, and goes on with what a plan says; perhaps again and again.

A prediction may be wrong, and never costs more than a few steps: a method that was chosen stays only if its steps are measured
to be faster than those of the one before, and while another one is predicted to be faster still, that is tried, too.

Note [collective decisions]: everything here happens at the end of steps of the same number on all ranks, from figures that all
have exchanged, so that all ranks measure, choose and switch together.
"""

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch

from gossamer.comm.ops import maximum
from gossamer.engine.acceptance import accept
from gossamer.engine.agreement import values_of_all
from gossamer.engine.assembly import Parts
from gossamer.engine.noise import NoiseScale, noise_scale
from gossamer.planning.candidates import Candidate, Fidelity, candidates, overlapped
from gossamer.planning.choose import PLAIN, Row
from gossamer.planning.facts import nodes_of
from gossamer.planning.plan import Plan, planned
from gossamer.planning.profile import STEPS, StepProfile
from gossamer.replica import Replica
from gossamer.simulate.profile import Compute

_logger = logging.getLogger("gossamer")

LEARNING = 2
"""Steps before the watched ones: in the first the order of gradients is learned, and memory is made."""

WINDOW = 8
"""Steps of one observation, or whole periods of the method, if these are longer: the median of the periods' means."""

TRIALS = 3
"""How many methods are tried, one after the other, until the best of them stays."""

TOLERATED, GAIN, IN_A_ROW = 0.2, 0.1, 3
"""By which share an observation must differ from what was expected to disagree; what a switch must gain; how many observations
must disagree one after the other."""


@dataclass
class Wish:
    """What the user wants to be chosen. ``path``: where the plan is kept; ``switch``: choose again when the network changes."""

    fidelity: Fidelity
    path: Path | None = None
    switch: bool = False


def make(parts: Parts, compute: Compute, fidelity: Fidelity, noise: float | None, method: str, seconds: float) -> Plan:
    """Measure, and choose on rank 0 for all. Collective, while nothing is under way.

    ``method``, ``seconds``: what a step has taken so far, with what.
    """
    overlap = parts.overlap is not None
    found = candidates(fidelity, parts.optimizers, nodes_of(parts.runner), noise)
    asked = partial(accept, buffers=parts.buffers_asked, scaler=parts.scaler)
    taken = Candidate(method=method, fidelity=fidelity, overlap_forward=overlap), seconds
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
        taken,
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
            return
        self._taken += 1
        self._profile.end_step()
        if self._taken == LEARNING + STEPS:
            self._choose()

    def _choose(self) -> None:
        replica, parts, wish = self._replica, self._parts, self._wish
        self._profile.release()
        compute = self._profile.compute(parts.runner, LEARNING)
        seconds = self._profile.step_seconds(parts.runner)
        replica.wait_for_exchanges()
        if parts.gradients is not None:
            parts.gradients.exchange.noise = parts.statistics.noise
        noise = noise_scale(values_of_all(parts.runner, self._noise.sums()), parts.runner.world)
        plan = make(parts, compute, wish.fidelity, noise, PLAIN, seconds)
        if parts.runner.rank == 0:
            _keep(plan, wish)
            _logger.info(
                "plan (fidelity=%r, measured in %.1f s): %s. %s", wish.fidelity, plan.facts.seconds, plan.method, plan.why
            )
        changes = plan.algorithm != replica.algorithm
        self._then = Watch(replica, parts, wish, plan, plan.of(PLAIN, plan.overlap_forward) if changes else None)
        if changes:
            replica.switch(plan.algorithm)


def _keep(plan: Plan, wish: Wish) -> None:
    if wish.path is not None:
        plan.save(wish.path)


class Watch:
    """Compares steps with what a plan expects of them: first, on trial, with the best so far; then, if the user wants that,
    chooses again where they disagree for long."""

    def __init__(self, replica: Replica, parts: Parts, wish: Wish, plan: Plan, best: Row | None = None) -> None:
        """``best``: the method before, and what its steps took; None: there was none."""
        self._replica, self._parts, self._wish, self._plan = replica, parts, wish, plan
        self._expected = plan.row.step_seconds
        self._seconds: list[float] = []
        self._last: float | None = None
        self._disagreed = 0
        self._best: Row | None = None
        self._learning = self._trials = 0
        if best is not None:
            self._begin_trial(best, TRIALS)

    def after_step(self) -> None:
        """A step is over."""
        if self._best is None and not self._wish.switch:
            return
        now = self._parts.runner.now()
        if self._learning:
            self._learning -= 1
        elif self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now
        period = self._replica.algorithm.cadence.period
        if len(self._seconds) == -(-WINDOW // period) * period:
            self._compare(period)

    def _compare(self, period: int) -> None:
        runner, seconds, self._seconds = self._parts.runner, self._seconds, []
        means = [fmean(seconds[begin : begin + period]) for begin in range(0, len(seconds), period)]
        mine = torch.tensor([median(means)], dtype=torch.float64)
        slowest = float(runner.run(lambda: maximum(mine, runner.world), "what a step takes").item())
        if self._best is not None:
            self._end_trial(self._best, slowest)
            return
        apart = abs(slowest / self._expected - 1) > TOLERATED
        self._disagreed = self._disagreed + 1 if apart else 0
        if self._disagreed == IN_A_ROW:
            self._choose_again(slowest)

    def _begin_trial(self, best: Row, trials: int) -> None:
        """Watch steps of the method that the plan now says."""
        self._best, self._trials, self._learning, self._last = best, trials, LEARNING, None

    def _end_trial(self, best: Row, observed: float) -> None:
        """Go on with the best method of which steps were taken, or try another one."""
        before, trials = self._plan, self._trials - 1
        self._plan = plan = before.after_trial(observed, best, trials > 0)
        self._expected, self._best, self._last = plan.row.step_seconds, None, None
        known, changes = str(plan.row) in plan.facts.steps, plan.method != before.method
        if self._parts.runner.rank == 0:
            _keep(plan, self._wish)
            how = ("back to" if known else "on trial") if changes else "staying with"
            _logger.info("%s %s after step %d: %s", how, plan.method, self._replica.step, plan.why)
        if not known:
            self._begin_trial(plan.of(before.method, before.overlap_forward), trials)
        if changes:
            self._replica.switch(plan.algorithm)

    def _choose_again(self, observed: float) -> None:
        """Measure anew. Where nothing is gained, what is observed is expected from now on."""
        replica, parts, before = self._replica, self._parts, self._plan
        self._disagreed, self._last = 0, None
        replica.wait_for_exchanges()
        plan = make(parts, before.facts.compute, self._wish.fidelity, before.facts.noise, before.method, observed)
        now = plan.of(before.method, before.overlap_forward)
        if now.seconds <= (1 + GAIN) * plan.row.seconds:
            self._expected = observed
            return
        if parts.runner.rank == 0:
            _logger.info(
                "a step takes %.4g ms instead of %.4g: from %s to %s after step %d. %s",
                1e3 * observed, 1e3 * self._expected, before.method, plan.method, replica.step, plan.why
            )  # fmt: skip
        self._plan, self._expected = plan, plan.row.step_seconds
        self._begin_trial(now, TRIALS)
        replica.switch(plan.algorithm)
