"""docs/codecs.md: every codec is in the table, with the bytes and the bias that it has."""

import inspect
import re
from pathlib import Path

import pytest
import torch

from gossamer import codecs
from gossamer.codecs import Codec

PAGE = Path(__file__).parents[2] / "docs" / "codecs.md"
ROWS = re.findall(r"^\| `(\w+\(.*?\))` \| ([\d.]+) \| (yes|no) \|", PAGE.read_text(), re.MULTILINE)
NUMEL = 2**20


@pytest.mark.parametrize(("source", "size", "unbiased"), ROWS)
def test_a_row_says_what_the_codec_does(source: str, size: str, unbiased: str) -> None:
    codec = eval(source, vars(codecs).copy())
    assert f"{codec.encode(torch.empty(NUMEL, device='meta')).nbytes / NUMEL:.3f}" == size
    assert ("yes" if codec.unbiased else "no") == unbiased


def test_every_codec_has_a_row() -> None:
    public = {name for name in codecs.__all__ if inspect.isclass(cls := getattr(codecs, name)) and issubclass(cls, Codec)}
    assert {source.split("(")[0] for source, _, _ in ROWS} == public - {"Codec", "Sparse"}
