"""The likeliest token of each row of logits and the mass of the whole row, in one launch, in Triton."""

# Triton's launch options and loops are not known to type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs a row: enough of them for a single one to be read at the memory's speed.
SPLITS = 64


@triton.jit
def _best(rows, arrivals, parts, out, width, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, split); the last one of a row to arrive joins the parts: peak, its first place, Σ exp(x - peak)."""
    row, split = tl.program_id(0), tl.program_id(1)
    share = tl.cdiv(tl.cdiv(width, BLOCK), SPLITS)
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    for step in range(share):
        column = (split * share + step) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(rows + row.to(tl.int64) * width + column, mask=column < width, other=-float("inf"))
        place = tl.where(x > top, column, place)
        new_top = tl.maximum(top, x)
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)
        mass = mass * tl.exp(top - safe) + tl.exp(x - safe)
        top = new_top
    peak = tl.max(top, 0)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    first = tl.min(tl.where(top == peak, place, width), 0)
    at = parts + (row * SPLITS + split) * 3
    tl.store(at, peak)
    tl.store(at + 1, first.to(tl.float32))
    tl.store(at + 2, tl.sum(mass * tl.exp(top - safe), 0))
    tl.debug_barrier()  # the parts before the one that counts
    if tl.atomic_add(arrivals + row, 1, sem="acq_rel") == SPLITS - 1:
        every = parts + (row * SPLITS + tl.arange(0, SPLITS)) * 3
        peaks = tl.load(every, cache_modifier=".cg")
        best = tl.max(peaks, 0)
        total = tl.sum(tl.load(every + 2, cache_modifier=".cg") * tl.exp(peaks - best), 0)
        tl.store(out + row * 3, best + tl.log(total))
        tl.store(out + row * 3 + 1, best)
        tl.store(out + row * 3 + 2, tl.min(tl.where(peaks == best, tl.load(every + 1, cache_modifier=".cg"), 3e38), 0))


def best_of_rows(rows: Tensor) -> Tensor:
    """rows: [n, vocab] float32, contiguous → [n, 3]: log Σ exp (NaN for rows that hold NaN or +∞), the largest number,
    its first place.
    """
    n, width = rows.shape
    arrivals = torch.zeros(n, dtype=torch.int32, device=rows.device)
    parts, out = rows.new_empty(n, SPLITS, 3), rows.new_empty(n, 3)
    _best[(n, SPLITS)](rows, arrivals, parts, out, width, SPLITS, 1024, num_warps=4)
    return out
