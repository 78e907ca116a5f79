"""docs/shuffle.md, executed: alone and among three workers."""

import re
from pathlib import Path
from typing import Any

import pytest

from gossamer import loopback
from gossamer.data.options import Options

PAGE = (Path(__file__).parents[2] / "docs" / "shuffle.md").read_text()
SNIPPETS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("world", [1, 3])
def test_the_snippets_run_one_after_the_other(world: int) -> None:
    def body(rank: int) -> int:
        namespace: dict[str, Any] = {}
        for snippet in SNIPPETS:
            exec(compile(snippet, "docs/shuffle.md", "exec"), namespace)
        return len(namespace["shuffle"])

    assert len(SNIPPETS) == 3
    assert loopback(body, world) == [4] * world


def test_the_page_tells_of_every_option() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(True|False)` \|", PAGE, re.MULTILINE)
    assert {name for name, _ in rows} == set(Options.__dataclass_fields__) - {"batch_size", "seed"}
    assert {name for name, default in rows if default == "True"} == {"shuffle"}
