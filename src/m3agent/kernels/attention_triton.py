"""Attention over pages on the GPU: each query by itself, or block by block with all queries that chose it.

Softmax runs in powers of two, in float32. Partial results are normalised and carry the logarithm (base 2) of their
weight; `merge_kernel` joins them.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from m3agent.kernels.select_triton import best_blocks


@triton.jit
def rows_kernel(
    q, k, v, tables, starts, selected, out, weights, n, scale, q_token, table_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    ROWS: tl.constexpr, TOPK: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (query tiles, kv heads, sequences · splits): the heads of a group times QUERIES neighbouring queries.

    TOPK = 0: over all keys up to each query's own; else QUERIES = 1 and over the query's selected blocks. With splits,
    out takes partial results [tokens, kv_heads, splits, group, d] and weights their logarithms, else out is the output.
    """
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, split = part // SPLITS, part % SPLITS
    rows = tl.arange(0, ROWS)
    query = tile * QUERIES + rows // GROUP
    inside = (query < n) & (rows < QUERIES * GROUP)
    token = (sequence * n + query).to(tl.int64)
    channels = tl.arange(0, D)
    q_at = q + token[:, None] * q_token + (head * GROUP + rows % GROUP)[:, None] * D + channels[None, :]
    q_rows = tl.load(q_at, mask=inside[:, None], other=0.0)
    start = tl.load(starts + sequence).to(tl.int32)
    position = start + tl.minimum(query, n - 1)
    last = start + tl.minimum(tile * QUERIES + QUERIES - 1, n - 1)
    count = last // BLOCK + 1
    if TOPK:
        count = tl.minimum(count, TOPK)
    share = tl.cdiv(count, SPLITS)
    low = split * share
    high = tl.minimum(low + share, count)
    keys = tl.arange(0, BLOCK)
    key_at = head * D + keys[:, None] * (KV_HEADS * D) + channels[None, :]
    chosen = selected + ((sequence * n + tile) * KV_HEADS + head) * TOPK
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for step in tl.range(low, high, num_stages=STAGES):
        if TOPK:
            block = tl.load(chosen + step)
        else:
            block = step
        page = tl.load(tables + sequence * table_row + block).to(tl.int64) * (BLOCK * KV_HEADS * D)
        k_rows = tl.load(k + page + key_at)
        s = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        s = tl.where((block * BLOCK + keys)[None, :] <= position[:, None], s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        safe = tl.where(new_top == -float("inf"), 0.0, new_top)  # a tile's early queries may see none of a late block
        p = tl.exp2(s * scale - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        v_rows = tl.load(v + page + key_at)
        acc = tl.dot(p.to(v_rows.dtype), v_rows, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (1.0 / total)[:, None]
    if SPLITS == 1:
        at = (token * KV_HEADS + head) * GROUP + rows % GROUP
    else:
        at = ((token * KV_HEADS + head) * SPLITS + split) * GROUP + rows % GROUP
        tl.store(weights + at, top + tl.log2(total), mask=inside)
    tl.store(out + at[:, None] * D + channels[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def decode_kernel(
    q, k, v, tables, starts, scores, arrivals, parts, weights, out, scale, q_token, table_row, score_row,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    TOPK: tl.constexpr, LOCAL: tl.constexpr, INITIAL: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (splits, kv heads, sequences), one token each: choose blocks from the scores, attend to a split's share.

    Every split chooses anew, which costs less than a launch; the last one to arrive joins the parts into out.
    """
    split, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    item = sequence * KV_HEADS + head
    position = tl.load(starts + sequence).to(tl.int32)
    own = position // BLOCK
    rows, keys, channels = tl.arange(0, ROWS), tl.arange(0, BLOCK), tl.arange(0, D)
    inside = rows < GROUP
    q_at = q + sequence.to(tl.int64) * q_token + (head * GROUP + rows)[:, None] * D + channels[None, :]
    q_rows = tl.load(q_at, mask=inside[:, None], other=0.0)
    blocks = best_blocks(scores + item.to(tl.int64) * score_row, own, LOCAL, INITIAL, WIDTH, GROUPS, SIZE)
    slot = tl.arange(0, WIDTH)
    share: tl.constexpr = (TOPK + SPLITS - 1) // SPLITS
    low = split * share
    high = tl.minimum(tl.minimum(low + share, TOPK), own + 1)
    key_at = head * D + keys[:, None] * (KV_HEADS * D) + channels[None, :]
    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for step in tl.range(low, high, num_stages=STAGES):
        block = tl.sum(tl.where(slot == step, blocks, 0), 0)
        page = tl.load(tables + sequence * table_row + block).to(tl.int64) * (BLOCK * KV_HEADS * D)
        k_rows = tl.load(k + page + key_at)
        v_rows = tl.load(v + page + key_at)
        s = tl.dot(q_rows, tl.trans(k_rows), input_precision=PRECISION)
        s = tl.where((block * BLOCK + keys)[None, :] <= position, s, -float("inf"))
        new_top = tl.maximum(top, tl.max(s, 1) * scale)
        p = tl.exp2(s * scale - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v_rows.dtype), v_rows, acc * shrink[:, None], input_precision=PRECISION)
        top = new_top
    total = tl.where(total == 0.0, 1.0, total)
    acc = acc * (1.0 / total)[:, None]
    to = item * GROUP + rows
    if SPLITS == 1:
        tl.store(out + to[:, None] * D + channels[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])
    else:
        at = (item * SPLITS + split) * GROUP + rows
        tl.store(weights + at, top + tl.log2(total), mask=inside)
        tl.store(parts + at[:, None] * D + channels[None, :], acc, mask=inside[:, None])
        tl.debug_barrier()  # all threads' parts before the one that counts
        if tl.atomic_add(arrivals + item, 1, sem="acq_rel") == SPLITS - 1:
            top = tl.full([ROWS], -float("inf"), tl.float32)
            total = tl.zeros([ROWS], tl.float32)
            acc = tl.zeros([ROWS, D], tl.float32)
            for part in tl.static_range(SPLITS):
                at = (item * SPLITS + part) * GROUP + rows
                weight = tl.load(weights + at, mask=inside, other=0.0, cache_modifier=".cg")
                value = tl.load(
                    parts + at[:, None] * D + channels[None, :], mask=inside[:, None], other=0.0, cache_modifier=".cg"
                )
                new_top = tl.maximum(top, weight)
                shrink, w = tl.exp2(top - new_top), tl.exp2(weight - new_top)
                total = total * shrink + w
                acc = acc * shrink[:, None] + value * w[:, None]
                top = new_top
            acc = acc * (1.0 / total)[:, None]
            tl.store(out + to[:, None] * D + channels[None, :], acc.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def scan_kernel(counts, firsts, tile_firsts, buckets, TILE: tl.constexpr, CHUNK: tl.constexpr):
    """One program. firsts: choices before each bucket; tile_firsts: tiles of TILE choices before it, at the end all."""
    at = tl.arange(0, CHUNK)
    choices = tl.zeros([], tl.int32)
    tiles = tl.zeros([], tl.int32)
    for base in range(0, buckets, CHUNK):
        inside = base + at < buckets
        count = tl.load(counts + base + at, mask=inside, other=0)
        tile = (count + TILE - 1) // TILE
        tl.store(firsts + base + at, choices + tl.cumsum(count, 0) - count, mask=inside)
        tl.store(tile_firsts + base + at, tiles + tl.cumsum(tile, 0) - tile, mask=inside)
        choices += tl.sum(count, 0)
        tiles += tl.sum(tile, 0)
    tl.store(tile_firsts + buckets, tiles)


@triton.jit
def sort_kernel(
    selected, places, counts, firsts, tile_firsts, order, tiles, choices, blocks,
    KV_HEADS: tl.constexpr, TOPK: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """order: the choices by bucket (head, block); tiles[i]: (bucket, first place in the order, number of choices)."""
    choice = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = choice < choices
    block = tl.load(selected + choice, mask=inside, other=-1)
    inside &= block >= 0
    bucket = (choice // TOPK) % KV_HEADS * blocks + block
    place = tl.load(places + choice, mask=inside, other=0)
    first = tl.load(firsts + bucket, mask=inside, other=0) + place
    tl.store(order + first, choice, mask=inside)
    opens = inside & (place % TILE == 0)
    tile = (tl.load(tile_firsts + bucket, mask=opens, other=0) + place // TILE) * 4
    left = tl.load(counts + bucket, mask=opens, other=0) - place
    tl.store(tiles + tile, bucket, mask=opens)
    tl.store(tiles + tile + 1, first, mask=opens)
    tl.store(tiles + tile + 2, tl.minimum(left, TILE), mask=opens)


@triton.jit
def tiles_kernel(
    q, k, v, table, starts, order, tiles, tile_firsts, parts, weights, scale, q_token, blocks,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (tiles): one block of keys for the queries that chose it, QUERIES at a time, into one part a choice."""
    tile = tl.program_id(0)
    if tile < tl.load(tile_firsts + KV_HEADS * blocks):
        bucket = tl.load(tiles + tile * 4)
        first = tl.load(tiles + tile * 4 + 1)
        count = tl.load(tiles + tile * 4 + 2)
        head, block = bucket // blocks, bucket % blocks
        page = tl.load(table + block).to(tl.int64) * (BLOCK * KV_HEADS * D) + head * D
        keys, channels = tl.arange(0, BLOCK), tl.arange(0, D)
        # Loaded as transposed: a transposition inside the loop would store the tile anew for every step.
        k_turned = tl.load(k + page + keys[None, :] * (KV_HEADS * D) + channels[:, None])
        v_rows = tl.load(v + page + keys[:, None] * (KV_HEADS * D) + channels[None, :])
        start = tl.load(starts).to(tl.int32)
        if block * BLOCK + BLOCK <= start + 1:
            _tile(
                q, k_turned, v_rows, order + first, parts, weights, scale, q_token, count, head, start, block,
                KV_HEADS, GROUP, D, BLOCK, QUERIES, TOPK, PRECISION, False,
            )  # fmt: skip
        else:
            _tile(
                q, k_turned, v_rows, order + first, parts, weights, scale, q_token, count, head, start, block,
                KV_HEADS, GROUP, D, BLOCK, QUERIES, TOPK, PRECISION, True,
            )  # fmt: skip


@triton.jit
def _tile(
    q, k_turned, v_rows, order, parts, weights, scale, q_token, count, head, start, block,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, QUERIES: tl.constexpr,
    TOPK: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The next queries are fetched while these are worked on, and the choices of those after them."""
    rows, channels = tl.arange(0, QUERIES * GROUP), tl.arange(0, D)
    lane = rows // GROUP
    q += (head * GROUP + rows % GROUP)[:, None] * D + channels[None, :]
    choice = tl.load(order + lane, mask=lane < count, other=0)
    q_rows = tl.load(q + (choice // (KV_HEADS * TOPK)).to(tl.int64)[:, None] * q_token)
    following = tl.load(order + QUERIES + lane, mask=QUERIES + lane < count, other=0)
    for base in tl.range(0, count, QUERIES, num_stages=1):
        q_next = tl.load(q + (following // (KV_HEADS * TOPK)).to(tl.int64)[:, None] * q_token)
        s = tl.dot(q_rows, k_turned, input_precision=PRECISION)
        place = base + 2 * QUERIES + lane
        later = tl.load(order + place, mask=place < count, other=0)
        if CAUSAL:
            position = start + choice // (KV_HEADS * TOPK)
            s = tl.where((block * BLOCK + tl.arange(0, BLOCK))[None, :] <= position[:, None], s, -1e30)
        top = tl.max(s, 1) * scale
        p = tl.exp2(s * scale - top[:, None])
        total = tl.sum(p, 1)
        o = tl.dot(p.to(v_rows.dtype), v_rows, input_precision=PRECISION) * (1.0 / total)[:, None]
        inside = base + lane < count
        at = choice.to(tl.int64) * GROUP + rows % GROUP
        tl.store(weights + at, top + tl.log2(total), mask=inside)
        out = parts + at[:, None] * D + channels[None, :]
        tl.store(out, o.to(parts.dtype.element_ty), mask=inside[:, None])
        q_rows, choice, following = q_next, following, later


@triton.jit
def merge_kernel(
    parts, weights, selected, out, GROUP: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, SELECTED: tl.constexpr
):
    """Grid (tokens · kv_heads): out = Σ part · 2^weight / Σ 2^weight; with SELECTED the parts of −1 are void."""
    item = tl.program_id(0).to(tl.int64)
    group, channels = tl.arange(0, GROUP), tl.arange(0, D)
    at = item * (PARTS * GROUP) + group
    top = tl.full([GROUP], -float("inf"), tl.float32)
    for part in tl.static_range(PARTS):
        w = tl.load(weights + at + part * GROUP)
        if SELECTED:
            w = tl.where(tl.load(selected + item * PARTS + part) >= 0, w, -float("inf"))
        top = tl.maximum(top, w)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, D], tl.float32)
    for part in tl.static_range(PARTS):
        w = tl.load(weights + at + part * GROUP)
        if SELECTED:
            w = tl.where(tl.load(selected + item * PARTS + part) >= 0, w, -float("inf"))
        w = tl.exp2(w - top)
        value_at = parts + (at + part * GROUP)[:, None] * D + channels[None, :]
        value = tl.load(value_at, mask=(w > 0.0)[:, None], other=0.0).to(tl.float32)
        total += w
        acc += value * w[:, None]
    to = (item * GROUP + group)[:, None] * D + channels[None, :]
    tl.store(out + to, (acc * (1.0 / total)[:, None]).to(out.dtype.element_ty))
