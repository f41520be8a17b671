"""The index branch of MSA: score every earlier key, keep the best blocks of keys for each query."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def block_scores(iq: Tensor, ik: Tensor, start: int, block: int) -> Tensor:
    """max over a block's visible keys of iq·ik, in float32, unscaled; −inf for blocks that lie in the future.

    iq: [n, heads, d], query i at position start + i; ik: [t, d], shared by the heads. Returns [n, heads, blocks].
    """
    n, heads, d = iq.shape
    t = ik.shape[0]
    scores = (iq.float().reshape(n * heads, d) @ ik.float().T).view(n, heads, t)
    future = torch.ones(n, t, dtype=torch.bool, device=iq.device).triu_(start + 1)
    scores.masked_fill_(future.unsqueeze(1), float("-inf"))
    blocks = -(-t // block)
    if blocks * block > t:
        scores = F.pad(scores, (0, blocks * block - t), value=float("-inf"))
    return scores.view(n, heads, blocks, block).amax(-1)


def select_blocks(scores: Tensor, start: int, block: int, topk: int, local: int = 1, initial: int = 0) -> Tensor:
    """The ids of each query's blocks by falling score: [n, heads, min(topk, blocks)], −1 where there are no more.

    The query's own block and the local − 1 before it always come first, then the first `initial` blocks; of equal
    scores the lower block wins. scores: [n, heads, blocks] from `block_scores`; changed in place.
    """
    n, heads, blocks = scores.shape
    own = torch.arange(start, start + n, device=scores.device) // block  # [n]
    if initial:
        first = torch.arange(min(initial, blocks), device=scores.device)
        reached = (first <= own[:, None])[:, None, :].expand(n, heads, -1)
        scores[..., : first.shape[0]].masked_fill_(reached, torch.finfo(scores.dtype).max)
    near = (own[:, None] - torch.arange(local, device=scores.device)).clamp_(min=0)  # [n, local]
    scores.scatter_(-1, near[:, None, :].expand(n, heads, local), float("inf"))
    ranked, ids = scores.sort(dim=-1, descending=True, stable=True)
    width = min(topk, blocks)
    return ids[..., :width].masked_fill(ranked[..., :width] == float("-inf"), -1)


def past_scores(iq: Tensor, ik: Tensor, block: int) -> Tensor:
    """`block_scores` of a single query over whole blocks before its own: nothing to hide, nothing to fill up.

    iq: [heads, d]; ik: [blocks · block, d]. Returns [heads, blocks].
    """
    return (iq.float() @ ik.float().T).view(iq.shape[0], -1, block).amax(-1)


def select_past(scores: Tensor, count: int, local: int = 0, initial: int = 0) -> Tensor:
    """What `select_blocks` chooses for one query beside its own block: [heads, count] block ids.

    scores: [heads, blocks] from `past_scores`, more blocks than `count`; changed in place. local: how many blocks
    just before the own one always come first.
    """
    blocks = scores.shape[1]
    if initial:
        scores[:, :initial] = torch.finfo(scores.dtype).max
    if local:
        scores[:, blocks - local :] = float("inf")
    ranked, ids = scores.topk(count + 1)
    if bool((ranked[:, count - 1] == ranked[:, count]).any()):  # topk breaks ties anyhow, here the lower block wins
        ids = scores.sort(dim=-1, descending=True, stable=True).indices
    return ids[:, :count]
