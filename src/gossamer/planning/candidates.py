"""Candidates: the methods that a plan compares, and how faithful each is to training with exact means.

A class says how many times more steps a method is predicted to need for the same quality: ``exact`` takes the same mean,
``close`` needs at most 1.03 times as many steps, ``loose`` at most 1.25. Of codecs that is known from measured runs
(``benchmarks/results``), of averages of weights from an effective number of neighbours. What has cost more is no candidate.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from torch.optim import SGD, Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.ops import Group
from gossamer.errors import ConfigurationError
from gossamer.optim.gossip_adamw import AVERAGED_OVER
from gossamer.planning.mixing import neighbours
from gossamer.spelled import algorithm_of

Fidelity = Literal["exact", "close", "loose"]

FIDELITIES: tuple[Fidelity, ...] = get_args(Fidelity)

MOST_STEPS: dict[Fidelity, float] = {"exact": 1.0, "close": 1.03, "loose": 1.25}
"""By how many times more steps a method of each class may be predicted to need."""

Kind = Literal["sgd", "gossip", "adaptive"]
"""What steps: SGD; an optimizer made for weights that are averaged (``GossipAdamW``); any other, as Adam."""


@dataclass(frozen=True, kw_only=True)
class Steps:
    """How many times more steps a method is predicted to need for the same quality, with an interval."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.estimate:.2f}" if self.low == self.high else f"{self.estimate:.2f} ({self.low:.2f} to {self.high:.2f})"


