"""Ranks: a script in several processes, as a launcher would start it; each writes what it found to a file of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gossamer.lab.launcher import reserve_port

HERE = Path(__file__).parent


def torchrun(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun tells its processes."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run(
    script: Path,
    folder: Path,
    *arguments: str,
    world: int = 2,
    timeout: float = 240,
    launcher: Any = torchrun,
    extra: Mapping[str, str] | None = None,
) -> list[Any]:
    """What the script found on each rank: it writes JSON to the file that ``FOUND`` names. All must end well."""
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    found = [folder / f"found-{rank}.json" for rank in range(world)]
    for place in found:
        place.unlink(missing_ok=True)
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env=os.environ | quiet | launcher(rank, world, port) | {"FOUND": str(found[rank])} | dict(extra or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        for rank in range(world)
    ]
    with held:
        return _ended(processes, found, timeout)


def _ended(processes: Sequence["subprocess.Popen[str]"], found: Sequence[Path], timeout: float) -> list[Any]:
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=timeout)[0])
    finally:
        for process in processes:
            process.kill()
    words = "\n".join(f"rank {rank}:\n{text[-6000:]}" for rank, text in enumerate(said))
    assert [process.returncode for process in processes] == [0] * len(processes), words
    return [json.loads(place.read_text()) for place in found]
