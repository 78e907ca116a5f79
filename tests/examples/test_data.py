"""The examples' data: what is found where, and errors that say what to do."""

import gzip
import struct
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch


def write_idx(path: Path, shape: tuple[int, ...], content: bytes | None = None) -> None:
    """An IDX file of unsigned bytes, compressed if its name ends so."""
    size = torch.Size(shape).numel()
    values = bytes(i % 251 for i in range(size)) if content is None else content
    data = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape) + values
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_fashion(folder: Path, suffix: str = "") -> None:
    for part, count in (("train", 6), ("t10k", 3)):
        write_idx(folder / f"{part}-images-idx3-ubyte{suffix}", (count, 28, 28))
        write_idx(folder / f"{part}-labels-idx1-ubyte{suffix}", (count,), bytes(i % 10 for i in range(count)))


@pytest.fixture
def nowhere(data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without the dataset; returns its cache folder."""
    monkeypatch.delenv("GOSSAMER_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(data, "DEBIAN", tmp_path / "debian")
    return tmp_path / "gossamer" / "fashion-mnist"


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> list[str]:
    """Answer downloads from ``files``; returns the list of what is asked for."""
    asked: list[str] = []

    class Answer:
        def __init__(self, content: bytes) -> None:
            self.read = lambda: content

        def __enter__(self) -> "Answer":
            return self

        def __exit__(self, *error: object) -> None:
            pass

    def urlopen(url: str, timeout: float) -> Answer:
        asked.append(url)
        return Answer(files[url.rsplit("/", 1)[1]])

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    return asked


class TestStandardLibrary:
    def test_every_rank_has_its_own_part_and_the_same_held_out_text(self, data: Any) -> None:
        whole, held_out = data.standard_library(0, 1)
        parts = [data.standard_library(rank, 3) for rank in range(3)]
        assert all(torch.equal(part[1], held_out) for part in parts)
        # Files are joined by one newline each: three parts have two fewer than the whole.
        assert sum(len(part[0]) for part in parts) == len(whole) - 2
        assert len({len(part[0]) for part in parts}) == 3
        assert 0.01 < len(held_out) / len(whole) < 0.15

    def test_no_held_out_file_is_trained_on(self, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "site-packages").mkdir()
        (tmp_path / "site-packages" / "other.py").write_text("not the library")
        for number in range(60):
            (tmp_path / f"m{number}.py").write_text(f"<{number}>")
        monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
        train, held_out = (set(bytes(text.tolist()).decode().split("\n")) for text in data.standard_library(0, 1))
        assert train | held_out == {f"<{number}>" for number in range(60)}
        assert held_out
        assert not train & held_out

    def test_too_few_files(self, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
        with pytest.raises(SystemExit, match="0 Python source files: too few to train 1 ranks"):
            data.standard_library(0, 1)


class TestFashionMnist:
    @pytest.mark.parametrize("suffix", ["", ".gz"])
    def test_in_a_named_folder(self, data: Any, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_fashion(tmp_path, suffix)
        monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
        (images, labels), (test_images, test_labels) = data.fashion_mnist()
        assert images.shape == (6, 1, 28, 28)
        assert test_images.shape == (3, 1, 28, 28)
        assert labels.tolist() == [0, 1, 2, 3, 4, 5]
        assert test_labels.dtype == torch.int64
        assert torch.equal(images.flatten()[:255] * 255, torch.arange(255) % 251)

    def test_where_debian_puts_it(self, data: Any, nowhere: Path) -> None:
        data.DEBIAN.mkdir()
        write_fashion(data.DEBIAN, ".gz")
        assert len(data.fashion_mnist()[0][0]) == 6

    def test_a_named_folder_without_it(self, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_fashion(tmp_path)
        (tmp_path / "train-labels-idx1-ubyte").unlink()
        monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
        with pytest.raises(SystemExit, match=f"GOSSAMER_DATA={tmp_path}: there is no train-labels-idx1-ubyte "):
            data.fashion_mnist()

    @pytest.mark.parametrize(
        ("name", "write", "message"),
        [
            ("train-images-idx3-ubyte", lambda path: path.write_bytes(b"<html>no such file"), "no IDX file"),
            ("train-images-idx3-ubyte", lambda path: write_idx(path, (6, 28, 28), b"short"), "cut short: 5 values, 4704"),
            ("t10k-labels-idx1-ubyte", lambda path: write_idx(path, (2,)), "3 t10k images, but 2 labels"),
            ("t10k-labels-idx1-ubyte.gz", lambda path: path.write_bytes(b"no gzip"), "cannot be read"),
        ],
    )
    def test_damaged_files(
        self, data: Any, name: str, write: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_fashion(tmp_path)
        (tmp_path / name.removesuffix(".gz")).unlink()
        write(tmp_path / name)
        monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))
        with pytest.raises(SystemExit, match=message):
            data.fashion_mnist()

    def test_downloaded_once_and_checked(self, data: Any, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        origin = nowhere.parent / "origin"
        origin.mkdir(parents=True)
        write_fashion(origin, ".gz")
        files = {path.name: path.read_bytes() for path in origin.iterdir()}
        sums = {name: data.hashlib.sha256(gzip.decompress(files[f"{name}.gz"])).hexdigest() for name in data.SHA256}
        monkeypatch.setattr(data, "SHA256", sums)
        asked = serve(monkeypatch, files)
        assert len(data.fashion_mnist()[0][0]) == 6
        assert sorted(url.rsplit("/", 1)[1] for url in asked) == sorted(files)
        data.fashion_mnist()
        assert len(asked) == 4
        assert sorted(path.name for path in nowhere.iterdir()) == sorted(sums)

    def test_a_wrong_checksum(self, data: Any, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        serve(monkeypatch, dict.fromkeys((f"{name}.gz" for name in data.SHA256), gzip.compress(b"something else")))
        with pytest.raises(SystemExit, match=r"checksum .* not c59f468a"):
            data.fashion_mnist()
        assert not nowhere.exists()

    def test_no_network(self, data: Any, nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(url: str, timeout: float) -> None:
            raise urllib.error.URLError("no route to host")

        monkeypatch.setattr(urllib.request, "urlopen", refuse)
        with pytest.raises(SystemExit) as ended:
            data.fashion_mnist()
        for part in ("Fashion-MNIST is not here", "no route to host", "dataset-fashion-mnist", "GOSSAMER_DATA"):
            assert part in str(ended.value)
