"""The bench of the kernels: every kernel is timed, and the table says so."""

import sys
from pathlib import Path

import pytest

from benchmarks.studies import kernels
from gossamer.bench.rows import read_rows


def test_it_writes_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["kernels", "--save-to", str(tmp_path), "--mbytes", "0.1", "--rounds", "2"])
    monkeypatch.setattr(kernels.torch.cuda, "is_available", lambda: False)
    kernels.main()
    rows = read_rows(tmp_path / "kernels.jsonl")
    others = {kernels.COPY, "chunk norms", "largest of each chunk"}
    assert {row["codec"] for row in rows} == {*others, *kernels.CODECS, *kernels.PLACES, *kernels.SPARSE}
    assert all(row["bytes_per_second"] > 0 and len(row["seconds"]) == 2 for row in rows)
    assert next(row for row in rows if row["codec"] == kernels.COPY)["share_of_copy"] == 1
    table = (tmp_path / "kernels.md").read_text().splitlines()
    assert len([line for line in table if line.startswith("| cpu |")]) == len(rows)


def test_rows_of_a_device_that_is_not_here_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = {"mbytes": 64.0, "codec": "sign", "kernel": "encode", "bytes_per_second": 1e9, "share_of_copy": 0.5}
    earlier = [about | {"device": device, "machine": "Another one"} for device in ("cpu", "cuda")]
    kernels.STUDY.store(tmp_path).add(earlier)
    monkeypatch.setattr(kernels, "on_devices", lambda *_: [about | {"device": "cpu", "machine": "This one"}])
    kernels.main(["--save-to", str(tmp_path)])
    rows = read_rows(tmp_path / "kernels.jsonl")
    assert [(row["device"], row["machine"]) for row in rows] == [("cpu", "This one"), ("cuda", "Another one")]
    assert (tmp_path / "kernels.md").read_text().splitlines()[-1] == "This one; Another one"
