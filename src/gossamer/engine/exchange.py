"""Exchange: one algorithm over the buckets of a plan, and the flows of one step that are under way.

What gradients, weights and optimizers have in common. Threads and ownership: see the note in ``gossamer.comm.torch.lanes``.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from gossamer.algorithms.base import NOTHING, Algorithm, Context, finishes, wrong_shape
from gossamer.algorithms.cadence import Cadence
from gossamer.bucket_plan import Plan
from gossamer.buckets import Bucket, Segment
from gossamer.comm.ops import Flow
from gossamer.comm.runner import Runner, Ticket
from gossamer.engine.bucket_states import BucketStates
from gossamer.engine.finite import any_non_finite, where_they_are
from gossamer.engine.noise import NoiseScale
from gossamer.engine.turns import in_turn
from gossamer.engine.unsent import inherit, inherit_again
from gossamer.state import State


class Exchange:
    """One algorithm over the buckets of a plan."""

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        alone: bool = False,
        finite: bool = True,
    ) -> None:
        """``alone``: nothing else of this runner uses its data lanes. ``finite``: a step whose results are not finite leaves no
        trace in the state, so they are searched."""
        self.runner: Runner = runner
        self.algorithm: Algorithm = algorithm
        self._finite = finite
        self._alone, self._prompt, self._overtakes = alone, False, False
        self.noise: NoiseScale | None = None
        """Of gradients, if it is measured."""
        self.plan: Plan = Plan(())
        self.buckets: list[Bucket] = []
        self.handlers: list[Algorithm] = []
        """The algorithm for each bucket."""
        self.cadences: list[Cadence] = []
        """When each bucket is exchanged."""
        self.states: BucketStates = BucketStates(runner)
        self._steady = True
        """Whether every bucket is exchanged at every step."""
        self._lanes: tuple[int, ...] = ()
        self.order: list[int] = []
        """In which order buckets are launched, by their index in the plan."""
        self._step = 0
        """Of the last exchange that was launched."""
        self._tickets: dict[int, Ticket[Any]] = {}
        """One for each bucket that was launched."""
        self._finishers: dict[str, list[int]] = {}
        """By group, the buckets of an algorithm that does something once per step."""
        self._searched: set[int] = set()
        """Buckets of which the result, and what was written with it, were searched for inf and NaN."""
        self._poisoned: set[int] = set()
        """Those in which there was any."""

    def adopt(self, plan: Plan) -> None:
        """Allocate buckets for ``plan``, carrying the algorithm's state over by parameter name."""
        if self.noise is not None:
            self.noise.forget()
        self.plan, self.buckets = plan, [Bucket(index, layout) for index, layout in enumerate(plan.layouts)]
        self.handlers = [layout.handler for layout in plan.layouts]
        self.cadences = [handler.cadence for handler in self.handlers]
        self._steady = all(cadence.every_step for cadence in self.cadences)
        self.arrange(range(len(plan.layouts)))
        self._prompt = self._alone and all(handler.traits.prompt for handler in self.handlers)
        self._finishers = self._by_group(index for index, handler in enumerate(self.handlers) if finishes(handler))
        self.states.adopt(self.buckets)

    def _by_group(self, indices: Iterable[int]) -> dict[str, list[int]]:
        """Buckets of one handler (and one optimizer) together."""
        found: dict[str, list[int]] = {}
        for index in indices:
            found.setdefault(self.plan.layouts[index].group, []).append(index)
        return found

    def arrange(self, order: Sequence[int]) -> None:
        """Launch the buckets in another order than the plan's. It changes when they travel, and nothing else."""
        self.order = list(order)
        lanes = Plan(tuple(self.plan.layouts[index] for index in self.order)).lanes(self.runner.lanes)
        self._lanes = tuple(lane for _, lane in sorted(zip(self.order, lanes, strict=True)))

    def let_overtake(self) -> None:
        """Some buckets are needed while longer ones are under way (``overlap_forward``): on all ranks, for good."""
        self._overtakes = True

    def context(self, step: int, samples: float | None = None) -> Context:
        """What flows of this step may know."""
        return Context(step, self.runner.rank, self.runner.members, self.runner.nodes, self._overtakes, samples)

    # -- one step ---------------------------------------------------------------------------------------------------

    @property
    def launched(self) -> int:
        """How many buckets are under way."""
        return len(self._tickets)

    @property
    def arrived(self) -> bool:
        """Whether nothing is under way that has to be waited for."""
        return all(map(self.runner.arrived, self._tickets.values()))

    def _due(self, index: int, step: int) -> bool:
        """Whether a bucket is exchanged at this step."""
        return self._steady or self.cadences[index].due(step)

    def due_at(self, step: int) -> list[int]:
        """The buckets that are exchanged at this step, in the plan's order."""
        return [index for index, cadence in enumerate(self.cadences) if cadence.due(step)]

    def launch(self, step: int, when: str) -> None:
        """Start the flow of the bucket that is next; ``when`` describes the step. One that is not due stays as it is."""
        index = self.order[len(self._tickets)]
        self._submit(index, (self.handlers[index] if self._due(index, step) else NOTHING).exchange, step, when)

    def launch_due(self, index: int, step: int, when: str, number: int | None, samples: float | None) -> None:
        """Start the flow of one of :meth:`due_at`; the others have none. ``number``: of the optimizer, if all ranks say first
        that it is that one's turn. ``samples``: as in the context of its flow."""
        self._submit(index, self.handlers[index].exchange, step, when, samples, number)

    def first_on_lanes(self, indices: Iterable[int]) -> set[int]:
        """The first bucket on each lane."""
        return set({self._lanes[index]: index for index in reversed(list(indices))}.values())

    def _submit(
        self,
        index: int,
        exchange: Callable[..., Flow[Any]],
        step: int,
        when: str,
        samples: float | None = None,
        number: int | None = None,
    ) -> None:
        bucket, self._step = self.buckets[index], step
        exchange = partial(self.runner.flow_of, exchange)
        if number is not None:
            exchange = partial(in_turn, number, exchange)
        label = f"bucket {index} ({bucket.segments[0].name} …) {when}"
        make_flow = partial(self._checked, exchange, bucket, self.states[index], self.context(step, samples))
        self._tickets[index] = self.runner.submit(make_flow, label, self._lanes[index], prompt=self._prompt)

    def _checked(self, exchange: Callable[..., Flow[Any]], bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        """The exchange; beside backward, where that does not make the host wait, the search for what is not finite."""
        if self.states.inherits and self._due(bucket.index, ctx.step):
            inherit(bucket, state, self.runner.world)
        own = 0.0 if self.noise is None else self.noise.before(bucket)
        result = yield from exchange(bucket, state, ctx)
        if self.noise is not None:
            self.noise.after(bucket.index, own, result)
        if self._finite and self.states.unsettled and result.device.type == "cpu" and (drafts := state.drafts()):
            self._searched.add(bucket.index)
            if any_non_finite([result, *drafts]).item() > 0:
                self._poisoned.add(bucket.index)
        return result

    def collect(self, indices: Collection[int] | None = None) -> dict[int, Any]:
        """Wait for everything that was launched, of these buckets only if ``indices`` are given; the results by bucket, in the
        plan's order, without what stays as it is: tensors, or of weights a :class:`Difference`."""
        under_way = [(index, t) for index, t in sorted(self._tickets.items()) if indices is None or index in indices]
        came = {index: self.runner.wait(ticket) for index, ticket in under_way}
        results = {index: self._check(index, result) for index, result in came.items()}
        self._tickets = {index: ticket for index, ticket in self._tickets.items() if index not in results}
        return results

    def result(self, index: int) -> Tensor:
        """Wait for one bucket of gradients."""
        result: Tensor = self._check(index, self.runner.wait(self._tickets[index]))
        return result

    def _check(self, index: int, result: Any) -> Any:
        parts = [result] if isinstance(result, Tensor) else [*([] if result.mine is None else [result.mine]), *result.theirs]
        for part in parts:
            if part.shape != self.buckets[index].flat.shape:
                raise wrong_shape(self.handlers[index], self.buckets[index], part)
        return result.contiguous() if isinstance(result, Tensor) else result  # parameters are views of it

    def finish(self, step: int) -> None:
        """Begin what the algorithm does once per step. Only the next exchange needs what it writes."""
        for group, mine in self._finishers.items():
            handler, state = self.handlers[mine[0]], self.states.of_steps[group]
            if not self._due(mine[0], step):
                continue
            buckets, own = [self.buckets[i] for i in mine], [*(self.states[i] for i in mine), state]
            *states, whole = [each.later() for each in own]
            flow = handler.finish(buckets, states, whole, self.context(step))
            if flow is not None:
                self.states.write_later(flow, f"finish of step {step}", zip(own, [*states, whole], strict=True))

    def commit(self, indices: Collection[int] | None = None) -> None:
        """Keep what the flows wrote, of these buckets only if ``indices`` are given."""
        if self.states.unsettled or self.states.later:
            self.states.commit(indices)

    def forget(self) -> None:
        """Nothing is under way any more, whatever was."""
        self._tickets = {}

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """After an error inside, nothing is under way, and the state is what it was before the exchange."""
        try:
            yield
        except BaseException:
            self.forget()
            self.states.rollback()
            self._searched, self._poisoned = set(), set()
            raise

    def take_back(self, index: int, segment: Segment) -> None:
        """Nobody will use this part of a bucket's result: the residual that was sent with it is unsent again."""
        if self._due(index, self._step):
            mean, state, ctx = segment.view(self.buckets[index].flat), self.states[index], self.context(self._step)
            if not self.handlers[index].put_back(mean, segment, state, ctx) and self.states.inherits:
                inherit_again(mean, segment, state, ctx.seed(segment.offset))

    def conclude(self, results: Sequence[Tensor], step: int) -> None:
        """All ``results`` of a step are there: begin what the algorithm does once per step. What the flows wrote is kept when
        the states are committed: before the next exchange, when it is known whether the results were used.

        In this order: on a device :meth:`_drop_non_finite` may write again what the flows of :meth:`finish` read.
        """
        self._drop_non_finite(results)
        self._searched, self._poisoned = set(), set()
        self.finish(step)

    def _drop_non_finite(self, results: Sequence[Tensor]) -> None:
        """Drop what the flows wrote if a result is not finite: a residual would not lose that any more.

        The results are the same on all ranks, so all of them drop it, or none does.
        """
        if not any(ledger.draft for ledger in self.states.unsettled):
            return
        of_buckets = zip(results, self.states, strict=True)
        others = [each for index, each in enumerate(of_buckets) if index not in self._searched]
        unseen = [tensor for result, state in others for tensor in (result, *state.drafts())]
        if not self._poisoned and self._on_one_device([*self.states.drafts(), *unseen]):
            self._keep_finite([tensor for tensor in unseen if tensor.is_floating_point() and tensor.numel()])
        elif self._poisoned or any_non_finite(unseen).item() > 0:
            self.states.rollback()

    @staticmethod
    def _on_one_device(tensors: Sequence[Tensor]) -> bool:
        """Whether all are on one accelerator: to look at a value there, the host would have to wait for it."""
        devices = {tensor.device for tensor in tensors}
        return len(devices) == 1 and devices.pop().type != "cpu"

    def _keep_finite(self, unseen: Sequence[Tensor]) -> None:
        """The device keeps what was written, or what was there before, and the host does not ask which."""
        if unseen:
            self.states.keep_where(where_they_are(unseen) > 0)
