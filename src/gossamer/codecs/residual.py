"""Residual: what was not sent, in the type in which it is kept."""

import torch
from torch import Tensor

from gossamer.codecs.kernels import as_kept, chunk_norms, is_kept_so, kernels_for, single
from gossamer.codecs.wire import limited, narrow_into


def keep(values: Tensor, out: Tensor, seed: int) -> None:
    """Write what remains to where it is kept, flat tensors both, in the type of that.

    To bfloat16 it is rounded up or down at random (``seed``), so that nothing is lost on average: rounded to the nearest
    number, a large remainder of which a little is sent in every step would stay as it is for ever. To fp16 it is rounded to
    the nearest. What is too large is kept as the largest number that there is: one worker alone must not come to inf, for
    which all would have to forget this step.
    """
    if out.dtype == torch.bfloat16 != values.dtype and is_kept_so(out):
        if values.dtype == torch.float64:
            values = limited(values, torch.finfo(torch.float32).max)
        kernels_for(out.device).narrow(single(values), out, seed)
    elif out.dtype.itemsize < values.dtype.itemsize:
        narrow_into(out, values)
    else:
        out.copy_(values)


def rounded(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Flat values in this type, as :func:`keep` writes them: themselves, if they have it."""
    if values.dtype == dtype:
        return values
    out = torch.empty_like(values, dtype=dtype)
    keep(values, out, seed)
    return out


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    """Write ``x + residual`` to ``out`` by :func:`keep`. ``out`` may be ``x``.

    Returns ``float32[ceil(n/chunk)]``: the L1 norms of x + residual + x, by chunk, which chunks will have next time if nothing
    of them is sent and as much is added again. In one pass where ``x`` is contiguous fp32, and ``out`` that or bfloat16.
    """
    if x.dtype == torch.float32 and x.is_contiguous() and is_kept_so(out):
        return kernels_for(x.device).accumulate(x, as_kept(residual), chunk, seed, out)
    after = x + residual
    norms = chunk_norms(after, x, chunk)
    keep(after, out, seed)
    return norms


def add_to(residual: Tensor, more: Tensor, seed: int) -> None:
    """Add to what is kept, a view of any strides without gaps, in the precision of ``more``."""
    if residual.dtype.itemsize >= more.dtype.itemsize:
        residual.add_(more)
        return
    memory = residual.as_strided((residual.numel(),), (1,))
    unsent = memory.to(more.dtype)
    unsent.as_strided(residual.shape, residual.stride()).add_(more)
    keep(unsent, memory, seed)
