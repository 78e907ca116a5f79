"""Pages: the front page is short; every public name has an entry in docs/api, and every page a place in the navigation."""

import importlib
import inspect
import re
from pathlib import Path

import gossamer

DOCS = Path(__file__).parent.parent / "docs"
ENTRIES = [name for page in DOCS.glob("api/*.md") for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)]
SUBMODULES = ("algorithms", "checkpoint", "codecs", "data", "lab", "optim", "simulate")


def object_of(name: str) -> object:
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


def test_the_front_page_is_short() -> None:
    assert len((DOCS.parent / "README.md").read_text().splitlines()) <= 150


def test_the_design_is_read_in_one_sitting() -> None:
    assert len((DOCS / "design.md").read_text().split()) <= 2500


WORDS = re.compile(
    r"\b(ow(es?|ed|ing)|freight|cargo|bulletin|patience|patiently|vouch\w*|whoever|hears?|outbox|departure)\b", re.IGNORECASE
)


def test_sources_and_pages_use_the_words_of_the_glossary() -> None:
    """And not the ones of another dialect: a residual is not owed, and a result is applied."""
    files = [*(DOCS.parent / "src").rglob("*.py"), *DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    lines = ((file.name, line) for file in files for line in file.read_text().splitlines())
    assert [f"{name}: {found[0]!r} in {line.strip()}" for name, line in lines if (found := WORDS.search(line))] == []


def test_every_public_name_has_one_entry() -> None:
    public = {id(getattr(gossamer, name)): name for name in gossamer.__all__ if name != "__version__"}
    for submodule in SUBMODULES:
        module = importlib.import_module(f"gossamer.{submodule}")
        public |= {id(getattr(module, name)): f"{submodule}.{name}" for name in module.__all__}
    entries = [id(object_of(name)) for name in ENTRIES]
    assert len(entries) == len(set(entries))
    assert [name for key, name in public.items() if key not in entries] == []


def test_every_entry_has_a_docstring() -> None:
    objects = {name: object_of(name) for name in ENTRIES}
    documented = (name for name, found in objects.items() if inspect.isclass(found) or inspect.isroutine(found))
    assert [name for name in documented if not objects[name].__doc__] == []


def test_every_module_that_a_page_names_is_there() -> None:
    root = DOCS.parent
    pages = [root / "README.md", root / "CONTRIBUTING.md", *DOCS.glob("*.md")]
    named = {name for page in pages for name in re.findall(r"`((?:\w+/)+\w+\.py)`", page.read_text())}
    assert len(named) > 5
    assert [name for name in named if not any((root / folder / name).exists() for folder in ("", "src", "src/gossamer"))] == []


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": (\S+\.md)$", (DOCS.parent / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")} - {"assets/demo.md"}
    assert pages <= listed
