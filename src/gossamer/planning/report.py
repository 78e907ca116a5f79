"""Report: a plan as it is shown: what was measured, the table of candidates, the choice and why."""

from collections.abc import Iterator

from gossamer.planning.candidates import FIDELITIES
from gossamer.planning.choose import Row, choose
from gossamer.planning.links import PATTERNS, Rates
from gossamer.planning.plan import Plan

COLUMNS = ("method", "class", "step, ms", "to DDP", "limited by", "steps")
"""Those of the table; numbers stand to the right."""


def measured(plan: Plan) -> Iterator[str]:
    """A line for each thing that was measured."""
    facts, machines = plan.facts, len(plan.facts.nodes)
    where = f"{facts.world} ranks on {machines} machine{'s' * (machines > 1)}"
    yield f"{plan.model}, {plan.bytes / 1e6:.4g} MB of gradients, {plan.optimizer}; {where}; measured in {facts.seconds:.1f} s"
    yield f"links {'between' if machines > 1 else 'inside'} machines: {_rates(facts.links)}"
    if facts.inside is not None:
        yield f"links inside machines: {_rates(facts.inside)}"
    compute = facts.compute
    yield (
        f"a step computes {1e3 * compute.seconds:.4g} ms: forward {1e3 * compute.forward:.4g}, "
        f"backward {1e3 * compute.backward:.4g}, optimizer {1e3 * compute.optimizer:.4g}"
    )
    for method, seconds in facts.steps.items():
        yield f"steps of {method} took {1e3 * seconds:.4g} ms; rates of links corrected by {facts.corrected:.2f}"
    yield from _notes(facts.links)


def _rates(rates: Rates) -> str:
    each = [(name, getattr(rates, name)) for name in PATTERNS]
    told = ", ".join(f"{name} {rate.goodput / 1e6:.4g}" for name, rate in each)
    return f"{told} Mbit/s of payload; latency {1e3 * rates.pair.latency:.3g} ms"


def _notes(rates: Rates) -> Iterator[str]:
    for name in PATTERNS:
        note = getattr(rates, name).note
        if note:
            yield f"{name}: {note}"


def cells(row: Row) -> list[str]:
    """A line of the table."""
    return [str(row), row.fidelity, f"{1e3 * row.step_seconds:.1f}", f"{row.ratio:.2f}", row.limit, row.steps]


def choices(plan: Plan) -> Iterator[str]:
    """What each class would choose, and the choice."""
    there = {row.fidelity for row in plan.table}
    for fidelity in FIDELITIES:
        if fidelity in there:
            row = choose(plan.table, fidelity, plan.overlap_forward, plan.facts.steps)
            yield f"{fidelity}: {row}, {row.ratio:.2f} of DDP's step"
    yield f"choice ({plan.fidelity}): {plan.row}. {plan.why[0].upper()}{plan.why[1:]}."
    for reason in plan.left_out:
        yield f"no candidate: {reason}"


def markdown(plan: Plan) -> list[str]:
    """The table, and below it the choice."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---:|---:|---|---|"]
    for row in plan.table:
        method, *rest = cells(row)
        lines.append("| " + " | ".join([f"`{method}`", *rest]) + " |")
    return [*lines, "", *(f"- {line}" for line in choices(plan))]
