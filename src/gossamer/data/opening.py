"""Opening: the shares that all ranks bring to a shuffle, read, compared and, if that is wanted, dealt out."""

from typing import Any

from gossamer.comm.runner import Runner
from gossamer.data.deal import dealt, dealt_sizes
from gossamer.data.options import Options
from gossamer.data.shares import batches_of, drawn, gathered
from gossamer.data.table import Table, count, load
from gossamer.engine.agreement import agree
from gossamer.errors import ConfigurationError


def opened(runner: Runner, dataset: Any, options: Options) -> tuple[list[int], int, Table]:
    """The sizes of all shares, the number of batches of a local epoch, and this rank's share of samples. Collective.

    Raises:
        ConfigurationError: on every rank, if a share is empty or too small, or if samples cannot be stacked.
        DisagreementError: on every rank, if samples differ between ranks.
    """
    total = count(dataset)
    if options.split:
        agree(runner, {"the size of the dataset to split": f"{total} samples"})
        chosen = drawn(total, f"{options.seed}/split")[runner.rank :: runner.world].tolist()
    else:
        chosen = list(range(total))
    brought = gathered(runner, len(chosen))
    if 0 in brought:
        raise ConfigurationError(f"rank {brought.index(0)} holds no sample; every rank needs a share of the data")
    sizes = dealt_sizes(brought) if options.deal else brought
    steps = batches_of(sizes, options.batch_size, options.drop_last)
    table = load(dataset, chosen)
    agree(runner, {"samples": str(table.layout), "their structure": str(table.layout.structure)})
    rows = dealt(runner, table.rows, brought, f"{options.seed}/deal") if options.deal else table.rows
    return sizes, steps, Table(table.layout, rows)
