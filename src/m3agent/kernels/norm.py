"""Gemma RMSNorm: the stored weight is the offset from one; float32 inside, one cast at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """y = x · rsqrt(mean(x²) + eps) · (1 + weight), over the last dimension. x: [..., n], weight: [n]."""
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * scale * (1.0 + weight.float())).to(x.dtype)
