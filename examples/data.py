"""Data of the examples: Python's own source text, and Fashion-MNIST."""

import gzip
import hashlib
import os
import struct
import sysconfig
import urllib.error
import urllib.request
import zlib
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

# -- the source text of Python's standard library -----------------------------------------------------------------

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


@cache
def standard_library(rank: int, world: int) -> tuple[Tensor, Tensor]:
    """The bytes of this rank's training files, and those of the held-out files, which are the same on all ranks.

    A file is held out by a checksum of its name: one in twenty, the same ones in every run and on every machine.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    names = [name for name in names if not _NOT_THE_LIBRARY & set(name.parts)]
    held_out = [name for name in names if zlib.crc32(name.as_posix().encode()) % 20 == 0]
    train = [name for name in names if name not in set(held_out)][rank::world]
    if not train or not held_out:
        raise SystemExit(f"{folder} holds {len(names)} Python source files: too few to train {world} ranks on")
    return _bytes_of(folder, train), _bytes_of(folder, held_out)


def _bytes_of(folder: Path, names: list[Path]) -> Tensor:
    text = b"\n".join((folder / name).read_bytes() for name in names)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


# -- Fashion-MNIST ------------------------------------------------------------------------------------------------

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
ORIGIN = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"

# SHA-256 of the files as they are after decompression: repackaging changes the compressed ones.
SHA256 = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}


@cache
def fashion_mnist() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Training and test set, each as images (N × 1 × 28 × 28, from 0 to 1) and labels (N).

    Looks in the folder that ``GOSSAMER_DATA`` names, then where Debian's package dataset-fashion-mnist puts it, then
    in the cache; downloads into the cache if it is nowhere. Ends with what to do where that fails.
    """
    folder = _folder()
    parts = []
    for part in ("train", "t10k"):
        images = _read_idx(folder, f"{part}-images-idx3-ubyte", dimensions=3)
        labels = _read_idx(folder, f"{part}-labels-idx1-ubyte", dimensions=1)
        if len(images) != len(labels):
            raise SystemExit(f"{folder}: {len(images)} {part} images, but {len(labels)} labels")
        parts.append((images.unsqueeze(1) / 255, labels.long()))
    return parts[0], parts[1]


def _folder() -> Path:
    """The folder that holds all four files, filled if need be."""
    named = os.environ.get("GOSSAMER_DATA")
    if named:
        missing = _missing(Path(named))
        if missing:
            raise SystemExit(f"GOSSAMER_DATA={named}: there is no {' nor '.join(missing)} (plain or .gz)")
        return Path(named)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gossamer" / "fashion-mnist"
    for folder in (DEBIAN, cache):
        if not _missing(folder):
            return folder
    for name in _missing(cache):
        _download(name, cache)
    return cache


def _missing(folder: Path) -> list[str]:
    return [name for name in SHA256 if _find(folder, name) is None]


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _download(name: str, folder: Path) -> None:
    """Fetch one file, check it, and only then give it its name: ranks of one machine may do so at the same time."""
    url = f"{ORIGIN}/{name}.gz"
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            content = gzip.decompress(answer.read())
    except (OSError, EOFError, zlib.error) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise SystemExit(f"Fashion-MNIST is not here, and {url} cannot be fetched ({reason}).\n{_ADVICE}") from None
    found = hashlib.sha256(content).hexdigest()
    if found != SHA256[name]:
        raise SystemExit(f"{url}: the checksum (SHA-256) of the content is {found}, not {SHA256[name]}.\n{_ADVICE}")
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{name}.{os.getpid()}.partial"
    partial.write_bytes(content)
    partial.replace(folder / name)


_ADVICE = (
    f"Install Debian's package dataset-fashion-mnist, or put {', '.join(SHA256)} (plain or .gz)\n"
    "into a folder and name it in GOSSAMER_DATA."
)


def _read_idx(folder: Path, name: str, dimensions: int) -> Tensor:
    """Unsigned bytes in the IDX format: two zeros, type 8, number of dimensions, their sizes, the values."""
    path = _find(folder, name)
    assert path is not None
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    begin = 4 + 4 * dimensions
    if len(content) < begin or content[:4] != bytes([0, 0, 8, dimensions]):
        raise SystemExit(f"{path} is no IDX file of bytes in {dimensions} dimension(s)")
    shape = struct.unpack(f">{dimensions}I", content[4:begin])
    values = torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=begin)
    if len(values) != torch.Size(shape).numel():
        raise SystemExit(f"{path} is cut short: {len(values)} values, {torch.Size(shape).numel()} expected")
    return values.view(shape)
