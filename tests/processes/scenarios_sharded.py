"""Scenarios: replicas of models that are in parts (FSDP2, tensor parallelism), on the mesh dimension that replicates."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gossamer
from gossamer.optim import LAMB, LARS, GossipAdamW, MasterWeights
from processes.sharded import Sharded, alone, batch, clip_gradients, flat, loss_of, stage_of, transformer
from processes.worker import Here

STEPS = 20


def trained(
    here: Here, kind: str, algorithm: Any = None, steps: int = STEPS, **options: Any
) -> tuple[Sharded, gossamer.Replica]:
    """A model in parts, trained by AdamW; clipped where torch can clip it (not DTensors together with others)."""
    parts = Sharded(kind)
    optimizer = torch.optim.AdamW(parts.model.parameters(), lr=1e-2, foreach=False)
    replica = here.replicate(parts.model, optimizer, algorithm, mesh=parts.mesh["replicate"], **options)
    for step in range(steps):
        optimizer.zero_grad()
        parts.loss(step).backward()
        replica.synchronize()
        if kind != "tensor without sequence":
            clip_gradients(parts.model, 0.5)
        optimizer.step()
    return parts, replica


def equals_one_process(here: Here, kind: str, **options: Any) -> None:
    parts, replica = trained(here, kind, **options)
    one = alone(parts.readers, STEPS, clip=None if kind == "tensor without sequence" else 0.5)
    difference = float((parts.whole() - flat(one)).abs().max())
    assert difference < 1e-9, difference
    assert replica.consensus_distance() == 0
    assert replica.step == STEPS


def fsdp(here: Here) -> None:
    equals_one_process(here, "fsdp")


def fsdp_at_the_step(here: Here) -> None:
    equals_one_process(here, "fsdp", synchronize="step")


def tensor(here: Here) -> None:
    equals_one_process(here, "tensor")


def tensor_without_sequence(here: Here) -> None:
    equals_one_process(here, "tensor without sequence")


def both(here: Here) -> None:
    equals_one_process(here, "both")


SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def pipeline(here: Here, schedule: str, synchronize: Any = "step") -> None:
    """Two stages, four micro-batches; beside one process that trains on all batches."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipe"))
    number, who = mesh.get_local_rank("pipe"), mesh.get_local_rank("replicate")
    model = stage_of(transformer(), number)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    replica = here.replicate(model, optimizer, mesh=mesh["replicate"], synchronize=synchronize)
    place = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh["pipe"].get_group())
    run = SCHEDULES[schedule](place, 4, loss_fn=loss_of)
    for step in range(STEPS):
        optimizer.zero_grad()
        words = batch(step, who, 4)
        before = replica.metrics()["messages_sent"]
        if number == 0:
            run.step(words)
        else:
            run.step(target=words, losses=[])
        assert replica.step == step + (synchronize != "step")
        optimizer.step()
        if step > 1:
            assert replica.metrics()["messages_sent"] - before == 1, "one bucket, gathered from the other rank"
    assert replica.step == STEPS
    difference = float((flat(model) - flat(stage_of(alone(2, STEPS, size=4), number))).abs().max())
    assert difference < 1e-9, difference


def gpipe(here: Here) -> None:
    pipeline(here, "gpipe")


def one_forward_one_backward(here: Here) -> None:
    pipeline(here, "1f1b")


def exchanged_in_the_pass_of_the_last_micro_batch(here: Here) -> None:
    pipeline(here, "1f1b", synchronize=4)


def page(word: str) -> str:
    """The block of the page on models in parts that has this word, for two by two processes on this machine."""
    text = (Path(gossamer.__file__).parents[2] / "docs" / "sharded.md").read_text()
    (found,) = [block for block in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S) if word in block]
    return str(found).replace('"cuda"', '"cpu"').replace("(2, 4)", "(2, 2)")


NAMES = {
    "gossamer": gossamer,
    "torch": torch,
    "init_device_mesh": init_device_mesh,
    "fully_shard": fully_shard,
    "parallelize_module": parallelize_module,
    "ColwiseParallel": ColwiseParallel,
    "RowwiseParallel": RowwiseParallel,
    "PipelineStage": PipelineStage,
    "Schedule1F1B": Schedule1F1B,
}


def the_page_on_fsdp(here: Here) -> None:
    names: dict[str, Any] = NAMES | {"model": transformer()}
    exec(page("fully_shard"), names)
    here.replicas.append(names["replica"])
    for step in range(2):
        loss_of(names["model"](batch(step, here.rank)), batch(step, here.rank)).backward()
        names["optimizer"].step()
    assert names["replica"].consensus_distance() > 0


def the_page_on_tensor_parallelism(here: Here) -> None:
    names: dict[str, Any] = NAMES | {"model": transformer()}
    exec(page("ColwiseParallel"), names)
    here.replicas.append(names["replica"])
    words = batch(0, names["mesh"].get_local_rank("replicate"))
    loss_of(names["model"](words), words).backward()
    names["optimizer"].step()
    assert names["replica"].consensus_distance() == 0


def the_page_on_pipelines(here: Here) -> None:
    model = transformer()
    names: dict[str, Any] = NAMES | {"stages": [stage_of(model, 0), stage_of(model, 1)], "loss_fn": loss_of}
    exec(page("Schedule1F1B"), names)
    here.replicas.append(names["replica"])
    words = batch(0, names["mesh"].get_local_rank("replicate"), 4)
    names["schedule"].step(*([words] if names["number"] == 0 else []), **({} if names["number"] == 0 else {"target": words}))
    names["optimizer"].step()
    assert names["replica"].step == 1


OF_OURS: dict[str, Any] = {
    "GossipAdamW": partial(GossipAdamW, lr=1e-2),
    "LAMB": partial(LAMB, lr=1e-2, weight_decay=0.01),
    "LARS": partial(LARS, lr=1.0, weight_decay=0.01),
    "MasterWeights": lambda parameters: MasterWeights(torch.optim.AdamW, parameters, lr=1e-2),
}


def optimizers_of_ours(here: Here) -> None:
    """Optimizers that look at whole tensors (norms) see them whole, whatever part a rank has."""
    for name, make in OF_OURS.items():
        one = transformer()
        optimizer = make(one.parameters())
        for step in range(5):
            optimizer.zero_grad()
            words = torch.cat([batch(step, who) for who in range(4)])
            loss_of(one(words), words).backward()
            optimizer.step()
        parts = Sharded("fsdp")
        optimizer = make(parts.model.parameters())
        here.replicate(parts.model, optimizer, mesh=parts.mesh["replicate"])
        for step in range(5):
            optimizer.zero_grad()
            parts.loss(step).backward()
            optimizer.step()
        difference = float((parts.whole() - flat(one)).abs().max())
        assert difference < 1e-9, (name, difference)
        here.close()
