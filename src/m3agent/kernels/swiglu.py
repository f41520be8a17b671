"""SwiGLU-OAI: (u + 1) · g · sigmoid(alpha · g), the gate clamped from above only, the up half on both sides."""

from __future__ import annotations

import torch
from torch import Tensor


def swiglu_oai(gate: Tensor, up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate, up: the two halves of the projection, same shape; returns that shape."""
    gate = gate.clamp(max=limit)
    up = up.clamp(min=-limit, max=limit)
    gate = gate * torch.sigmoid(alpha * gate)
    return torch.addcmul(gate, up, gate)  # up · gate + gate
