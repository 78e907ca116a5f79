"""Setup: the page of a package index, which is the README with links that work there. All else is in ``pyproject.toml``."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
FILE = r"\]\((?!https?:|#)(?P<path>[^)\s]+)\)"
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)" + FILE)
LINK = re.compile(r"(?<!!)\[(?P<text>(?:!\[[^\]]*\]\([^)]*\)|[^\[\]])*)" + FILE)
"""To files of the repository. A picture may be the text of a link."""


def index_page(readme: str, repository: str | None, version: str) -> str:
    """Links to files as links into the repository, at the tag of this version; or, where it has no address, as plain text."""
    if repository is None:
        return LINK.sub(r"\g<text>", PICTURE.sub("", readme))
    at = f"{repository.rstrip('/')}/{{}}/v{version}/"
    pictured = PICTURE.sub(rf"![\g<text>]({at.format('raw')}\g<path>)", readme)
    return LINK.sub(rf"[\g<text>]({at.format('blob')}\g<path>)", pictured)


project = tomllib.loads((HERE / "pyproject.toml").read_text())["project"]
setup(
    long_description=index_page(
        (HERE / "README.md").read_text(), project.get("urls", {}).get("Repository"), project["version"]
    ),
    long_description_content_type="text/markdown",
)