SAME = Steps(estimate=1.0, low=1.0, high=1.0)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method as it is written in a script, its class, and what is known of the steps that it needs (None: nothing).

    ``overlap_forward``: with that option of ``replicate()``. ``base``, ``share``: its exchange computes that share of what one
    of ``base`` does. ``evidence``: where its class comes from.
    """

    method: str
    fidelity: Fidelity
    steps: Steps | None = SAME
    overlap_forward: bool = False
    base: str = ""
    share: float = 1.0
    evidence: str = "the same mean"

    @property
    def algorithm(self) -> Algorithm:
        """What to run."""
        return algorithm_of(self.method)

    @property
    def computes(self) -> str:
        """The method whose exchange is timed in its place."""
        return self.base or self.method

    def __str__(self) -> str:
        return f"{self.method}, overlap_forward=True" if self.overlap_forward else self.method


def check_fidelity(fidelity: object) -> None:
    """Raise ConfigurationError unless it is one of the classes."""
    if fidelity not in FIDELITIES:
        raise ConfigurationError(f"fidelity must be one of {', '.join(map(repr, FIDELITIES))}; got {fidelity!r}")


def kind_of(optimizers: Sequence[Optimizer]) -> Kind:
    """What steps."""
    if all(any(AVERAGED_OVER in group for group in each.param_groups) for each in optimizers):
        return "gossip"
    return "sgd" if all(isinstance(each, SGD) for each in optimizers) else "adaptive"


def candidates(
    fidelity: Fidelity, optimizers: Sequence[Optimizer], nodes: Sequence[Group], noise: float | None = None
) -> list[Candidate]:
    """The methods of this class and of more exact ones, the most exact first.

    ``nodes``: the ranks of each. ``noise``: the gradient noise scale in batches of one worker, if it is known.
    """
    check_fidelity(fidelity)
    kind, shared = kind_of(optimizers), len(nodes) > 1 and max(map(len, nodes)) > 1
    made = [*_exact(shared), *_of_gradients(kind, shared), *_of_weights(kind, nodes, shared, noise)]
    return sorted((each for each in made if within(each.fidelity, fidelity)), key=lambda each: FIDELITIES.index(each.fidelity))


def within(fidelity: Fidelity, asked: Fidelity) -> bool:
    """Whether a class is the one that was asked for, or more exact."""
    return FIDELITIES.index(fidelity) <= FIDELITIES.index(asked)


def overlapped(found: Sequence[Candidate]) -> list[Candidate]:
    """Methods that exchange gradients alone, with forward overlap."""
    gradients = [each for each in found if each.algorithm.part("weights") is None]
    return [replace(each, overlap_forward=True) for each in gradients]


def left_out(optimizers: Sequence[Optimizer], ratios: Mapping[str, float]) -> list[str]:
    """What is no candidate, and why. ``ratios``: the predicted step of outer loops that can run, to that of all-reduce."""
    reasons = [
        f"outer loops: after its dense start a step of {method} is predicted to take {ratio:.2f} of plain all-reduce's, but "
        "nothing here predicts how many steps it needs, or how long a dense start. With AdamW, after a dense quarter, it was "
        "within 0.02 nats of all-reduce in measured runs: compare your own"
        for method, ratio in ratios.items()
    ]
    if kind_of(optimizers) == "adaptive":
        name = type(optimizers[0]).__name__
        reasons.append(f"averages of weights: {name} divides by each worker's own noise; take gossamer.optim.GossipAdamW")
    if kind_of(optimizers) != "sgd":
        reasons.append("ChunkSparse and PowerSGD: 0.4 to 0.5 nats behind with Adam in measured runs")
    return reasons


OUTER_LOOPS = (Candidate(method="DiLoCo(every=30)", fidelity="loose", steps=None, base="AllReduce()", share=1 / 30),)
"""Predicted for comparison, and never chosen."""


def _exact(shared: bool) -> Iterator[Candidate]:
    yield Candidate(method="AllReduce()", fidelity="exact")
    for nbytes in (2**20, 2**24):
        yield Candidate(method=f"AllReduce(bucket_bytes={nbytes})", fidelity="exact", base="AllReduce()")
    if shared:
        yield Candidate(method="Hierarchical(AllReduce())", fidelity="exact", base="AllReduce()")


_CLOSE = Steps(estimate=1.0, low=0.98, high=1.03)
_FOUR_BITS = Steps(estimate=1.04, low=1.0, high=1.08)


def _of_gradients(kind: Kind, shared: bool) -> Iterator[Candidate]:
    """Steps from 3 seeds of a convnet with SGD and of a GPT with Adam: benchmarks/results/convergence.md."""
    found = "no difference in measured runs, SGD and Adam"
    yield Candidate(method="AllReduce(wire='bf16')", fidelity="close", steps=_CLOSE, evidence="rounded to 16 bits")
    yield Candidate(method="ScatterReduce()", fidelity="close", steps=_CLOSE, evidence=found)
    four = "ScatterReduce(codec=Quantize(bits=4))"
    if kind == "sgd":
        yield Candidate(method=four, fidelity="close", steps=_CLOSE, evidence="no difference in measured runs with SGD")
    else:
        yield Candidate(method=four, fidelity="loose", steps=_FOUR_BITS, evidence="0.02 to 0.03 nats in measured runs")
    if shared:
        yield Candidate(
            method="Hierarchical(ScatterReduce())", fidelity="close", steps=_CLOSE, base="ScatterReduce()", evidence=found
        )
    if kind == "sgd":
        for method in ("PowerSGD()", "ChunkSparse()"):
            yield Candidate(
                method=method, fidelity="loose", steps=None, evidence="0.4 and 1.9 points of accuracy in measured runs"
            )


_WEIGHTS = (
    ("Gossip()", "Gossip()", 1.0),
    ("QuantizedGossip(bits=8)", "QuantizedGossip(bits=8)", 1.0),
    ("QuantizedGossip()", "QuantizedGossip()", 1.0),
    ("in_parts(2, Gossip())", "Gossip()", 1 / 2),
    ("in_parts(4, Gossip())", "Gossip()", 1 / 4),
    ("in_parts(8, Gossip())", "Gossip()", 1 / 8),
    ("LocalSGD(every=2)", "LocalSGD(every=2)", 1 / 2),
    ("LocalSGD(every=4)", "LocalSGD(every=4)", 1 / 4),
    ("LocalSGD(every=8)", "LocalSGD(every=8)", 1 / 8),
)
"""Method, what its exchange computes, and how much of that in a step."""


def _of_weights(kind: Kind, nodes: Sequence[Group], shared: bool, noise: float | None) -> Iterator[Candidate]:
    if kind == "adaptive":
        return
    made = [*_WEIGHTS, *([(f"Hierarchical({method})", base, share) for method, base, share in _WEIGHTS] if shared else [])]
    for method, base, share in made:
        steps = steps_of(algorithm_of(method), nodes, noise)
        if steps.estimate <= MOST_STEPS["loose"]:
            yield Candidate(
                method=method,
                fidelity="loose",
                steps=steps,
                base=base,
                share=share,
                evidence="effective number of neighbours" + ("" if noise is not None else ", noise scale assumed"),
            )


def steps_of(algorithm: Algorithm, nodes: Sequence[Group], noise: float | None = None) -> Steps:
    """(1 + x/n) / (1 + x/p) times more steps: x the noise scale in batches of one worker, n the effective number of neighbours
    of ``p`` workers. As if each worker trained with n exact ones; steps grow with noise as McCandlish et al. (2018) find.

    Unless ``noise`` is known it is taken to be p, where a batch of all workers has as much noise as signal; the interval is
    that of any noise.
    """
    world = sum(map(len, nodes))
    count = neighbours(algorithm, world, tuple(map(tuple, nodes)))
    x = world if noise is None else noise
    estimate = (1 + x / count) / (1 + x / world)
    return Steps(estimate=estimate, low=1.0, high=world / count)
