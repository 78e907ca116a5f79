"""The training loop of a case, on one rank with gossamer, and of all ranks in one process without."""

import contextlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import gossamer
from fuzz.cases import Case
from fuzz.models import Net, loss_of, make_model, make_optimizers, tied_by_memory
from gossamer import checkpoint

Replicate = Callable[..., gossamer.Replica]


class Run:
    """One rank's model, optimizers, scaler and replica."""

    def __init__(self, case: Case, rank: int, seed: int, replicate: Replicate | None) -> None:
        self.case, self.rank = case, rank
        self.model = make_model(case, seed)
        self.optimizers = make_optimizers(case, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if case.scaler else None
        self.replica: gossamer.Replica | None = None
        if replicate is not None:
            given: Any = self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]
            self.replica = replicate(
                self.model,
                given,
                None if case.algorithm == "InOptimizer()" else case.make_algorithm(),
                scaler=self.scaler,
                overlap_forward=case.overlap_forward,
                buffers=case.buffers,
            )

    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        parts = {f"optimizer{index}": optimizer for index, optimizer in enumerate(self.optimizers)}
        return parts | {"model": self.model, "replica": self.replica} | ({"scaler": self.scaler} if self.scaler else {})

    def step(self, number: int) -> None:
        """Passes, perhaps clipping, the update, perhaps an evaluation."""
        case = self.case
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        for micro in range(case.passes):
            together = case.several or micro == case.passes - 1
            assert self.replica is not None
            with contextlib.nullcontext() if together else self.replica.no_sync():
                self.loss(self.rank, number, micro).backward()
        self.update()
        if case.evaluate and number % 2:
            self.evaluate()

    def loss(self, rank: int, number: int, micro: int) -> Tensor:
        """As it is handed to ``backward()``."""
        loss = loss_of(self.case, self.model, rank, number, micro) / self.case.passes
        if self.case.overflow == (number, rank) and micro == self.case.passes - 1:
            loss = loss * math.inf
        return loss if self.scaler is None else self.scaler.scale(loss)

    def update(self) -> None:
        """What follows the passes of a step."""
        if self.scaler is not None and self.case.clip:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.case.clip:
            nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self.case.clip)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def evaluate(self) -> None:
        """In evaluation mode, on the average of the replicas or on this one."""
        assert self.replica is not None
        with self.replica.consensus() if self.case.consensus else contextlib.nullcontext(), torch.no_grad():
            self.model.eval()
            loss_of(self.case, self.model, self.rank, 0, 0)
            self.model.train()


def trained(case: Case, rank: int, folder: Path, replicate: Replicate, resumed: bool) -> dict[str, Any]:
    """What one rank has at the end. ``resumed``: it begins with new objects that load what an earlier run has saved."""
    run = Run(case, rank, case.seed + 1 + rank + 50 * resumed, replicate)
    replica, begin = run.replica, 0
    assert replica is not None
    if resumed:
        saved = checkpoint.load(folder, **run.parts())
        assert saved is not None
        begin = saved["step"]
    initial = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    with contextlib.nullcontext() if case.join is None else replica.join():
        for number in range(begin, case.batches(rank)):
            if case.resume and number == case.resume and not resumed:
                checkpoint.save(folder, number, **run.parts())
            run.step(number)
    buffers = {name: buffer.clone() for name, buffer in run.model.named_buffers()}
    replica.wait_for_exchanges()
    state = replica.state_dict()
    kept: dict[str, Tensor] = {}
    for key, tensors in state[f"rank{rank}"][0].items():
        if key.endswith("residual"):
            for name, tensor in tensors.items():
                kept[name] = kept.get(name, 0) + tensor.double() / (state["scale"] or 1.0)
    kept = together(run.model, kept)
    with replica.consensus():
        mean = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    replica.close()
    own = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    return {"initial": initial, "own": own, "mean": mean, "residual": kept, "buffers": buffers}


def reference(case: Case) -> dict[str, Tensor]:
    """The parameters that exact data-parallel training has: all ranks' gradients, one after the other, in one model."""
    run = Run(case, 0, case.seed + 1, None)
    trainable = [p for p in run.model.parameters() if p.requires_grad]
    for number in range(max(map(case.batches, range(case.world)))):
        for optimizer in run.optimizers:
            optimizer.zero_grad(set_to_none=case.set_to_none)
        before = [None if p.grad is None else p.grad.clone() for p in trainable]
        sums: list[Tensor | None] = [None] * len(trainable)
        for rank in range(case.world):
            if number >= case.batches(rank):
                continue
            for p in trainable:
                p.grad = None
            buffers = {name: b.clone() for name, b in run.model.named_buffers()}
            for micro in range(case.passes):
                run.loss(rank, number, micro).backward()
            if rank:
                for name, b in run.model.named_buffers():
                    b.copy_(buffers[name])
            sums = [_added(total, p.grad) for total, p in zip(sums, trainable, strict=True)]
        for p, had, total in zip(trainable, before, sums, strict=True):
            p.grad = had if total is None else total / case.world
        run.update()
    return {name: p.detach() for name, p in run.model.named_parameters()}


def expected_sum(case: Case) -> dict[str, Tensor]:
    """Of a loss that is linear in the parameters: the mean over ranks of all gradients for which a step was taken."""
    model: Net = make_model(case, case.seed + 1)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number in range(max(map(case.batches, range(case.world)))):
        if case.overflow is not None and case.overflow[0] == number:
            continue
        for rank in range(case.world):
            for micro in range(case.passes if number < case.batches(rank) else 0):
                model.zero_grad()
                (loss_of(case, model, rank, number, micro) / case.passes / case.world).backward()
                for name, p in model.named_parameters():
                    if p.grad is not None:
                        total[name] += p.grad
    return together(model, total)


def together(model: Net, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """``terms`` of an update, where parameters that share their memory have one: the sum of theirs."""
    for name, other in tied_by_memory(model):
        if name in terms or other in terms:
            terms[name] = terms[other] = terms.get(name, 0) + terms.get(other, 0)
    return terms


def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    if gradient is None:
        return total
    return gradient.clone() if total is None else total + gradient
