"""x · Wᵀ for few rows and for many: where a weight's bytes lie, and which library multiplies, decide the speed."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# From this many rows on, float32 on the CPU goes through oneDNN, which on non-Intel processors is twice as fast as MKL.
MANY_ROWS = 64
ONEDNN = torch.backends.mkldnn.is_available()


@dataclass(frozen=True)
class HalfMatrix:
    """A float16 weight [out, in] on the CPU, held twice: as it is, and in the order in which FBGEMM reads it."""

    values: Tensor
    packed: Tensor  # a handle of FBGEMM's, for `torch.fbgemm_linear_fp16_weight_fp32_activation` only


Matrix = Tensor | HalfMatrix


def _fbgemm_multiplies() -> bool:
    """Whether this torch and this processor have FBGEMM's product of float32 rows and float16 weights.

    torch means to remove it some day and says so once, here, where nobody can do anything about it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            packed = torch.fbgemm_pack_gemm_matrix_fp16(torch.ones(1, 1))
            return torch.fbgemm_linear_fp16_weight_fp32_activation(torch.ones(1, 1), packed, None).item() == 1.0
        except (AttributeError, RuntimeError, TypeError):
            return False


FBGEMM = _fbgemm_multiplies()


def for_few_rows(weight: Tensor) -> Matrix:
    """A weight [out, in] that `linear` multiplies by few rows faster, if there is a way; else the weight itself."""
    if FBGEMM and weight.dtype is torch.float16 and weight.device.type == "cpu":
        return HalfMatrix(weight, torch.fbgemm_pack_gemm_matrix_fp16(weight.float()))
    return weight


def input_major(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty weight [..., out, in] for `linear`.

    In float32 on the CPU one input's weights for all outputs are adjacent: one row times the matrix then runs through
    memory in long stretches, a third faster than by dot products. Elsewhere the layout is the usual one.
    """
    if dtype is torch.float32 and device.type == "cpu" and len(shape) > 1:
        *batch, rows, columns = shape
        return torch.empty(*batch, columns, rows, dtype=dtype).transpose(-2, -1)
    return torch.empty(shape, dtype=dtype, device=device)


def linear(x: Tensor, weight: Matrix, bias: Tensor | None = None) -> Tensor:
    """x: [n, in]; weight: [out, in]; bias: [out], of x's dtype. Returns [n, out].

    On the CPU a float16 weight may meet a float32 x. Few rows times a `HalfMatrix` are multiplied in float32 while the
    weight is read as float16, at several times the speed. Times a plain float16 weight, a single row is rounded to
    float16 (sums stay float32); everything else, and a row that leaves float16's range, is multiplied in float32 by
    the widened weight.
    """
    if isinstance(weight, HalfMatrix):
        if x.shape[0] < MANY_ROWS:
            return torch.fbgemm_linear_fp16_weight_fp32_activation(x, weight.packed, bias)
        weight = weight.values
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
