"""One decoder layer: attention, then MLP or experts. Projections run over the whole batch, attention by span.

This is the meaning, and what runs on the CPU; fused.py does the same on a GPU.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.attention import causal_attention
from m3agent.kernels.experts import gated_mlp, routed_experts
from m3agent.kernels.linear import linear
from m3agent.kernels.norm_rope import norm_rope
from m3agent.kernels.router import route
from m3agent.kernels.select import block_scores, past_scores, select_blocks, select_past
from m3agent.kernels.sparse_attention import sparse_attention, token_attention
from m3agent.model.batch import Batch, Placed
from m3agent.model.config import TextConfig
from m3agent.model.pages import KVPages
from m3agent.model.weights import AttentionWeights, DenseWeights, LayerWeights, MoeWeights

# Queries that choose their blocks together: neighbours choose alike, so few pages are read for nothing.
SELECT_TILE = 128
# Index scores of one tile, in numbers (64 MiB); a very long context takes smaller tiles.
SCORE_LIMIT = 1 << 24

Rope = tuple[Tensor, Tensor]


def gained_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """Gemma RMSNorm with the gain 1 + weight made beforehand; float32 inside, one cast at the end."""
    return F.rms_norm(x.float(), (x.shape[-1],), gain, eps).to(x.dtype)


def decoder_layer(
    x: Tensor, w: LayerWeights, layer: int, t: TextConfig, rope: Rope, batch: Batch, pages: KVPages
) -> Tensor:
    """x: [tokens, hidden] → the same; writes the tokens' k, v and index keys of this layer into the pages."""
    attended = attention(gained_norm(x, w.attention.norm, t.rms_norm_eps), w.attention, layer, t, rope, batch, pages)
    x = x + linear(attended, w.attention.out)
    return x + mlp(gained_norm(x, w.mlp_norm, t.rms_norm_eps), w.mlp, t)


def mlp(x: Tensor, w: DenseWeights | MoeWeights, t: TextConfig) -> Tensor:
    """x: [tokens, hidden] → the same. MoE: scaled sum of the chosen experts plus the shared one, unscaled."""
    if isinstance(w, DenseWeights):
        return gated_mlp(x, w.gate_up, w.down, t.swiglu_alpha, t.swiglu_limit)
    chosen, weights = route(x, w.router, w.bias, t.num_experts_per_tok)
    weights = weights * t.routed_scaling_factor
    routed = routed_experts(x, chosen, weights, w.gate_up, w.down, t.swiglu_alpha, t.swiglu_limit)
    return routed + gated_mlp(x, w.shared.gate_up, w.shared.down, t.swiglu_alpha, t.swiglu_limit)


def attention(
    x: Tensor, w: AttentionWeights, layer: int, t: TextConfig, rope: Rope, batch: Batch, pages: KVPages
) -> Tensor:
    """x: [tokens, hidden], normed → [tokens, heads · head_dim], before the output projection."""
    return attend(linear(x, w.qkv), w, layer, t, rope, batch, pages)


def attend(
    rows: Tensor, w: AttentionWeights, layer: int, t: TextConfig, rope: Rope, batch: Batch, pages: KVPages
) -> Tensor:
    """rows: [tokens, …], what the fused projection made → [tokens, heads · head_dim]."""
    q, k, v, iq, ik = split_heads(rows, w, t, rope, t.sparse_layers[layer])
    k_pages, v_pages, ik_pages = pages.k[layer], pages.v[layer], pages.ik[layer]
    k_slots, v_slots, ik_slots = pages.slots[layer]
    for p in batch:
        # A batch of one span needs no cutting: a decoded token's few microseconds count.
        here = slice(None) if len(batch) == 1 else slice(p.begin, p.end)
        k_slots[p.slots] = k[here]
        v_slots[p.slots] = v[here]
        if ik is not None and ik_slots is not None:
            ik_slots[p.slots] = ik[here]
    outs: list[Tensor] = []
    for p in batch:
        here = slice(p.begin, p.end)
        if iq is None or ik_pages is None or p.span.end <= t.topk_blocks * t.block_size:
            outs.append(full_span(q[here], k_pages, v_pages, p))
        elif p.end - p.begin == 1:
            outs.append(sparse_token(q[here], iq[p.begin], k_pages, v_pages, ik_pages, p, t))
        else:
            outs.append(sparse_span(q[here], iq[here], k_pages, v_pages, ik_pages, p, t))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


