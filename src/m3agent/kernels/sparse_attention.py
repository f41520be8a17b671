"""Block-sparse attention over pages: each KV head's queries see only the blocks that its index head chose."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.attention import grouped_attention


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, selected: Tensor, start: int) -> Tensor:
    """Attention of query i (position start + i) over the keys j ≤ start + i of its selected blocks.

    q: [n, heads, d]; k, v: [pages, block, kv_heads, d]; table: [blocks] page of each block, the last query's own last;
    selected: [n, kv_heads, width] block ids, −1 for none. Neither blocks that no query chose are read, nor what lies
    behind the last query: other sequences have left their keys there. Returns [n, heads, d].
    """
    n, kv_heads, _ = selected.shape
    block, blocks = k.shape[1], table.shape[0]
    positions = torch.arange(start, start + n, device=q.device)
    own = (positions // block)[:, None, None]
    ids = torch.where(selected < 0, own, selected)  # the own block is always among them: naming it twice is no harm
    keep = torch.zeros(n, kv_heads, blocks, dtype=torch.bool, device=q.device).scatter_(-1, ids, True)
    used = keep.flatten(0, 1).any(0).nonzero().squeeze(1)  # [u] blocks that some query wants
    length = (used.shape[0] - blocks) * block + start + n  # the last query's own block is the last one used
    keys = (used[:, None] * block + torch.arange(block, device=q.device)).flatten()[:length]  # positions
    visible = keys <= positions[:, None]  # [n, length]
    mask = keep[:, :, keys // block].transpose(0, 1) & visible  # [kv_heads, n, length]
    pages = table[used]
    return grouped_attention(q, k[pages].flatten(0, 1)[:length], v[pages].flatten(0, 1)[:length], mask)


def token_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor, past: Tensor, position: int) -> Tensor:
    """Decoding: attention of one token over the chosen blocks before its own, and over its own up to itself.

    q: [1, heads, d]; k, v, table: as above; past: [kv_heads, width] block ids. Just the chosen keys of each head are
    gathered. The own block comes last, and what lies behind the token is cut off: no mask is needed.
    """
    _, block, kv_heads, d = k.shape
    ids = F.pad(past, (0, 1), value=position // block)
    length = past.shape[1] * block + position % block + 1
    first = table.take(ids).mul_(block * kv_heads).unsqueeze(-1)  # [kv_heads, width + 1, 1]
    rows = (first + _rows_of_a_block(kv_heads, block, q.device)).flatten(1)[:, :length].flatten()
    chosen_k, chosen_v = (x.view(-1, d).index_select(0, rows).view(1, kv_heads, length, d) for x in (k, v))
    out = F.scaled_dot_product_attention(q.view(1, kv_heads, -1, d), chosen_k, chosen_v)
    return out.reshape(1, -1, d)


@lru_cache(maxsize=8)
def _rows_of_a_block(kv_heads: int, block: int, device: torch.device) -> Tensor:
    """Where each head's keys lie from the first row of a page on, [kv_heads, 1, block]."""
    heads = torch.arange(kv_heads, device=device)[:, None, None]
    return torch.arange(block, device=device) * kv_heads + heads
