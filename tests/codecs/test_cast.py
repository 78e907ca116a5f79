"""Cast: which dtype is on the wire."""

import pytest
import torch

from gossamer.codecs import Cast
from gossamer.errors import ConfigurationError

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("wire", "dtypes"),
    [
        ("fp32", {F64: F64, F32: F32, F16: F16, BF16: BF16}),
        ("fp16", {F64: F16, F32: F16, F16: F16, BF16: BF16}),
        ("bf16", {F64: BF16, F32: BF16, F16: F16, BF16: BF16}),
    ],
)
def test_the_wire_is_never_wider(wire: str, dtypes: dict[torch.dtype, torch.dtype]) -> None:
    for dtype, on_the_wire in dtypes.items():
        assert Cast(wire=wire).encode(torch.ones(3, dtype=dtype)).dtype == on_the_wire


def test_full_precision_is_exact() -> None:
    x = torch.randn(100, dtype=F64)
    assert torch.equal(Cast(wire="fp32").decode(Cast(wire="fp32").encode(x), x.numel(), F64), x)


@pytest.mark.parametrize("wire", ["fp8", "FP16", "", None, 16])
def test_an_unknown_wire_is_refused(wire: object) -> None:
    with pytest.raises(ConfigurationError, match="wire must be one of fp32, fp16, bf16"):
        Cast(wire=wire)
