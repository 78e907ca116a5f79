"""What mkdocs needs to make a site of pages that are read in the repository, too.

Pages outside of ``docs/`` (README.md, the results of benchmarks) become pages of the site, and links to and from them are
those between pages of the site. Roles of docstrings (``:class:`Gossip```) become links.
"""

import re
from pathlib import Path
from typing import Any

from griffe import Extension, Module
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
OUTSIDE = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "benchmarks/README.md",
    "benchmarks/suites.toml",
    "tests/judge/results.md",
)
"""Files that pages link to, beside those of ``examples`` and ``benchmarks/results``."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what lies outside of ``docs/``."""
    results = [path for path in (ROOT / "benchmarks" / "results").rglob("*") if path.suffix in (".md", ".png")]
    for path in [*(ROOT / name for name in OUTSIDE), *(ROOT / "examples").glob("*.py"), *results]:
        name = path.relative_to(ROOT).as_posix()
        place = "index.md" if name == "README.md" else name
        files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links as they are from the page's place in the site."""
    place = page.file.src_uri
    markdown = re.sub(r"\[([^]]+)\]\((?:examples|studies)/?\)", r"`\1`", markdown)  # folders have no page
    if place.startswith("benchmarks/"):
        return markdown.replace("](../docs/", "](../")
    if place == "index.md" or place in OUTSIDE:
        return markdown.replace("](docs/", "](")
    return markdown if "/" in place else markdown.replace("](../", "](")


class Roles(Extension):
    """Roles of docstrings as links where the name is public, else as code."""

    def on_package(self, *, pkg: Module, **kwargs: Any) -> None:
        public = {name for name in pkg.exports or () if isinstance(name, str)}

        def linked(match: re.Match[str]) -> str:
            name = match[1].lstrip("~").removeprefix("gossamer.")
            return f"[`{name}`][gossamer.{name}]" if name in public else f"`{match[1].lstrip('~')}`"

        seen: set[int] = set()
        waiting: list[Any] = [pkg]
        while waiting:
            item = waiting.pop()
            if item.is_alias or id(item) in seen:
                continue
            seen.add(id(item))
            if item.docstring is not None:
                item.docstring.value = re.sub(r":(?:class|func|meth|mod|attr|data|exc):`([^`]+)`", linked, item.docstring.value)
            waiting += item.members.values()
