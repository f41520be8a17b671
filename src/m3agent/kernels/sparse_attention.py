"""Block-sparse attention over pages: each KV head's queries see only the blocks that its index head chose."""

from __future__ import annotations

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
    if n == 1:
        return _one_token(q, k, v, table, selected[0], start)
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


def _one_token(q: Tensor, k: Tensor, v: Tensor, table: Tensor, selected: Tensor, position: int) -> Tensor:
    """Decoding: gather just the chosen keys of each head. selected: [kv_heads, width], the last token's, so without −1.

    In rising order the own block comes last, and what lies behind the token is cut off: no mask is needed.
    """
    _, block, kv_heads, d = k.shape
    ids = selected.sort(-1).values
    length = ids.shape[1] * block - (block - 1 - position % block)
    keys = (table[ids] * block).unsqueeze(-1) + torch.arange(block, device=q.device)  # [kv_heads, width, block] slots
    heads = torch.arange(kv_heads, device=q.device).unsqueeze(-1)
    rows = (keys.flatten(1)[:, :length] * kv_heads + heads).flatten()
    chosen_k, chosen_v = (x.view(-1, d).index_select(0, rows).view(1, kv_heads, length, d) for x in (k, v))
    out = F.scaled_dot_product_attention(q.view(1, kv_heads, -1, d), chosen_k, chosen_v)
    return out.reshape(1, -1, d)
