"""``gossamer simulate --model train.py``: a script with its own loop is predicted from its first step."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from gossamer.cli import app

LOOP = """
    import argparse, torch, torch.distributed as dist
    from torch import nn
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    options = parser.parse_args()
    dist.init_process_group("nccl")
    assert dist.get_world_size() == 1
    net = nn.Sequential(nn.Linear(64, options.width), nn.ReLU(), nn.Linear(options.width, 10))
    model = {wrapped}
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    print("a line of the script's own")
    {loop}
"""
PLAIN = """
    while True:
        optimizer.zero_grad()
        for _ in range(options.accumulate):
            model(torch.randn(8, 64)).square().mean().backward()
        optimizer.step()
"""


def script(folder: Path, wrapped: str = "net", loop: str = PLAIN) -> Path:
    path = folder / "train.py"
    text = textwrap.dedent(LOOP).replace("{wrapped}", wrapped).replace("{loop}", textwrap.dedent(loop))
    path.write_text(text)
    return path


def simulate(model: str, *more: str) -> Any:
    arguments = ["simulate", "desktops-1gbe", "--model", model, "--compute", "0.1s", "--machines", "4", "--json", *more]
    return CliRunner().invoke(app, arguments)


def predicted(model: str, *more: str) -> dict[str, Any]:
    result = simulate(model, *more)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


WRAPPED = [
    "net",
    "nn.parallel.DistributedDataParallel(net)",
    "__import__('gossamer').DistributedDataParallel(net, torch.optim.AdamW(net.parameters()))",
    "torch.compile(net)",
]


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_script_is_predicted_as_the_same_model_in_functions(wrapped: str, tmp_path: Path) -> None:
    functions = tmp_path / "functions.py"
    functions.write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        def build_model():
            return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10))
        def build_optimizer(model):
            return torch.optim.AdamW(model.parameters(), lr=1e-3)
        def random_batch(generator):
            return torch.randn(8, 64), torch.randint(10, (8,))
        """)
    )
    own = predicted(f"{script(tmp_path, wrapped)} --width 96")
    other = predicted(str(functions))
    assert own["rows"] == other["rows"]
    assert not dist.is_initialized()


def test_a_replica_may_be_in_the_script(tmp_path: Path) -> None:
    loop = "import gossamer\ngossamer.replicate(net, optimizer, gossamer.Gossip())" + textwrap.dedent(PLAIN)
    assert predicted(str(script(tmp_path, loop=loop)))["rows"] == predicted(str(script(tmp_path)))["rows"]


def test_passes_before_a_step_count(tmp_path: Path) -> None:
    path = script(tmp_path)
    once, thrice = predicted(str(path)), predicted(f"{path} --accumulate 3")
    assert thrice["model"]["batch_per_device"] == 3 * once["model"]["batch_per_device"] == 24


BROKEN = {
    "raise FileNotFoundError('imagenet')": "FileNotFoundError: imagenet (before its first step",
    "pass": "ended before an optimizer of it took a step",
    "raise SystemExit(3)": "exited before its first step, with 3",
    "nn.Linear(2, 2)(torch.zeros(1, 2)); net[0](torch.zeros(1, 64)); net[2](torch.zeros(1, 64)); optimizer.step()":
        "a step is predicted of one model, and 2 with parameters of the optimizer that stepped first were called",
}  # fmt: skip


@pytest.mark.parametrize("loop", BROKEN)
def test_what_keeps_a_script_from_its_first_step_is_said(loop: str, tmp_path: Path) -> None:
    path = script(tmp_path, loop=loop)
    result = simulate(str(path))
    assert result.exit_code == 2
    assert f"gossamer simulate: {path}" in result.stderr
    assert BROKEN[loop] in result.stderr
    assert not dist.is_initialized()
