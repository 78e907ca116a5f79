"""Scenarios: what users look at, in two real processes: traces of a few steps, and who is late."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gossamer import AllReduce, Gossip, ScatterReduce
from gossamer.algorithms.base import Algorithm
from processes.worker import Here
from processes.workloads import generator


def trained(here: Here, algorithm: Algorithm, sleep: float = 0.0) -> tuple[Any, Any]:
    """A replica, and a function that takes a step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    replica = here.replicate(model, optimizer, algorithm)

    def step(number: int) -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 64, generator=generator(here.rank, number))).square().mean().backward()
        time.sleep(sleep)
        optimizer.step()

    return replica, step


def events(place: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(place.read_text())["traceEvents"]
    return found


def a_trace_shows_flows_wires_and_waits_by_bucket(here: Here) -> None:
    """Of algorithms over gradients (in lanes; on the main thread) and over weights."""
    for algorithm in (ScatterReduce(), AllReduce(bucket_bytes=4096), Gossip(wire="fp32")):
        replica, step = trained(here, algorithm)
        step(0), step(1)
        replica.wait_for_exchanges()  # a flow that began before the trace would not be in it
        with replica.trace(here.folder / "trace.json") as place:
            step(2), step(3)
            replica.wait_for_exchanges()
        assert place.name == f"trace.rank{here.rank}.json"
        timeline = events(place)
        ours = [event for event in timeline if str(event["name"]).startswith("gossamer: ") and event["ph"] == "X"]
        for what in ("flow", "wire"):
            found = [event for event in ours if event["name"].startswith(f"gossamer: {what} of bucket 0 (")]
            assert len(found) >= 2, (algorithm, what, {event["name"] for event in ours})
            assert all(event["dur"] >= 0 for event in found)
        for wire in (event for event in ours if event["name"].startswith("gossamer: wire of bucket")):
            around = [
                flow
                for flow in ours
                if flow["name"].startswith("gossamer: flow of bucket")
                and flow["tid"] == wire["tid"]
                and flow["ts"] <= wire["ts"] <= flow["ts"] + flow["dur"]
            ]
            assert around, "what is on the wire belongs to a flow"
        assert any(str(event["name"]).startswith("aten::") for event in timeline), "computation is there, too"
        names = [event["args"]["name"] for event in timeline if event["ph"] == "M" and event["name"] == "process_name"]
        assert f"rank {here.rank}" in names
        here.close()


def the_rank_that_others_wait_for_is_named(here: Here) -> None:
    """Rank 1 sleeps in every step: whatever is exchanged, rank 0 is ready so much before it."""
    for algorithm in (AllReduce(), Gossip()):
        torch.manual_seed(1)
        model = nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = here.replicate(model, optimizer, algorithm)
        for sleep, last in ((0.3, 1), (0.0, None)):
            for number in range(4):
                optimizer.zero_grad()
                loss = model(torch.randn(4, 8, generator=generator(here.rank, number))).square().mean()
                time.sleep(sleep * here.rank)
                loss.backward()
                optimizer.step()
            report = replica.stragglers()
            assert len(report.ready_seconds) == len(report.compute_seconds) == 2
            assert min(report.ready_seconds) == 0
            if last is not None:
                assert report.last == last, report
                assert report.ready_seconds[0] > 0.1, report
                assert report.compute_seconds[1] > 0.2, report
                assert "rank 1 was ready last" in str(report)
        here.close()
