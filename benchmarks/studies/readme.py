"""README figures: puts the tables that our own commands produced between their markers in README.md."""

import argparse
import re
from pathlib import Path

from gossamer.errors import ConfigurationError

TABLES = (
    "docs/assets/demo.md",
    "benchmarks/results/speed-summary.md",
    "benchmarks/results/convnet-quality.md",
    "benchmarks/results/gpt-quality.md",
)
"""What the README shows, between markers with their names."""


def insert(text: str, name: str, content: str) -> str:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``. Raises if the markers are missing."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ConfigurationError(f"no markers <!-- {name} --> … <!-- /{name} --> in the text")
    return pattern.sub(lambda match: match[1] + content.strip() + "\n" + match[2], text)


def main() -> None:
    """Insert every table found in the assets directory."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--tables", type=Path, nargs="+", default=list(map(Path, TABLES)))
    options = parser.parse_args()
    text = options.readme.read_text()
    for table in options.tables:
        if table.exists():
            text = insert(text, table.stem, table.read_text())
    options.readme.write_text(text)


if __name__ == "__main__":
    main()
