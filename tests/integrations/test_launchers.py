"""Process groups under mpirun and srun: from the variables that they set."""

from pathlib import Path

import pytest

from gossamer import ConfigurationError
from gossamer.integrations.launchers import Place, place
from integrations.ranks import run

SCRIPT = """
import json, os, sys
import torch, gossamer
import torch.distributed as dist
from gossamer.integrations.launchers import init_process_group

if sys.argv[1] == "ours":
    where = init_process_group("gloo")
    assert init_process_group("gloo") == where, "once more does nothing"
else:
    rank, world = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=world)
torch.manual_seed(dist.get_rank())
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(1, 2) * dist.get_rank()).sum().backward()
    optimizer.step()
replica.close(average=True)
with open(os.environ["FOUND"], "w") as file:
    json.dump({"weights": model.weight.tolist(), "rank": dist.get_rank(), "world": dist.get_world_size()}, file)
dist.destroy_process_group()
"""


def open_mpi(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": str(world),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(world),
        "PMIX_NAMESPACE": f"prterun-host-{port}@1",
    }


def slurm(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(world),
        "SLURM_LOCALID": str(rank),
        "SLURM_STEP_TASKS_PER_NODE": str(world),
        "SLURM_STEP_NODELIST": "gpu[003-004]",
        "SLURM_JOB_ID": str(port),
    }


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        (open_mpi, "ours"),
        pytest.param(slurm, "ours", marks=pytest.mark.slow),
        pytest.param(open_mpi, "torch", marks=pytest.mark.slow),
    ],
)
def test_a_script_started_so_trains(tmp_path: Path, launcher: object, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = run(script, tmp_path, how, str(tmp_path / "store"), launcher=launcher)
    assert [(each["rank"], each["world"]) for each in found] == [(0, 2), (1, 2)]
    assert found[0]["weights"] == found[1]["weights"]


def test_ranks_on_several_machines_are_found() -> None:
    several = slurm(5, 8, 77) | {"SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_STEP_ID": "3"}
    assert place(several) == Place(5, 8, 1, None, "gpu003", 20_000 + 77 * 16 + 3)
    assert place(several | {"MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4321"}) == Place(5, 8, 1, None, "10.0.0.7", 4321)
    far = open_mpi(3, 4, 9) | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    found = place(far)
    assert found is not None
    assert (found.rank, found.world, found.local_rank, found.local_world, found.host) == (3, 4, 1, 2, None)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu7", "gpu7"), ("a,b", "a"), ("gpu[003-007,9],x", "gpu003"), ("n[4,6]-ib,m", "n4-ib"), ("rack1-n[10-12]", "rack1-n10")],
)
def test_the_first_machine_of_a_list_of_slurms_is_read(nodes: str, first: str) -> None:
    found = place(slurm(0, 8, 1) | {"SLURM_STEP_TASKS_PER_NODE": "2(x4)", "SLURM_STEP_NODELIST": nodes})
    assert found is not None
    assert found.host == first


def test_nothing_launched_is_nobody() -> None:
    assert place({}) is None
    assert place({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **open_mpi(0, 4, 1)}).rank == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("wrong", [{"OMPI_COMM_WORLD_RANK": "7"}, {"OMPI_COMM_WORLD_SIZE": "many"}, {"MASTER_PORT": "x"}])
def test_variables_that_cannot_be_are_named(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(wrong))):
        place(open_mpi(0, 2, 1) | wrong)
