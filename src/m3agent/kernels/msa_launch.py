"""Launching the kernels of sparse and full attention over pages; `msa.py` says when and with which settings.

A batch holds `n` new tokens of each of its sequences: many of one, or one of each of many.
"""

# pyright: reportCallIssue=false
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Names and values of what a launch may choose: tile sizes, splits, warps, stages of the pipeline.
Settings = dict[str, Any]


@dataclass(frozen=True)
class Paged:
    """Where the tokens of a batch stand. tables: [sequences, pages] page ids; starts: [sequences] tokens before the new
    ones, both integers on the device; longest: tokens of the longest sequence, new ones included, known to the host.
    """

    tables: Tensor
    starts: Tensor
    longest: int


@dataclass(frozen=True)
class Choice:
    """A query sees `topk` blocks: always its own, the local − 1 before it and the first `initial`."""

    topk: int
    local: int
    initial: int


def precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


def power(n: int) -> int:
    """The next power of two."""
    return 1 << max(n - 1, 0).bit_length()


def score(iq: Tensor, ik: Tensor, paged: Paged, settings: Settings, arrivals: Tensor | None = None) -> Tensor:
    """`block_scores` of all blocks before each query's own: float32 [rows, blocks], a row for each (query, head).

    iq: [tokens, heads, e]; ik: [pages, block, e]. What lies at or behind a query's own block is left as it is.
    """
    from m3agent.kernels.select_triton import score_kernel

    tokens, heads, d = iq.shape
    block, sequences = ik.shape[1], paged.tables.shape[0]
    n = tokens // sequences
    scores = torch.empty(tokens * heads, -(-paged.longest // block), dtype=torch.float32, device=iq.device)
    rows = settings["rows"]
    score_kernel[(-(-n * heads // rows), settings["splits"], sequences)](
        iq, ik, paged.tables, paged.starts, scores, scores if arrivals is None else arrivals, n, iq.stride(0),
        iq.stride(1), paged.tables.stride(0), scores.stride(0), HEADS=heads, D=d, BLOCK=block, ROWS=rows,
        SPLITS=settings["splits"], STAGES=settings["stages"], PRECISION=precision(iq), DECODE=arrivals is not None,
        PACK=1 if arrivals is not None else settings["pack"], DIRECT=iq.is_cuda and arrivals is None,
        num_warps=settings["warps"],
    )  # fmt: skip
    return scores


def top(
    scores: Tensor, heads: int, block: int, paged: Paged, choice: Choice, settings: Settings, count: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`select_blocks` of what `score` found: int32 [tokens, heads, topk]; with `count`, of one sequence, also how many
    chose each (head, block), [heads · blocks], and each choice's place among these, [tokens, heads, topk].
    """
    from m3agent.kernels.select_triton import top_kernel

    rows, blocks = scores.shape
    selected = torch.empty(rows // heads, heads, choice.topk, dtype=torch.int32, device=scores.device)
    counts = torch.zeros(heads * blocks, dtype=torch.int32, device=scores.device) if count else selected
    places = torch.empty_like(selected) if count else selected
    width = max(2, power(choice.topk))
    size = settings["size"]
    top_kernel[(rows,)](
        scores, paged.starts, selected, counts, places, rows // heads // paged.tables.shape[0],
        scores.stride(0), blocks, HEADS=heads, BLOCK=block, TOPK=choice.topk, LOCAL=choice.local,
        INITIAL=choice.initial, WIDTH=width, GROUPS=power(-(-max(blocks, width) // size)), SIZE=size, COUNT=count,
        num_warps=settings["warps"],
    )  # fmt: skip
    return selected, counts, places


def decode(
    q: Tensor, iq: Tensor, k: Tensor, v: Tensor, ik: Tensor, paged: Paged, choice: Choice, score_with: Settings,
    settings: Settings,
) -> Tensor:  # fmt: skip
    """The whole of sparse attention for one new token of each sequence, in two launches."""
    from m3agent.kernels.attention_triton import decode_kernel

    tokens, heads, d = q.shape
    _, block, kv_heads, _ = k.shape
    arrivals = torch.empty(tokens * kv_heads, dtype=torch.int32, device=q.device)
    scores = score(iq, ik, paged, score_with, arrivals)
    out = torch.empty(tokens, heads, d, dtype=q.dtype, device=q.device)
    splits, size, width = settings["splits"], settings["size"], max(2, power(choice.topk))
    parts = torch.empty(tokens * heads * splits, d, dtype=torch.float32, device=q.device)
    weights = torch.empty(tokens * heads * splits, dtype=torch.float32, device=q.device)
    decode_kernel[(splits, kv_heads, tokens)](
        q, k, v, paged.tables, paged.starts, scores, arrivals, parts, weights, out, _scale(d), q.stride(0),
        paged.tables.stride(0), scores.stride(0), KV_HEADS=kv_heads, GROUP=heads // kv_heads, D=d, BLOCK=block,
        ROWS=max(16, heads // kv_heads), TOPK=choice.topk, LOCAL=choice.local, INITIAL=choice.initial, WIDTH=width,
        GROUPS=power(-(-max(scores.shape[1], width) // size)), SIZE=size, SPLITS=splits, STAGES=settings["stages"],
        PRECISION=precision(q), num_warps=settings["warps"],
    )  # fmt: skip
    return out


def by_query(q: Tensor, k: Tensor, v: Tensor, paged: Paged, selected: Tensor | None, settings: Settings) -> Tensor:
    """Attention of each query over its selected blocks, or, without `selected`, of neighbours over all blocks."""
    from m3agent.kernels.attention_triton import rows_kernel

    tokens, heads, d = q.shape
    _, block, kv_heads, _ = k.shape
    sequences, group = paged.tables.shape[0], heads // kv_heads
    n = tokens // sequences
    splits, queries = settings["splits"], settings["queries"]
    rows = max(16, queries * group)
    out = torch.empty(tokens, heads, d, dtype=q.dtype, device=q.device)
    parts, weights = (out, out) if splits == 1 else _parts(tokens, heads, splits, d, q)
    rows_kernel[(-(-n // queries), kv_heads, sequences * splits)](
        q, k, v, paged.tables, paged.starts, parts if selected is None else selected, parts, weights, n, _scale(d),
        q.stride(0), paged.tables.stride(0), KV_HEADS=kv_heads, GROUP=group, D=d, BLOCK=block, QUERIES=queries,
        ROWS=rows, TOPK=0 if selected is None else selected.shape[2], SPLITS=splits, STAGES=settings["stages"],
        PRECISION=precision(q), num_warps=settings["warps"],
    )  # fmt: skip
    return out if splits == 1 else merge(parts, weights, None, out, group)


def by_block(
    q: Tensor, k: Tensor, v: Tensor, paged: Paged, selected: Tensor, counts: Tensor, places: Tensor, settings: Settings
) -> Tensor:
    """Attention over selected blocks, a block at a time with all the queries that chose it. One sequence."""
    from m3agent.kernels.attention_triton import scan_kernel, sort_kernel, tiles_kernel

    n, heads, d = q.shape
    _, block, kv_heads, _ = k.shape
    group, topk = heads // kv_heads, selected.shape[2]
    buckets, choices = counts.shape[0], selected.numel()
    tile, queries = settings["tile"], max(settings["queries"], 16 // group)
    index = torch.empty(2 * buckets + 1 + choices, dtype=torch.int32, device=q.device)
    firsts, tile_firsts, order = index[:buckets], index[buckets : 2 * buckets + 1], index[2 * buckets + 1 :]
    most = min(choices, choices // tile + buckets)
    tiles = torch.empty(most, 4, dtype=torch.int32, device=q.device)
    scan_kernel[(1,)](counts, firsts, tile_firsts, buckets, TILE=tile, CHUNK=min(power(buckets), 4096), num_warps=8)
    sort_kernel[(-(-choices // 512),)](
        selected, places, counts, firsts, tile_firsts, order, tiles, choices, buckets // kv_heads,
        KV_HEADS=kv_heads, TOPK=topk, TILE=tile, CHUNK=512, num_warps=4,
    )  # fmt: skip
    parts, weights = _parts(n, heads, topk, d, q)
    tiles_kernel[(most,)](
        q, k, v, paged.tables, paged.starts, order, tiles, tile_firsts, parts, weights, _scale(d), q.stride(0),
        buckets // kv_heads, KV_HEADS=kv_heads, GROUP=group, D=d, BLOCK=block, QUERIES=queries, TOPK=topk,
        PRECISION=precision(q), num_warps=settings["warps"],
    )  # fmt: skip
    return merge(parts, weights, selected, torch.empty(n, heads, d, dtype=q.dtype, device=q.device), group)


def merge(parts: Tensor, weights: Tensor, selected: Tensor | None, out: Tensor, group: int) -> Tensor:
    """The weighted mean of partial results [tokens, kv_heads, parts, group, d] into out [tokens, heads, d]."""
    from m3agent.kernels.attention_triton import merge_kernel

    tokens, heads, d = out.shape
    count = parts.numel() // out.numel()
    merge_kernel[(tokens * heads // group,)](
        parts, weights, parts if selected is None else selected, out, GROUP=group, D=d, PARTS=count,
        SELECTED=selected is not None, num_warps=4,
    )  # fmt: skip
    return out


def _parts(tokens: int, heads: int, count: int, d: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """Partial results in q's dtype, rounded like the output itself, and their weights."""
    parts = torch.empty(tokens * heads * count, d, dtype=q.dtype, device=q.device)
    return parts, torch.empty(tokens * heads * count, dtype=torch.float32, device=q.device)


def _scale(d: int) -> float:
    return math.log2(math.e) / math.sqrt(d)
