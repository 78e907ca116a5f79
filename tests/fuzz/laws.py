"""What must hold of a case, whatever was drawn: each law says how it was broken, or nothing."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Case
from fuzz.loops import expected_sum, reference

Results = Sequence[dict[str, Any]]
"""What ``loops.trained`` returned on every rank."""


def exact_training_is_that_of_one_process(case: Case, results: Results) -> str:
    """In float64 to 1e-9, for every rank. Layers of fewer bits round sums of another order in another way."""
    if not _exact(case):
        return ""
    limits = {"single": 1e-4, "half": 0.05}
    return _furthest(reference(case), results, "own", max(limits.get(kind, 1e-9) for _, kind in _kinds(case)))


def ranks_are_bit_identical(case: Case, results: Results) -> str:
    """Where only gradients are exchanged."""
    if case.make_algorithm().part("weights") is not None:
        return ""
    for rank, result in enumerate(results):
        for name, tensor in result["own"].items():
            if not torch.equal(_bits(tensor), _bits(results[0]["own"][name])):
                return f"rank {rank} differs from rank 0 in {name} by {(tensor - results[0]['own'][name]).abs().max():.3g}"
    return ""


def buffers_are_synchronised(case: Case, results: Results) -> str:
    """Between two steps, where they do not travel with the weights, and are not each rank's own."""
    weights = case.make_algorithm().part("weights") is not None
    mode = case.buffers or ("average" if case.make_algorithm().subject == "weights" else "broadcast")
    if mode == "local" or (mode == "average" and weights):
        return ""
    for rank, result in enumerate(results):
        for name, tensor in result["buffers"].items():
            if not torch.equal(_bits(tensor), _bits(results[0]["buffers"][name])):
                return f"rank {rank} differs from rank 0 in {name}"
    return ""


def values_are_finite(case: Case, results: Results) -> str:
    """Also after an overflow on one rank."""
    for rank, result in enumerate(results):
        for name, tensor in {**result["own"], **result["mean"]}.items():
            if not tensor.isfinite().all():
                return f"rank {rank}: {name} is not finite"
    return ""


def nothing_is_lost(case: Case, results: Results) -> str:
    """The mean of the replicas has moved by all gradients but the residuals."""
    algorithm = case.make_algorithm()
    if not case.linear or algorithm.traits.takes_momentum or "LoCo" in case.algorithm or _loses(case):
        return ""
    if _nodes_differ(case) and algorithm.part("weights") is not None:
        return ""  # nodes count alike there, however many ranks they have, and so do not all gradients
    if case.overflow is not None and (algorithm.part("weights") is not None or case.optimizers > 1):
        return ""  # some of the parameters take the step
    if "MasterWeights" in case.optimizer:
        return ""
    had = expected_sum(case)
    mean = {name: torch.stack([r["mean"][name].double() for r in results]).mean(0) for name in had}
    start = results[0]["initial"]
    for name, total in had.items():
        kept = sum((r["residual"].get(name, torch.zeros(total.shape)).double() for r in results), torch.zeros(())) / case.world
        trainable = not any(name.startswith(f"blocks.{i}.") and kind == "frozen" for i, kind in _kinds(case))
        expected = start[name].double() - 0.1 * (total.double() - kept) * trainable
        error, size = (mean[name] - expected).abs(), 1 + start[name].double().abs() + total.double().abs()
        sums_in_16_bits = total.dtype == torch.bfloat16 or "ChunkSparse" in case.algorithm
        precision = 0.05 if sums_in_16_bits else 1e-9 if _exact(case) and total.dtype == torch.float64 else 2e-5
        if error.numel() and (error / size).max() > precision:
            return f"the mean of {name} is {error.max():.3g} from where its gradients lead (kept: {_size(kept)})"
    return ""


def a_resumed_run_ends_with_the_same_bits(case: Case, results: Results, resumed: Results) -> str:
    """For every rank."""
    for rank, (one, other) in enumerate(zip(results, resumed, strict=True)):
        for name, tensor in one["own"].items():
            if not torch.equal(_bits(tensor), _bits(other["own"][name])):
                apart = (tensor - other["own"][name]).abs().max()
                return f"rank {rank}: resumed after {case.resume} steps, {name} differs by {apart:.3g}"
    return ""


LAWS: list[Callable[[Case, Results], str]] = [
    values_are_finite,
    exact_training_is_that_of_one_process,
    ranks_are_bit_identical,
    buffers_are_synchronised,
    nothing_is_lost,
]


def _exact(case: Case) -> bool:
    wires = set(re.findall(r"wire='(\w+)'", case.algorithm))
    algorithm = case.make_algorithm()
    return algorithm.traits.exact and algorithm.part("weights") is None and wires <= {"fp32"} and case.dtype == "float64"


def _loses(case: Case) -> bool:
    """Whether something is dropped, or kept where this law does not look: lossy without feedback, rounded residuals, shares of
    machines."""
    lossy = re.search(r"QSGD|ByteGrad|worker_feedback=False|server_feedback=False", case.algorithm)
    feedback = re.search(r"ScatterReduce|ChunkSparse|PowerSGD", case.algorithm)
    plain = re.sub(r"codec=\w+\([^()]*\)", "", case.algorithm)
    rounded = re.search(r"(ScatterReduce|ChunkSparse|PowerSGD)\((?![^()]*residual='fp32')", plain)
    wires = re.search(r"AllReduce\([^)]*wire='(bf16|fp16)'", case.algorithm)
    return bool(lossy or wires or (feedback and (rounded or "Hierarchical" in case.algorithm or case.join)))


def _nodes_differ(case: Case) -> bool:
    """Whether some node has more ranks than another."""
    return any(
        case.world > int(size) and case.world % int(size) for size in re.findall(r"ranks_per_node=(\d+)", case.algorithm)
    )


def _kinds(case: Case) -> list[tuple[int, str]]:
    return [(index, layer.split(":")[0]) for index, layer in enumerate(case.layers)]


def _furthest(expected: dict[str, Tensor], results: Results, what: str, limit: float) -> str:
    for rank, result in enumerate(results):
        for name, tensor in expected.items():
            error = (result[what][name] - tensor).abs()
            if error.numel() and not error.max() <= limit:
                return f"rank {rank}: {name} is {error.max():.3g} from the single process"
    return ""


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _size(tensor: Tensor) -> str:
    return f"{tensor.abs().max():.3g}" if tensor.numel() else "nothing"
