"""Pages that show what ``gossamer simulate`` prints show what it prints now."""

from pathlib import Path

import pytest

from benchmarks.studies.pages import OUTPUTS, with_outputs

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("page", OUTPUTS)
def test_a_page_shows_what_its_commands_print(page: str) -> None:
    text = (ROOT / page).read_text()
    assert "<!-- output -->\n```text\n" in text
    assert with_outputs(text) == text
