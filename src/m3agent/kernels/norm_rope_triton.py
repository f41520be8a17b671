"""Heads on their way into the pages, in Triton: norm, rotation and the writing of k, v and the index key in one pass.

`norm_rope.py` has the meaning of norm and rotation.
"""

# Triton's launch options are not known to type checkers.
# pyright: reportCallIssue=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Heads:
    """How a projected row is cut: [q | k | index q | index k | v], all heads of one width; dense layers: index is 0."""

    q: int
    kv: int
    index: int
    width: int

    @property
    def row(self) -> int:
        return (self.q + 2 * self.kv + (self.index + 1 if self.index else 0)) * self.width


@triton.jit
def _heads_to_pages(
    rows, gain, cos, sin, positions, slots, q_out, iq_out, k_pages, v_pages, ik_pages, eps,
    Q: tl.constexpr, KV: tl.constexpr, INDEX: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Program (token, head)."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    normed: tl.constexpr = Q + KV + (INDEX + 1 if INDEX > 0 else 0)
    channel = tl.arange(0, WIDTH)
    row = rows + (token * (normed + KV) + head) * WIDTH
    x = tl.load(row + channel)
    slot = tl.load(slots + token).to(tl.int64)
    if head >= normed:
        tl.store(v_pages + (slot * KV + head - normed) * WIDTH + channel, x)
    else:
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide) / WIDTH + eps)
        y = wide * scale * tl.load(gain + head * WIDTH + channel)
        # The channel that this one turns with, read once more: it is in the cache.
        turns = channel < ROTARY
        other = tl.where(channel < ROTARY // 2, channel + ROTARY // 2, channel - ROTARY // 2)
        partner = tl.load(row + other, mask=turns, other=0.0).to(tl.float32) * scale
        partner *= tl.load(gain + head * WIDTH + other, mask=turns, other=0.0)
        angle = tl.load(positions + token).to(tl.int64) * ROTARY + channel
        y = y * tl.load(cos + angle, mask=turns, other=1.0) + partner * tl.load(sin + angle, mask=turns, other=0.0)
        y = y.to(x.dtype)
        if head < Q:
            tl.store(q_out + (token * Q + head) * WIDTH + channel, y)
        elif head < Q + KV:
            tl.store(k_pages + (slot * KV + head - Q) * WIDTH + channel, y)
        elif head < Q + KV + INDEX:
            tl.store(iq_out + (token * INDEX + head - Q - KV) * WIDTH + channel, y)
        else:
            tl.store(ik_pages + slot * WIDTH + channel, y)


def heads_to_pages(
    rows: Tensor, gain: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, slots: Tensor, heads: Heads,
    k_pages: Tensor, v_pages: Tensor, ik_pages: Tensor | None, eps: float,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Queries [n, q, width] and index queries [n, index, width], normed and turned; keys and values go into the pages.

    rows: [n, heads.row], contiguous; gain: [normed heads, width] float32; cos, sin: the tables of `paired_rope_table`
    for all positions, [positions, 1, rotary]; positions, slots: [n] integers, a slot being page · block + offset;
    k_pages, v_pages: [pages, block, kv, width]; ik_pages: [pages, block, width].
    """
    n = rows.shape[0]
    q = rows.new_empty(n, heads.q, heads.width)
    iq = rows.new_empty(n, heads.index, heads.width) if heads.index else None
    _heads_to_pages[(n, heads.row // heads.width)](
        rows, gain, cos, sin, positions, slots, q, q if iq is None else iq, k_pages, v_pages,
        k_pages if ik_pages is None else ik_pages, eps,
        heads.q, heads.kv, heads.index, heads.width, cos.shape[-1], num_warps=1,
    )  # fmt: skip
    return q, iq


def supports(rows: Tensor, heads: Heads) -> bool:
    """Half precision, and a head width that is a power of two."""
    return rows.dtype in (torch.bfloat16, torch.float16) and heads.width & (heads.width - 1) == 0
