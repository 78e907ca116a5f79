"""The wheel: what it says of itself on an index page, and which files it brings."""

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

pytest.importorskip("setuptools", reason="setuptools, which builds the wheel, is not installed")

ROOT = Path(__file__).resolve().parents[1]
BUILT_FROM = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build(folder: Path, repository: str | None = None) -> tuple[Message, list[str]]:
    """The metadata and the files of a wheel that is built from a copy of the sources."""
    source, target = folder / "source", folder / "wheel"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in BUILT_FROM:
        shutil.copy(ROOT / name, source)
    if repository is not None:
        pyproject = source / "pyproject.toml"
        said = pyproject.read_text().replace(
            "[project.scripts]", f'[project.urls]\nRepository = "{repository}"\n\n[project.scripts]'
        )
        pyproject.write_text(said)
    done = subprocess.run([sys.executable, "-c", BUILD, str(target)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    with zipfile.ZipFile(next(target.iterdir())) as wheel:
        names = wheel.namelist()
        metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(wheel.read(metadata)), names


def links(page: str) -> list[str]:
    return [each.split(")")[0] for each in page.split("](")[1:]]


def test_a_wheel_brings_what_is_imported_and_no_tests(tmp_path: Path) -> None:
    metadata, names = build(tmp_path)
    own = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "gossamer").rglob("*.py")}
    others = {name for name in names if not name.startswith("gossamer-") and name not in own}
    assert own <= set(names)
    assert "gossamer/py.typed" in others
    assert all(name == "gossamer/py.typed" or name.endswith(".toml") for name in others)
    assert any(name.startswith("gossamer/simulate/clusters/") for name in others)
    needed = [each.split(";")[0].strip() for each in metadata.get_all("Requires-Dist", []) if "extra ==" not in each]
    assert sorted(each.split(">")[0].split("<")[0] for each in needed) == [
        "numba",
        "numpy",
        "pyroute2",
        "rich",
        "torch",
        "typer",
    ]
    page = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert isinstance(page, str)
    assert page.startswith("# gossamer")
    assert all(link.startswith(("https://", "#")) for link in links(page)), "no dead links"


def test_links_of_the_index_page_lead_into_the_repository_once_it_has_an_address(tmp_path: Path) -> None:
    metadata, _ = build(tmp_path, "https://code.example/gossamer")
    page, version = str(metadata.get_payload()), metadata["Version"]
    assert all(link.startswith(("https://", "#")) for link in links(page))
    assert f"(https://code.example/gossamer/blob/v{version}/docs/design.md)" in page
    assert (
        f"![Validation loss over wall-clock time, DDP and gossamer](https://code.example/gossamer/raw/v{version}/docs/" in page
    )
    assert metadata["Project-URL"] == "Repository, https://code.example/gossamer"
