"""docs/optim.md, executed; and docs/reference.md: every optimizer, every option and every error is named."""

import re
from pathlib import Path

import gossamer
from gossamer import errors, optim

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "optim.md").read_text()


def test_the_page_runs() -> None:
    (snippet,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    namespace: dict[str, object] = {}
    exec(compile(snippet, "docs/optim.md", "exec"), namespace)
    replica = namespace["replica"]
    assert isinstance(replica, gossamer.Replica)
    assert replica.step == 3


def test_every_optimizer_is_on_the_page() -> None:
    assert [name for name in optim.__all__ if f"`{name}(" not in PAGE] == []


def test_every_error_and_every_option_is_in_the_reference() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text()
    names = [name for name, value in vars(errors).items() if isinstance(value, type)]
    assert [name for name in names if f"`{name}`" not in reference and f"gossamer.{name}`" not in reference] == []
    options = [name for name in gossamer.replicate.__kwdefaults__ if f"`{name}=" not in reference]
    assert options == []
