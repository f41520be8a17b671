"""SwiGLU-OAI over rows that hold both halves, in one pass, in Triton. `swiglu.py` has the meaning."""

# Triton's launch options are not known to type checkers.
# pyright: reportCallIssue=false
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from m3agent.kernels.experts_triton import swiglu


@triton.jit
def _swiglu_rows(rows, out, alpha, limit, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(rows + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, swiglu(gate, up, alpha, limit).to(out.dtype.element_ty), mask=inside)


def swiglu_rows(rows: Tensor, alpha: float, limit: float) -> Tensor:
    """rows: [n, 2 · width], gate first, contiguous → [n, width]."""
    n, width = rows.shape[0], rows.shape[1] // 2
    out = rows.new_empty(n, width)
    block = min(1024, triton.next_power_of_2(width))
    _swiglu_rows[(n, triton.cdiv(width, block))](rows, out, alpha, limit, width, block, num_warps=4)
    return out
