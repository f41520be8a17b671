"""How many floating-point operations tokens cost: two for each multiply and add of the matrix products.

Projections, experts that are used, index scores and attention over the keys that are read; norms and the like are left
out, as is usual. The head counts once a row of logits.
"""

from __future__ import annotations

from m3agent.model.config import TextConfig


def span_flops(t: TextConfig, start: int, tokens: int, logits: int = 1) -> int:
    """Of `tokens` tokens that stand at position `start` and on, and of so many rows of logits behind them."""
    hidden, d = t.hidden_size, t.head_dim
    heads, kv = t.num_attention_heads, t.num_key_value_heads
    seen = tokens * start + tokens * (tokens + 1) // 2  # keys that full attention reads, over all the tokens
    chosen = t.topk_blocks * t.block_size
    short = min(max(chosen - start, 0), tokens)  # tokens that see no more than that
    read = short * start + short * (short + 1) // 2 + (tokens - short) * chosen
    total = logits * hidden * t.vocab_size
    for sparse, moe in zip(t.sparse_layers, t.moe_layers, strict=True):
        total += tokens * hidden * d * (2 * heads + 2 * kv)
        total += 2 * heads * d * (read if sparse else seen)
        if sparse:
            total += tokens * hidden * t.index_dim * (t.index_heads + 1) + t.index_heads * t.index_dim * seen
        if moe:
            inner = t.num_experts_per_tok * t.intermediate_size + t.shared_intermediate_size
            total += tokens * hidden * (3 * inner + t.num_local_experts)
        else:
            total += tokens * hidden * 3 * t.dense_intermediate_size
    return 2 * total
