"""Attention of the vision tower: every patch sees all patches of its own segment and nothing else."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """q, k, v: [n, heads, d], segments in a row with these lengths (sum n). Returns [n, heads, d]."""
    if len(set(lengths)) == 1:  # equal segments: one batched call
        q, k, v = (x.view(len(lengths), lengths[0], *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
    outs = [
        F.scaled_dot_product_attention(_headwise(a), _headwise(b), _headwise(c)).squeeze(0).transpose(0, 1)
        for a, b, c in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    ]
    return torch.cat(outs)


def _headwise(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)  # [1, heads, n, d]
