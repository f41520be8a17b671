"""x · Wᵀ for few rows and for many: where a weight's bytes lie, and which library multiplies, decide the speed."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many rows on, float32 on the CPU goes through oneDNN, which on non-Intel processors is twice as fast as MKL.
MANY_ROWS = 64
ONEDNN = torch.backends.mkldnn.is_available()


def input_major(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty weight [..., out, in] for `linear`.

    In float32 on the CPU one input's weights for all outputs are adjacent: one row times the matrix then runs through
    memory in long stretches, a third faster than by dot products. Elsewhere the layout is the usual one.
    """
    if dtype is torch.float32 and device.type == "cpu" and len(shape) > 1:
        *batch, rows, columns = shape
        return torch.empty(*batch, columns, rows, dtype=dtype).transpose(-2, -1)
    return torch.empty(shape, dtype=dtype, device=device)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x: [n, in]; weight: [out, in]; bias: [out], of x's dtype. Returns [n, out].

    On the CPU a float16 weight may meet a float32 x. A single row is then rounded to float16 (sums stay float32), which
    reads the weight at twice float32's speed; several rows, and one that leaves float16's range, are multiplied in
    float32 by the widened weight.
    """
    if x.dtype is not torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    if weight.dtype is torch.float16:
        if x.shape[0] == 1:
            out = F.linear(x.half(), weight).float()
            if math.isfinite(out.sum().item()):  # one number tells of all: halves cannot add up to an infinity
                return out if bias is None else out.add_(bias)
        weight = weight.float()
    if x.shape[0] >= MANY_ROWS and ONEDNN:
        return F.linear(x.to_mkldnn(), weight, bias).to_dense()
    return F.linear(x, weight, bias)
