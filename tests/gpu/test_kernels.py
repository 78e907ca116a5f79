"""On a real GPU: triton's kernels do what the reference does on the host, and so do the codecs that use them."""

from collections.abc import Callable

import pytest
import torch

from gossamer.codecs import Codec
from gossamer.codecs.kernels import Kernels, kernels_for, kernels_named

from ..codecs.parity import CODECS, LAWS, a_codec_is_the_same

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_they_are_chosen() -> None:
    assert kernels_for(torch.device("cuda", torch.cuda.current_device())) is kernels_named("cuda")


@pytest.mark.parametrize(("law", "count"), LAWS, ids=lambda value: getattr(value, "__name__", ""))
def test_law(law: Callable[[Kernels, int, str], None], count: int) -> None:
    law(kernels_named("cuda"), count // 7, "cuda")


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_codec_is_the_same(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    a_codec_is_the_same(kernels_named("cuda"), codec, monkeypatch, "cuda")
