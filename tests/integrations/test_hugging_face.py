"""Accelerate's and Transformers' integrations: two processes, against their DDP."""

from pathlib import Path
from typing import Any

import pytest
import torch

from integrations.ranks import HERE, run


def needed(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed (pip install '.[integrations]')")


def apart(one: list[float], other: list[float]) -> float:
    return (torch.tensor(one, dtype=torch.float64) - torch.tensor(other, dtype=torch.float64)).abs().max().item()


def train(tmp_path: Path, script: str, kind: str, *options: str) -> list[Any]:
    folder = tmp_path / (kind if "whole" not in options else f"{kind}-whole")
    folder.mkdir(exist_ok=True)
    return run(HERE / script, tmp_path, kind, str(folder), *options)


SCRIPTS = pytest.mark.parametrize(
    ("library", "script"), [("accelerate", "train_accelerate.py"), ("transformers", "train_transformers.py")]
)


@SCRIPTS
def test_the_exact_one_trains_as_ddp_does(tmp_path: Path, library: str, script: str) -> None:
    """Eight steps of two passes each, clipped: one exchange for each."""
    needed(library)
    theirs, ours = train(tmp_path, script, "ddp"), train(tmp_path, script, "exact")
    assert ours[0]["exchanges"] == 8
    assert ours[0]["weights"] == ours[1]["weights"]
    assert apart(ours[0]["weights"], theirs[0]["weights"]) < 1e-9


@SCRIPTS
def test_gossip_ends_as_the_average_and_resumes_bit_for_bit(tmp_path: Path, library: str, script: str) -> None:
    needed(library)
    whole = train(tmp_path, script, "gossip")
    assert whole[0]["exchanges"] == 8
    assert whole[0]["own"] != whole[1]["own"]
    assert whole[0]["weights"] == whole[1]["weights"]
    for how in ("resume", "newest") if library == "accelerate" else ("resume",):  # Accelerate finds its newest one itself
        went_on = train(tmp_path, script, "gossip", how)
        assert [each["own"] for each in went_on] == [each["own"] for each in whole]


def test_trainer_evaluates_and_saves_the_average(tmp_path: Path) -> None:
    """After the last step: the loss is that of the average of both ranks, and the checkpoint holds it."""
    needed("transformers")
    for each in train(tmp_path, "train_transformers.py", "gossip"):
        assert apart(each["own"], each["weights"]) > 1e-6
        assert apart(each["saved"], each["weights"]) < 1e-12
        assert each["losses"][-1] == pytest.approx(each["loss of the average"], abs=1e-6)


def test_a_model_is_prepared_again_after_memory_was_freed() -> None:
    """As ``find_executable_batch_size`` does after an attempt that took too much memory."""
    needed("accelerate")
    from accelerate.state import AcceleratorState

    from gossamer.integrations.accelerate import Accelerator

    try:
        accelerator, model = Accelerator(cpu=True), torch.nn.Linear(3, 1)
        for _ in range(2):
            prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            accelerator.backward(prepared(torch.ones(2, 3)).sum())
            optimizer.step()
            assert [replica.step for replica in accelerator.replicas] == [1]
            accelerator.free_memory(prepared, optimizer)
            assert accelerator.replicas == []
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_class_made_of_accelerator_stays_itself() -> None:
    needed("accelerate")
    from accelerate.state import AcceleratorState

    from gossamer.integrations.accelerate import Accelerator

    class Own(Accelerator):
        pass

    try:
        assert type(Own(cpu=True)) is Own
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
