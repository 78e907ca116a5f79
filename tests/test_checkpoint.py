"""Checkpoints on disk: complete or not there, whenever a process ends, and the same on all ranks."""

import functools
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, DiLoCo, Gossip, ScatterReduce, checkpoint, loopback
from gossamer.algorithms import Algorithm
from gossamer.errors import CheckpointError, ConfigurationError, DisagreementError
from gossamer.optim import MasterWeights, OneBitAdam

Training = tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]


def training(algorithm: Algorithm | None, seed: int = 0, optimizer: Any = None, dtype: torch.dtype = torch.float32) -> Training:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(12, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
    make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    made = make(model.parameters())
    return model, made, gossamer.replicate(model, made, algorithm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(8, 12, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs.to(next(model.parameters()).dtype)).square().mean().backward()
    optimizer.step()


def values(model: nn.Module) -> Tensor:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in model.state_dict().values()])


def run_and_resume(
    folders: Callable[[int], Path],
    algorithm: Algorithm | None,
    optimizer: Any = None,
    world: int = 3,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Six steps, saved after three; what loads that into objects of another seed ends with the same bits."""

    def through(rank: int) -> Tensor:
        model, optimizer_, replica = training(algorithm, 0, optimizer, dtype)
        for number in range(6):
            if number == 3:
                checkpoint.save(folders(rank), 3, model=model, optimizer=optimizer_, replica=replica, batches=[number, rank])
            step(model, optimizer_, 10 * number + rank)
        replica.close()
        return values(model)

    def resumed(rank: int) -> Tensor:
        model, optimizer_, replica = training(algorithm, 1, optimizer, dtype)
        saved = checkpoint.load(folders(rank), model=model, optimizer=optimizer_, replica=replica)
        assert saved == {"step": 3, "batches": [3, rank]}
        for number in range(3, 6):
            step(model, optimizer_, 10 * number + rank)
        replica.close()
        return values(model)

    for one, other in zip(loopback(through, world), loopback(resumed, world), strict=True):
        assert torch.equal(one, other)


ALGORITHMS = [AllReduce(), ScatterReduce(), ChunkSparse(density=0.3, chunk=16), Gossip(), DiLoCo(every=2)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
def test_a_run_resumes_bit_identically(tmp_path: Path, algorithm: Algorithm) -> None:
    run_and_resume(lambda rank: tmp_path, algorithm)


def test_an_optimizer_that_communicates_resumes(tmp_path: Path) -> None:
    run_and_resume(lambda rank: tmp_path / "one-bit", None, lambda parameters: OneBitAdam(parameters, lr=0.01, warmup=2))


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=lambda a: type(a).__name__)
def test_copies_of_16_bit_weights_resume(tmp_path: Path, algorithm: Algorithm) -> None:
    keeping = functools.partial(MasterWeights, torch.optim.AdamW, lr=0.01)
    run_and_resume(lambda rank: tmp_path, algorithm, keeping, dtype=torch.bfloat16)


def test_folders_may_be_local_to_each_machine(tmp_path: Path) -> None:
    """Ranks 0 and 1 share one, rank 2 has its own."""
    run_and_resume(lambda rank: tmp_path / str(rank // 2) / "checkpoints", Gossip())


def numbers(folder: Path, rank: int, steps: list[int], **options: Any) -> None:
    for number in steps:
        checkpoint.save(folder, number, number=number, tensor=torch.full((3,), float(rank)), **options)


def test_the_newest_that_all_ranks_have_counts(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    loopback(lambda rank: numbers(folders[rank], rank, [10, 20]), 2)
    assert loopback(lambda rank: checkpoint.latest(folders[rank]), 2) == [20, 20]
    (newest,) = folders[1].glob("step-000000020-*")
    (newest / "complete.json").unlink()  # this machine went down just before
    with pytest.warns(UserWarning, match=r"ranks \[1\] lack the newest checkpoint that others have; going on with step 10"):
        assert loopback(lambda rank: checkpoint.latest(folders[rank]), 2) == [10, 10]
    with pytest.warns(UserWarning, match="lack the newest"):
        loaded = loopback(lambda rank: checkpoint.load(folders[rank]), 2)
    assert [(found["number"], found["tensor"].tolist()) for found in loaded if found] == [(10, [0.0] * 3), (10, [1.0] * 3)]


def test_there_is_none_yet(tmp_path: Path) -> None:
    assert loopback(lambda rank: (checkpoint.latest(tmp_path / "x"), checkpoint.load(tmp_path / "x")), 2) == [(None, None)] * 2
    with pytest.raises(CheckpointError, match=r"no step 3 that all ranks have; complete here: rank 0: \[\]"):
        loopback(lambda rank: checkpoint.load(tmp_path / "x", 3), 2)


def test_the_newest_stay(tmp_path: Path) -> None:
    loopback(lambda rank: numbers(tmp_path, rank, [1, 2, 3, 4], keep=2), 2)
    assert sorted(place.name[:14] for place in tmp_path.iterdir()) == ["step-000000003", "step-000000004"]


def test_what_was_saved_last_is_newest_although_its_step_is_smaller(tmp_path: Path) -> None:
    """After a return to an earlier step, the later ones of the abandoned run do not come back."""
    loopback(lambda rank: numbers(tmp_path, rank, [100, 200, 150], keep=2), 2)
    assert loopback(lambda rank: checkpoint.latest(tmp_path), 2) == [150, 150]
    assert sorted(place.name[:14] for place in tmp_path.iterdir()) == ["step-000000150", "step-000000200"]


def test_a_step_may_be_named(tmp_path: Path) -> None:
    loopback(lambda rank: numbers(tmp_path, rank, [1, 2, 3], keep=3), 2)
    assert [found["number"] for found in loopback(lambda rank: checkpoint.load(tmp_path, 2), 2) if found] == [2, 2]


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    """What was not sent yet is shared out; of the residuals of three ranks the mean stays."""
    algorithm = ScatterReduce(residual="fp32")

    def save(rank: int) -> dict[str, Tensor]:
        model, optimizer, replica = training(algorithm)
        for number in range(3):
            step(model, optimizer, 10 * number + rank)
        checkpoint.save(tmp_path, 3, model=model, replica=replica)
        return {name: tensor.clone() for name, tensor in replica.state_dict()[f"rank{rank}"][0]["residual"].items()}

    def load(rank: int) -> dict[str, Tensor]:
        model, _, replica = training(algorithm, 1)
        checkpoint.load(tmp_path, model=model, replica=replica)
        return replica.state_dict()[f"rank{rank}"][0]["residual"]

    before = loopback(save, 3)
    with pytest.warns(UserWarning, match="a state of 3 ranks is loaded by 2"):
        after = loopback(load, 2)
    for name in before[0]:
        expected = sum(kept[name] for kept in before) / 3
        torch.testing.assert_close(sum(kept[name] for kept in after) / 2, expected, rtol=1e-5, atol=1e-7)


# -- bad input --------------------------------------------------------------------------------------------------------


def test_what_could_not_be_loaded_safely_is_refused_before_the_last_one_goes(tmp_path: Path) -> None:
    loopback(lambda rank: numbers(tmp_path, rank, [1], keep=1), 2)
    for bad in (object(), lambda: None, Path("x")):
        with pytest.raises(ConfigurationError, match=r"step 2 in .* was not saved: rank 1: .*odd= holds more than"):
            loopback(lambda rank, bad=bad: checkpoint.save(tmp_path, 2, keep=1, odd=bad if rank else 0), 2)
    assert loopback(lambda rank: checkpoint.latest(tmp_path), 2) == [1, 1]


def test_a_disk_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folders = [tmp_path / "fine", tmp_path / "file"]
    told: list[str] = []

    def body(rank: int) -> None:
        with pytest.raises(CheckpointError, match=r"was not saved: rank 1: (NotADirectory|FileExists)Error") as caught:
            checkpoint.save(folders[rank], 1, number=1)
        told.append(str(caught.value))

    loopback(body, 2)
    assert len(told) == 2
    assert loopback(lambda rank: checkpoint.latest(folders[0]), 2) == [None, None]


def test_ranks_that_save_different_things_are_told(tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match="the step of the checkpoint"):
        loopback(lambda rank: checkpoint.save(tmp_path, rank, number=1), 2)
    with pytest.raises(DisagreementError, match="the names of what is saved"):
        loopback(lambda rank: checkpoint.save(tmp_path, 1, **{f"number{rank}": 1}), 2)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda f: checkpoint.save(f, -1, a=1), "step must be a whole number"),
        (lambda f: checkpoint.save(f, 1.0, a=1), "step must be a whole number"),
        (lambda f: checkpoint.save(f, 1, keep=0, a=1), "keep must be"),
        (lambda f: checkpoint.save(f, 1), "nothing to save"),
        (lambda f: checkpoint.load(f, epoch=3), "epoch= has no load_state_dict"),
    ],
)
def test_arguments(tmp_path: Path, call: Callable[[Path], object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        call(tmp_path)


def test_an_object_that_was_not_saved_changes_nothing(tmp_path: Path) -> None:
    model, optimizer, _ = training(None)
    checkpoint.save(tmp_path, 1, model=model)
    before = values(model)
    nn.init.zeros_(model[0].weight)
    zeroed = values(model)
    with pytest.raises(ConfigurationError, match="holds no optimizer; it holds model"):
        checkpoint.load(tmp_path, model=model, optimizer=optimizer)
    assert torch.equal(values(model), zeroed)
    assert not torch.equal(zeroed, before)


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    numbers(tmp_path, 0, [1])
    (part,) = tmp_path.glob("*/rank0-of-1.pt")
    part.write_bytes(part.read_bytes()[:100])
    with pytest.raises(CheckpointError, match=r"rank0-of-1\.pt cannot be read"):
        checkpoint.load(tmp_path)


# -- kill -9 ----------------------------------------------------------------------------------------------------------


def killed_at(point: int, folder: Path, save: Callable[[], object]) -> bool:
    """Fork a process that calls ``save`` and is killed at the ``point``-th thing that it does to files in ``folder``; whether
    it came that far."""
    pid = os.fork()
    if pid == 0:
        count = 0

        def seen(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir") and str(folder) in str(arguments[0]):
                count += 1
                if count == point:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(seen)
        try:
            save()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("keep", [1, 2])
def test_killed_amid_a_save_the_last_complete_one_is_read(tmp_path: Path, keep: int) -> None:
    """At every single thing that a save does to files, from its first to the removal of the oldest checkpoint."""
    kills, seen = 0, set()
    for point in range(1, 1000):
        folder = tmp_path / str(point)
        numbers(folder, 0, [1, 2], keep=keep)
        if not killed_at(point, folder, lambda folder=folder: numbers(folder, 0, [3], keep=keep)):
            break
        kills += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = checkpoint.load(folder)
        assert found is not None
        assert found["number"] == found["step"] == checkpoint.latest(folder)
        seen.add(found["step"])
        numbers(folder, 0, [4], keep=keep)  # and the next save removes what was left unfinished
        steps = sorted(int(place.name[5:14]) for place in folder.iterdir())
        assert steps == ([4] if keep == 1 else [found["step"], 4])
    assert kills > 12
    assert seen == {2, 3}
