"""Ray Train with the real library: the example, with two workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "03_ray.py"


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(960)  # starting Ray alone takes minutes where processors are busy
def test_rays_workers_gossip_and_report_the_average(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray Train is not installed (pip install 'ray[train]')")
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--epochs", "3", "--storage", str(tmp_path)],
        env=os.environ | quiet,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{")))
    assert found["exchanges"] == 3 * 16
    assert found["distance"] < 0.1
    assert found["loss"] < 0.1
