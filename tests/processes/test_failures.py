"""Whatever goes wrong is a named error on every rank within ten seconds, and never a hang."""

import re
from typing import Any

import pytest

from processes.harness import Process, launch, launch_side_by_side, require

SECONDS = 30.0
"""Ten on a machine that has nothing else to do."""

# Scenario: what the culprit raises, what the others raise, and what every text must contain.
# (The culprit is rank 1, or rank 2 where one is late.)
D, C, U, E, L, T = (
    "DisagreementError",
    "ConfigurationError",
    "UsageError",
    "CommunicationError",
    "PeerLeftError",
    "CommunicationTimeout CommunicationError",  # whichever rank is the first to give up
)
EXPECTED: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "different_algorithms": (D, D, ("algorithm", "ranks 0, 2: AllReduce", "rank 1: Gossip")),
    "different_fields": (D, D, ("algorithm", "wire='fp32'", "wire='fp16'")),
    "different_shapes": (D, D, ("model parameters", "rank 1: 0.weight", "[41, 10]", "[40, 10]")),
    "different_names": (D, D, ("model parameters", "rank 1: other.0.weight")),
    "different_dtypes": (D, D, ("model parameters", "float32", "float64")),
    "different_freezing": (D, D, ("0.bias", "frozen", "trainable")),
    "different_optimizers": (D, D, ("optimizers", "rank 1: SGD", "AdamW")),
    "different_buffers": (D, D, ("options", "buffers='local'")),
    "different_scalers": (D, D, ("options", "scaler=yes")),
    "wrong_timeout": (C, E, ("timeout must be a positive number of seconds", "-1")),
    "wrong_kind_of_timeout": (C, E, ("timeout must be a positive number of seconds", "'soon'")),
    "wrong_buffers": (C, E, ("buffers must be one of", "sometimes")),
    "wrong_scaler": (C, E, ("scaler must be a torch.amp.GradScaler", "float")),
    "class_instead_of_algorithm": (C, E, ("write AllReduce()",)),
    "foreign_optimizer_on_one_rank": (C, E, ("the optimizer does not hold", "'0.weight'")),
    "foreign_optimizer_on_all_ranks": (C, C, ("the optimizer does not hold", "'0.weight'")),
    "optimizer_with_some_parameters": (C, E, ("the optimizer does not hold", "'2.weight'")),
    "wrapped_in_ddp": (C, C, ("DistributedDataParallel", "wrapped.module")),
    "wrapped_in_fsdp1": (C, C, ("FSDP1",)),
    "error_of_another_kind_in_replicate": ("nothing", E, ("rank 1: MemoryError: on purpose",)),
    "replicated_twice": (C, C, ("replicate() was called twice", "'0.weight'")),
    "late_at_the_start": (E, T, ("replicate()", "rank 2")),
    "parameter_added_on_one_rank": (U, E, ("'extra'", "after replicate()")),
    "parameter_replaced_on_all_ranks": (U, U, ("'bias'", "after replicate()")),
    "layer_replaced_with_gossip": (U, E, ("'2'", "after replicate()")),
    "group_added_to_the_optimizer": (U, E, ("AdamW", "after replicate()")),
    "model_converted": (U, E, ("'0.weight'", "torch.float16", "torch.float64")),
    "no_parameter_reached": (U, E, ("rank 1", "step 2", "no backward pass")),
    "no_parameter_reached_with_gossip": (U, E, ("rank 1", "step 2", "no parameter of AdamW has a gradient")),
    "forgotten_no_sync": (U, E, ("rank 1", "outside of no_sync()")),
    "data_end_early": ("nothing", L, ("rank 1 ended", "replica.join()")),
    "error_in_backward": (U, E, ("rank 1", "backward pass has not ended")),
    "algorithm_raises_in_first_bucket": (E, E, ("rank 1", "bucket 0", "step 2", "a mistake in the algorithm")),
    "algorithm_raises_in_second_bucket": (E, E, ("rank 1", "bucket 1", "step 2", "a mistake in the algorithm")),
    "prompt_algorithm_raises": (E, E, ("rank 1", "bucket 1", "step 2", "a mistake in the algorithm")),
    "prompt_algorithm_starts_late": (E, E, ("bucket 0", "step 2", "a prompt algorithm starts everything before it waits")),
    "algorithm_returns_the_wrong_shape": (C, E, ("Faulty.exchange", "bucket 1")),
    "sparse_gradient": (C, C, ("'0.weight'", "sparse=False")),
    "state_of_another_run": (C, E, ("Gossip()", "AllReduce")),
    "state_of_another_step": (D, D, ("step", "rank 1: 3", "ranks 0, 2: 2")),
    # Whichever rank is the first to notice.
    "consensus_on_one_rank": (f"{U} {E}", f"{U} {E}", ("waits in consensus()", "Every rank enters consensus()")),
    "forward_on_one_rank": ("nothing", "nothing", ()),
    "used_after_close": (U, U, ("closed",)),
    "close_after_a_failure": (E, T, ("bucket", "step", "4 s")),
    "late": ("nothing", "nothing", ()),
    "late_with_gossip": ("nothing", "nothing", ()),
    "too_late": (E, T, ("rank 2", "bucket 0", "at step 2", "all_gather", "4 s")),
    "late_in_a_ring": ("nothing", "nothing", ()),
    "too_late_in_a_ring": (E, T, ("rank 2", "bucket 0", "at step 2", "all_reduce", "4 s")),
    "too_late_with_gossip": (E, T, ("rank 2", "bucket 0", "after step", "permute", "4 s")),
}
LATE = {
    "late_at_the_start",
    "late",
    "late_with_gossip",
    "too_late",
    "too_late_with_gossip",
    "late_in_a_ring",
    "too_late_in_a_ring",
}


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    sleepy = [name for name in EXPECTED if name in LATE | {"close_after_a_failure", "consensus_on_one_rank"}]
    others = [name for name in EXPECTED if name not in sleepy]  # first: what a first step imports makes ranks late, too
    parts = [others[half::2] + sleepy[half::2] for half in (0, 1)]
    return launch_side_by_side("scenarios_failures", parts, 3, timeout=240)


