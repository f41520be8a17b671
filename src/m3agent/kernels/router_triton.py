"""The router's choice in one pass, in Triton: sigmoid, bias, top-k, weights. `router.py` has the meaning."""

# Triton's launch options and loops are not known to type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _choose(logits, bias, chosen, weights, scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, K: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    inside = expert < EXPERTS
    scores = 1.0 / (1.0 + tl.exp(-tl.load(logits + token * EXPERTS + expert, mask=inside, other=0.0)))
    left = tl.where(inside, scores + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
    total = 0.0
    for place in tl.static_range(K):
        best = tl.argmax(left, 0, tie_break_left=True)
        score = tl.sum(tl.where(expert == best, scores, 0.0))
        tl.store(chosen + token * K + place, best.to(tl.int64))
        tl.store(weights + token * K + place, score)
        total += score
        left = tl.where(expert == best, float("-inf"), left)
    tl.debug_barrier()
    place = tl.arange(0, triton.next_power_of_2(K))
    share = tl.load(weights + token * K + place, mask=place < K)
    tl.store(weights + token * K + place, share / total * scale, mask=place < K)


def choose(logits: Tensor, bias: Tensor, count: int, scale: float) -> tuple[Tensor, Tensor]:
    """Chosen experts [n, count] int64, of equal scores the lower one, and weights [n, count] that sum to `scale`.

    logits: [n, experts] float32; bias: [experts] float32.
    """
    n, experts = logits.shape
    chosen = torch.empty(n, count, dtype=torch.int64, device=logits.device)
    weights = torch.empty(n, count, dtype=torch.float32, device=logits.device)
    _choose[(n,)](logits, bias, chosen, weights, scale, experts, triton.next_power_of_2(experts), count, num_warps=1)
    return chosen, weights
