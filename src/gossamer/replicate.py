"""Entry point: makes a model's training data-parallel, in place, with one line."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from os import PathLike
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.connect import connect
from gossamer.engine.arguments import Synchronize
from gossamer.engine.module_buffers import Buffers
from gossamer.replica import Replica
from gossamer.replication import replicate_over

Fidelity = Literal["exact", "close", "loose"]

_logger = logging.getLogger("gossamer")


def replicate(
    model: nn.Module,
    optimizer_or_optimizers: Optimizer | Sequence[Optimizer],
    algorithm: Algorithm | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    scaler: Any = None,
    buffers: Buffers | None = None,
    timeout: float | timedelta | None = None,
    overlap_forward: bool = False,
    ignore: Sequence[str | nn.Module] = (),
    synchronize: Synchronize | None = None,
    fidelity: Fidelity | None = None,
    plan: str | PathLike[str] | None = None,
    switch: bool = False,
    statistics: bool = False,
) -> Replica:
    """Make the training of ``model`` data-parallel over the ranks of a process group.

    Works in place: the model's class and the keys of its ``state_dict`` stay as they are. Every rank calls it with the
    same arguments, after the model is on its device and the optimizer is made; rank 0's parameters and buffers are
    copied to all. Then train as on one worker.

    Args:
        model: any module; not wrapped in DDP or FSDP1. Its parameters may be sharded over other dimensions of a mesh (DTensors:
            ``fully_shard``, ``parallelize_module``): then ``group`` or ``mesh`` has the ranks with the same part of the model.
        optimizer_or_optimizers: the optimizer, or a sequence of them; together they hold the trainable parameters.
        algorithm: the relaxation. Without one, ``fidelity`` and ``plan``: exact :class:`AllReduce`, and nothing is measured.
        group: a process group; the default group if none is given. Without any, a world of one. What moves tensors is the
            backend that it has for the device of the parameters (which all lie on one): NCCL, or Gloo. On a GPU Gloo's go
            through the host's memory. GPUs are supported by construction and by tests with fakes; none has run this yet.
        mesh: a one-dimensional ``DeviceMesh``, instead of ``group``. With :class:`Hierarchical`, one of two dimensions:
            machines, and the workers of each.
        scaler: a ``torch.amp.GradScaler``; a skipped step is then agreed by all ranks.
        buffers: ``"broadcast"`` (rank 0's, at the end of backward; the default for gradient algorithms),
            ``"average"`` (with the weights; the default for weight algorithms) or ``"local"``.
        timeout: seconds (or a ``timedelta``) that an exchange may take; the process group's by default. A late rank is
            named in a warning after ten seconds.
        overlap_forward: let gradients travel during the next forward pass too: each module waits for its own just before it
            computes, and its parameters are updated then, with the hyper-parameters of the step that you took. For gradient
            algorithms, from the third step on; pays where the exchange takes longer than backward. Whatever reads ``p.grad``
            between ``backward()`` and the step (clipping, scaling, logging) waits for its bucket, so that less overlaps. Until
            the next forward pass parameters are as before the step; reading a ``state_dict`` of the model or the optimizer, and
            ``wait_for_exchanges()``, bring them up to date, a copy or a pickle of the model does not. The optimizer must update
            each parameter by itself, as all of ``torch.optim`` do; its step, and hooks on it, run once per bucket. Take a step
            after every backward pass (accumulate inside ``no_sync()``), and call modules rather than use their parameters in
            another way.
        ignore: what is left to each rank (experts, sharded embeddings): modules of the model, or names of its modules,
            parameters or buffers. It is neither copied nor exchanged nor compared, and may have another shape on each rank; the
            optimizers may hold it. Beside what the model names for DDP (``_ddp_params_and_buffers_to_ignore``), where it is
            named until the replica is closed.
        synchronize: when gradients are exchanged: ``"backward"`` (the default), during each pass outside of ``no_sync()``, or
            ``"step"``, all that have accumulated once, when an optimizer's step begins, or in :meth:`Replica.synchronize`
            before it (where gradients are clipped, say). For pipelines (``torch.distributed.pipelining``), whose micro-batches
            are backward passes, and for accumulation without ``no_sync()``. A number n is both: the exchange runs during every
            n-th pass, the last of n micro-batches, and what a step with fewer passes has left is exchanged when it begins.
            Weights are exchanged once per step anyway.
        fidelity: instead of an algorithm: have it chosen among methods that take the same mean (``"exact"``), need at most 1.03
            times as many steps (``"close"``), or 1.25 times (``"loose"``), as far as is known. The first five steps are plain
            all-reduce, and their computation is timed; then links are measured for at most ten seconds, the step of every
            candidate that goes with the other arguments is predicted, and all ranks go on with the same one. A line of the log
            (logger ``gossamer``) says which, and why.
        plan: instead of an algorithm: the path of a plan, as ``gossamer plan`` writes it. Rank 0 reads it, and its choice is
            used from the first step on. Where there is no file it is made as for ``fidelity`` (``"exact"`` unless said), and
            rank 0 writes it.
        switch: with ``fidelity`` or ``plan``: go on watching. When steps take 20 % longer or shorter than expected three times
            in a row (medians of eight steps), links are measured again, and where another candidate is predicted to be 10 %
            faster all ranks go on with that (:meth:`Replica.switch`).
        statistics: where gradients are exchanged, measure the gradient noise scale (McCandlish et al. 2018): ``metrics()`` has
            it as ``noise_scale``, in batches of one worker (nan where noise hides the signal). Two passes over the gradients.

    Raises:
        ConfigurationError: arguments that cannot work, with the reason; a plan of another model or number of ranks.
        DisagreementError: on every rank, if ranks differ in version, algorithm, model or options.
    """
    begin = None
    if fidelity is not None or plan is not None or switch:
        from gossamer.planning import start  # which most scripts need not import

        begin = partial(start.begin, wish=start.wished(algorithm, fidelity, plan, switch))
    runner = connect(group, mesh, timeout, by_machine=isinstance(algorithm, Algorithm) and None in algorithm.traits.nodes)
    replica = replicate_over(
        runner,
        model,
        optimizer_or_optimizers,
        algorithm,
        scaler=scaler,
        buffers=buffers,
        overlap_forward=overlap_forward,
        ignore=ignore,
        synchronize=synchronize,
        statistics=statistics,
        begin=begin,
    )
    if runner.rank == 0:
        _logger.info("replicating %s over %d ranks with %r", type(model).__name__, runner.world, replica.algorithm)
    return replica
