"""Growth: two thousand steps need no more memory than a few hundred, and leave no tensors behind."""

import pytest

from gossamer.algorithms import registry
from gossamer.bench.in_lab import lab_json
from gossamer.bench.methods import OPTIMIZERS
from gossamer.lab import LabSpec

METHODS = (
    *(f"{name}()" for name in registry()),
    *(f"{name}(warmup=50)" for name in OPTIMIZERS),
    "Gossip(ahead=1.0)",
    "Gossip(lag=2)",
    "Hierarchical(Gossip(), ranks_per_node=1)",
    "in_parts(4, Gossip())",
    "overlap_forward(AllReduce())",
)

SCRIPT = """
import ctypes, gc, json, os, sys
os.environ["TORCH_FR_BUFFER_SIZE"] = "1"  # PyTorch's flight recorder remembers 2000 collectives, half a kilobyte each
from pathlib import Path
import torch
import torch.distributed as dist
from gossamer.bench.paired import make_method
from gossamer.bench.workload import Workload

def made():
    return torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 16))

def reading(method):
    if method.joined.replica is not None:
        method.joined.replica.wait_for_exchanges()
    dist.barrier()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages, sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

workload = Workload(
    "small", made, lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
    lambda generator: (torch.rand(4, 64, generator=generator), torch.zeros(4, 16)),
    lambda outputs, targets: (outputs - targets).square().mean(),
)
dist.init_process_group("gloo")
method = make_method(workload, sys.argv[1], dist.get_rank())
readings = []
for step in range(1, 2001):
    method.step()
    if step in (500, 1000, 2000):
        readings.append(reading(method))
if dist.get_rank() == 0:
    print(json.dumps({"readings": readings}))
if method.joined.replica is not None:
    method.joined.replica.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", METHODS)
def test_memory_does_not_grow_over_two_thousand_steps(tmp_path, method):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    (_, few), (resident, some), (later, many) = lab_json(LabSpec(hosts=2, shaping="none"), [str(script), method])[-1][
        "readings"
    ]
    assert few == some == many, "live tensors"
    assert later - resident < 300_000, "300 bytes per step"
