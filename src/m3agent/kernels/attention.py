"""Causal attention of grouped query heads over the keys of one sequence."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

# A mask costs rows · keys numbers; queries go in tiles that keep it below this (in numbers, 64 MiB of float32).
MASK_LIMIT = 1 << 24


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q·kᵀ/√d)·v. q: [n, heads, d]; k, v: [t, kv_heads, d]; mask: bool, broadcast to [kv_heads, n, t].

    KV head g serves query heads g·r to g·r + r − 1. Returns [n, heads, d].
    """
    n, heads, d = q.shape
    t, kv_heads, _ = k.shape
    group = heads // kv_heads
    if n == 1 and not causal:  # the heads of a group are so many queries to the same keys
        rows = q.view(1, kv_heads, group, d)
        out = F.scaled_dot_product_attention(
            rows, k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0), None if mask is None else mask[None]
        )
        return out.reshape(1, heads, d)
    rows = q.view(n, kv_heads, group, d).permute(1, 2, 0, 3)  # [kv_heads, group, n, d]
    keys = k.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, t, d)
    values = v.transpose(0, 1).unsqueeze(1).expand(kv_heads, group, t, d)
    mask = None if mask is None else mask.unsqueeze(1)
    out = F.scaled_dot_product_attention(rows, keys, values, mask, is_causal=causal)
    return out.permute(2, 0, 1, 3).reshape(n, heads, d)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Query i stands at position start + i and sees keys 0 to start + i. q: [n, heads, d]; k, v: [start + n, ...]."""
    n = q.shape[0]
    if n == 1:
        return grouped_attention(q, k, v)
    if start == 0:
        return grouped_attention(q, k, v, causal=True)
    tile = max(1, MASK_LIMIT // k.shape[0])
    outs: list[Tensor] = []
    for a in range(0, n, tile):
        b = min(a + tile, n)
        seen = start + b
        mask = torch.ones(b - a, seen, dtype=torch.bool, device=q.device).tril_(start + a)
        outs.append(grouped_attention(q[a:b], k[:seen], v[:seen], mask.unsqueeze(0)))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
