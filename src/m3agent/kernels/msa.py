"""MiniMax Sparse Attention and full attention over pages on a GPU: when Triton takes over, and with which settings.

The meaning is `select.py` with `sparse_attention.py`, and `attention.py`. Settings were measured on an H200 with 64
query heads, 4 KV heads and blocks of 128; docs/kernels.md has the table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from m3agent.kernels import msa_launch as launch
from m3agent.kernels.msa_launch import Choice, Paged, Settings

__all__ = ["Choice", "Paged", "full", "sparse", "supported"]

# Shared memory a multiprocessor must lend to one program, in bytes: Hopper's 227 KiB.
SHARED_MEMORY = 232448
# Queries whose partial results are held at once (2 GiB of them in M3's shape).
SPAN_LIMIT = 8192
# Programs that keep the 132 multiprocessors of an H200 busy, two on each.
PROGRAMS = 264


def supported(q: Tensor, k: Tensor, ik: Tensor | None = None, local: int = 1) -> bool:
    """Whether Triton can run these. q: [tokens, heads, d]; k: [pages, block, kv_heads, d]; ik: [pages, block, e]."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or k.dtype is not q.dtype:
        return False
    if torch.cuda.get_device_properties(q.device).shared_memory_per_block_optin < SHARED_MEMORY or local < 1:
        return False
    group = q.shape[1] // k.shape[2]
    sizes = [q.shape[2], k.shape[1]] + ([] if ik is None else [ik.shape[2]])
    return group in (1, 2, 4, 8, 16) and all(16 <= size <= 128 and size & (size - 1) == 0 for size in sizes)


def sparse(q: Tensor, iq: Tensor, k: Tensor, v: Tensor, ik: Tensor, paged: Paged, choice: Choice) -> Tensor:
    """Attention of each new token over the blocks that its index queries choose, itself included.

    q: [tokens, heads, d]; iq: [tokens, kv_heads, e]; k, v: [pages, block, kv_heads, d]; ik: [pages, block, e]. The
    tokens, equally many of each sequence, are in the pages already. Returns [tokens, heads, d].
    """
    tokens, sequences = q.shape[0], paged.tables.shape[0]
    n, kv_heads, block = tokens // sequences, k.shape[2], k.shape[1]
    blocks = -(-paged.longest // block)
    if n == 1:
        return launch.decode(
            q,
            iq,
            k,
            v,
            ik,
            paged,
            choice,
            decode_scores(sequences, blocks),
            decode_settings(sequences, kv_heads, choice),
        )
    if n > SPAN_LIMIT:
        outs: list[Tensor] = []
        for a in range(0, n, SPAN_LIMIT):
            b = min(a + SPAN_LIMIT, n)
            part = Paged(paged.tables, paged.starts + a, paged.longest - n + b)
            outs.append(sparse(q[a:b], iq[a:b], k, v, ik, part, choice))
        return torch.cat(outs)
    shared = n >= 256 and n * choice.topk >= 3 * blocks  # enough queries choose the same block
    scores = launch.score(iq, ik, paged, score_settings(tokens * kv_heads, blocks))
    selected, counts, places = launch.top(scores, kv_heads, block, paged, choice, top_settings(blocks), count=shared)
    del scores
    if shared:
        tile = 64 if n >= 4096 else 32 if n * choice.topk >= 16 * blocks else 16
        return launch.by_block(q, k, v, paged, selected, counts, places, {"tile": tile, "queries": 4, "warps": 4})
    splits = max(1, min(choice.topk, PROGRAMS // (tokens * kv_heads)))
    return launch.by_query(q, k, v, paged, selected, {"splits": splits, "queries": 1, "stages": 3, "warps": 4})


def full(q: Tensor, k: Tensor, v: Tensor, paged: Paged) -> Tensor:
    """Causal attention of each new token over all keys up to its own. Shapes as above."""
    tokens, heads, _ = q.shape
    _, block, kv_heads, _ = k.shape
    n, group = tokens // paged.tables.shape[0], heads // kv_heads
    queries = max(1, min(128 // group, launch.power(n)))
    blocks = -(-paged.longest // block)
    tiles = -(-n // queries) * paged.tables.shape[0] * kv_heads
    splits = max(1, min(blocks, 2 * PROGRAMS // tiles, 64))
    wide = queries * group > 64
    settings = {"splits": splits, "queries": queries, "stages": 2, "warps": 8 if wide else 4}
    return launch.by_query(q, k, v, paged, None, settings)


def score_settings(rows: int, blocks: int) -> Settings:
    """Of index scoring for one sequence: wide tiles where few rows meet many keys."""
    wide = blocks >= 4096 and 256 <= rows <= 16384
    tile = 256 if wide else 128
    splits = max(1, min(blocks, PROGRAMS // -(-rows // tile)))
    pack = max(1, min(8, launch.power(blocks // splits) // 2))
    return {"rows": tile, "splits": splits, "stages": 4 if wide else 2, "warps": 8, "pack": pack}


def top_settings(blocks: int) -> Settings:
    if blocks > 2048:
        return {"size": 32, "warps": 4}
    return {"size": 16 if blocks > 512 else 8, "warps": 1}


def decode_scores(sequences: int, blocks: int) -> Settings:
    splits = max(1, min(blocks, 2 * PROGRAMS // sequences))
    return {"rows": 16, "splits": splits, "stages": 4 if blocks > 2 * splits else 2, "warps": 4}


def decode_settings(sequences: int, kv_heads: int, choice: Choice) -> Settings:
    splits = max(1, min(choice.topk, PROGRAMS // (sequences * kv_heads)))
    if choice.topk == splits:
        return {"splits": splits, "size": 16, "stages": 1, "warps": 8}
    return {"splits": splits, "size": 16, "stages": 2, "warps": 4}
