"""Setup: the page of a package index, which is the README with links that work there. All else is in ``pyproject.toml``."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
RELATIVE = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)\s]+)\)")
"""A link, or a picture, to a file of the repository."""


def index_page(readme: str, repository: str | None, version: str) -> str:
    """Links to files as links into the repository, at the tag of this version; or, where it has no address, as plain text."""

    def absolute(found: re.Match[str]) -> str:
        if repository is None:
            return "" if found["picture"] else found["text"]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}[{found['text']}]({repository.rstrip('/')}/{kind}/v{version}/{found['path']})"

    return RELATIVE.sub(absolute, readme)


project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
setup(
    long_description=index_page(
        (HERE / "README.md").read_text(), project.get("urls", {}).get("Repository"), project["version"]
    ),
    long_description_content_type="text/markdown",
)