@pytest.mark.parametrize("scenario", EXPECTED)
def test_every_rank_is_told(ended: list[Process], scenario: str) -> None:
    found: list[dict[str, Any]] = require(ended, scenario)
    culprit, others, texts = EXPECTED[scenario]
    guilty = 2 if scenario in LATE else 1
    for rank, told in enumerate(found):
        print(f"rank {rank}, {told['end'] - told['begin']:.1f} s: {told['kind']}: {told['text']}")
    for rank, told in enumerate(found):
        assert told["kind"] in (culprit if rank == guilty else others).split(), (rank, told)
        if told["kind"] != "nothing":
            assert all(text in told["text"] for text in texts), (rank, told["text"], texts)
        assert told["end"] - told["begin"] < SECONDS


@pytest.mark.parametrize("scenario", ["late", "late_with_gossip"])
def test_a_late_rank_is_named_in_a_warning(ended: list[Process], scenario: str) -> None:
    check_warnings(require(ended, scenario), 2)


@pytest.mark.slow
def test_a_late_rank_is_named_after_ten_seconds() -> None:
    name = "late_by_twelve_seconds"
    check_warnings(require(launch("scenarios_failures", [name], 3, timeout=60), name), 10)


def check_warnings(found: list[dict[str, Any]], after: int) -> None:
    warnings = [text for told in found for text in told["warnings"]]
    print(*warnings, sep="\n")
    assert warnings
    for text in warnings:
        assert "late: rank 2)" in text
        assert "bucket 0" in text
        assert "step" in text
        assert "all_gather" in text or "permute" in text
        waited = re.search(r"has waited (\d+) s", text)
        assert waited is not None
        assert int(waited[1]) >= after
    assert not found[2]["warnings"]


def test_the_processes_end_well_after_all_that(ended: list[Process]) -> None:
    for process in ended:
        assert process.code == 0, process.errors[-3000:]
        assert process.output == ""
        assert process.errors == ""
