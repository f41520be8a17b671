"""Rotary position embedding, half-split (NeoX): channel i turns with channel i + r/2; the rest passes."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_table(positions: Tensor, rotary_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin in float32, each [tokens, rotary_dim / 2], for integer positions [tokens]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=positions.device) / rotary_dim
    angles = positions.float()[:, None] * (theta**-exponents)  # [tokens, rotary_dim / 2]
    return angles.cos(), angles.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the first 2 · cos.shape[-1] channels of x [..., heads, channels]; cos, sin: [..., half]."""
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)  # [..., 1, half]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)
