"""Per-head Gemma RMSNorm and rotary embedding in one go, for all heads of q, k and the index branch together."""

from __future__ import annotations

import torch
from torch import Tensor

from m3agent.kernels.rope import rope_table


def paired_rope_table(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos twice and (−sin, sin), each [tokens, 1, rotary_dim] in float32: out = x · cos + swap(x) · sin."""
    cos, sin = rope_table(positions, rotary_dim, theta)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def norm_rope(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """x: [tokens, heads, d]; gain: [heads, d] float32, already 1 + weight; cos, sin: as from `paired_rope_table`.

    The same as `gemma_rms_norm` followed by `apply_rope`, in float32 throughout with one cast at the end.
    """
    rotary = cos.shape[-1]
    y = x.float()
    y = (y * y.square().mean(-1, keepdim=True).add_(eps).rsqrt_()).mul_(gain)  # for few rows half F.rms_norm's time
    turning = y[..., :rotary]
    swapped = turning.roll(rotary // 2, -1)
    turning.mul_(cos).addcmul_(swapped, sin)
    return y.to(x.dtype)