def split_heads(
    rows: Tensor, w: AttentionWeights, t: TextConfig, rope: Rope, sparse: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """q [n, heads, d], k, v [n, kv_heads, d], index q [n, index_heads, e], index k [n, e]: normed and turned."""
    n, d = rows.shape[0], t.head_dim
    heads, kv_heads = t.num_attention_heads, t.num_key_value_heads
    width = w.gain.numel()
    turned = norm_rope(rows[:, :width].view(n, -1, d), w.gain, *rope, t.rms_norm_eps)
    q, k = turned[:, :heads], turned[:, heads : heads + kv_heads]
    v = rows[:, -kv_heads * d :].view(n, kv_heads, d)
    if not sparse:
        return q, k, v, None, None
    if w.index_gain is None:
        index = turned[:, heads + kv_heads :]
    else:
        part = rows[:, width : width + w.index_gain.numel()]
        index = norm_rope(part.view(n, -1, t.index_dim), w.index_gain, *rope, t.rms_norm_eps)
    return q, k, v, index[:, :-1], index[:, -1]


def keys_of(cache: Tensor, p: Placed, tokens: int) -> Tensor:
    """The first `tokens` entries of a span's sequence, [tokens, ...]: a view where its pages stand in a row."""
    first = p.span.first_page
    if first is not None:
        begin = first * cache.shape[1]
        return cache.flatten(0, 1)[begin : begin + tokens]
    count = -(-tokens // cache.shape[1])
    return cache.index_select(0, p.span.table[:count]).flatten(0, 1)[:tokens]


def full_span(q: Tensor, k_pages: Tensor, v_pages: Tensor, p: Placed) -> Tensor:
    """Causal attention of a whole span over everything before it."""
    end = p.span.end
    return causal_attention(q, keys_of(k_pages, p, end), keys_of(v_pages, p, end), p.span.start)


def sparse_token(
    q: Tensor, iq: Tensor, k_pages: Tensor, v_pages: Tensor, ik_pages: Tensor, p: Placed, t: TextConfig
) -> Tensor:
    """Block-sparse attention of one token, which stands beyond what top-k blocks hold. iq: [index_heads, index_dim]."""
    own = p.span.start // t.block_size  # always chosen, so only the whole blocks before it are scored
    scores = past_scores(iq, keys_of(ik_pages, p, own * t.block_size), t.block_size)
    past = select_past(scores, t.topk_blocks - 1, t.local_blocks - 1, t.init_blocks)
    return token_attention(q, k_pages, v_pages, p.span.table, past, p.span.start)


def sparse_span(
    q: Tensor, iq: Tensor, k_pages: Tensor, v_pages: Tensor, ik_pages: Tensor, p: Placed, t: TextConfig
) -> Tensor:
    """Block-sparse attention of a span that reaches beyond what top-k blocks hold.

    Positions below topk · block see everything anyway, so they take the dense path; the rest goes in tiles.
    """
    start, n = p.span.start, q.shape[0]
    outs: list[Tensor] = []
    dense = min(max(t.topk_blocks * t.block_size - start, 0), n)
    if dense:
        seen = start + dense
        outs.append(causal_attention(q[:dense], keys_of(k_pages, p, seen), keys_of(v_pages, p, seen), start))
    ik = keys_of(ik_pages, p, p.span.end)
    tile = max(1, min(SELECT_TILE, SCORE_LIMIT // (t.index_heads * p.span.end)))
    for a in range(dense, n, tile):
        b = min(a + tile, n)
        scores = block_scores(iq[a:b], ik[: start + b], start + a, t.block_size)
        selected = select_blocks(scores, start + a, t.block_size, t.topk_blocks, t.local_blocks, t.init_blocks)
        table = p.span.table[: scores.shape[-1]]
        outs.append(sparse_attention(q[a:b], k_pages, v_pages, table, selected, start + a))
    return outs[0] if len(outs) == 1 else torch.cat(outs)
