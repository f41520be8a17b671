"""MXFP8: 8-bit floats (e4m3) in blocks of 32 along the input axis, each block with a power of two as its scale.

Layout of the release: values float8_e4m3fn [out, in]; scales uint8 [out, in / 32], an exponent biased by 127;
weight = value · 2^(scale − 127). (OCP Microscaling Formats 1.0, with the scale rounded up so that nothing saturates.)
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 32
LARGEST = 448.0  # of e4m3fn
NAN_SCALE = 255  # what the format keeps for "not a number"


def quantize_mxfp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [..., in], finite, `in` a multiple of 32 → values float8_e4m3fn [..., in], scales uint8 [..., in / 32].

    The exponent of a block is ceil(log2(max|w| / 448)); max|w| counts as the smallest normal float32 at least.
    Raises ValueError for another width or for numbers that are not finite.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"the last dimension is {weight.shape[-1]}; MXFP8 needs a multiple of {BLOCK}")
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    peak = blocks.abs().amax(-1)
    if not bool(peak.isfinite().all()):
        raise ValueError("weights that are not finite cannot be quantised")
    fraction, exponent = torch.frexp(peak.clamp(min=torch.finfo(torch.float32).tiny))  # peak = fraction · 2^exponent
    # 448 = 0.875 · 2^9, so peak / 448 <= 2^(exponent - 9) exactly when fraction <= 0.875.
    power = exponent - 9 + (fraction > LARGEST / 512)
    scales = (power + 127).clamp_(0, 254)
    values = _scaled(blocks, (127 - scales).unsqueeze(-1))
    return values.flatten(-2).to(torch.float8_e4m3fn), scales.to(torch.uint8)


def dequantize_mxfp8(values: Tensor, scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The inverse: values float8_e4m3fn [..., in], scales uint8 [..., in / 32] → [..., in]. Exact in float32."""
    blocks = values.float().unflatten(-1, (-1, BLOCK))
    return _scaled(blocks, (scales.int() - 127).unsqueeze(-1)).flatten(-2).to(dtype)


def _scaled(x: Tensor, power: Tensor) -> Tensor:
    """x · 2^power in two halves, since a single factor would leave float32's range."""
    half = power // 2
    return torch.ldexp(torch.ldexp(x, half), power - half)
