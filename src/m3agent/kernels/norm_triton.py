"""The residual sum and the Gemma RMSNorm after it in one pass over memory, in Triton. `norm.py` has the meaning."""

# Triton's launch options are not known to type checkers.
# pyright: reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, delta, gain, total, out, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * WIDTH
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    values = tl.load(x + row + columns, mask=inside, other=0.0)
    if ADD:
        more = tl.load(delta + row + columns, mask=inside, other=0.0)
        values = (values.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row + columns, values, mask=inside)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
    wide = wide * scale * tl.load(gain + columns, mask=inside, other=0.0)
    tl.store(out + row + columns, wide.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, delta: Tensor | None, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + delta, its norm), the sum rounded to x's dtype first; without delta, x itself and its norm.

    x, delta: [n, width]; gain: [width] float32, already 1 + weight.
    """
    n, width = x.shape
    out = torch.empty_like(x)
    total = x if delta is None else torch.empty_like(x)
    block = triton.next_power_of_2(width)
    _add_norm[(n,)](
        x, x if delta is None else delta, gain, total, out, eps, width, block, delta is not None,
        num_warps=min(max(block // 1024, 1), 8),
    )  # fmt: skip
    return total, out
