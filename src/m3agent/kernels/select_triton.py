"""`select.py` on the GPU: scores of whole blocks straight from paged index keys, then each row's best blocks.

A row is one (query, index head). The heads share the index key, so a tile of keys serves all rows of a tile of
queries; the grid covers the keys as well, so that few queries keep all multiprocessors busy. Only the maximum of each
block reaches memory. A query's own block is always chosen, hence never scored, and the blocks before it are whole:
nothing needs a mask.
"""

# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false, reportIndexIssue=false, reportOperatorIssue=false
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def page_of(at, DIRECT: tl.constexpr):
    """The page id at a place in a table of int64.

    DIRECT hides the load from Triton's pipeline, which would fetch ids one step ahead and keys no sooner than that;
    so the keys themselves are fetched as many steps ahead as there are stages. Such a load runs beyond the loop's end.
    """
    if DIRECT:
        page = tl.inline_asm_elementwise(
            "ld.global.nc.b64 $0, [$1];", "=l,l", [at.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        )
    else:
        page = tl.load(at).to(tl.int64)
    return page


@triton.jit
def score_kernel(
    iq, ik, tables, starts, scores, arrivals, n, iq_token, iq_head, table_row, score_row,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, DECODE: tl.constexpr, PACK: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, splits, sequences). scores[row, block] = max over the block's keys of iq[row] · key.

    With DECODE, PACK = 1, and it also sets to zero what `decode_kernel` counts in.
    """
    tile, split, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows = tile * ROWS + tl.arange(0, ROWS)
    inside = rows < n * HEADS
    channels = tl.arange(0, D)
    queries = (sequence * n + rows // HEADS).to(tl.int64)
    q_at = iq + queries[:, None] * iq_token + (rows % HEADS)[:, None] * iq_head + channels[None, :]
    q = tl.load(q_at, mask=inside[:, None], other=0.0)
    last = tl.minimum((tile * ROWS + ROWS - 1) // HEADS, n - 1)
    count = (tl.load(starts + sequence) + last).to(tl.int32) // BLOCK  # blocks before the last query's own
    share = tl.cdiv(count, SPLITS)
    low = split * share
    high = tl.minimum(low + share, count)
    if DECODE and split == 0:
        for head in tl.static_range(HEADS):
            tl.store(arrivals + sequence * HEADS + head, 0)
    key_at = tl.arange(0, BLOCK)[:, None] * D + channels[None, :]
    columns = tl.arange(0, PACK)[None, :]
    score_at = scores + (sequence * n * HEADS + rows).to(tl.int64)[:, None] * score_row + columns
    packed = tl.zeros([ROWS, PACK], tl.float32)
    for block in tl.range(low, high, num_stages=STAGES):
        ahead = tl.maximum(tl.minimum(block, high - 1), 0)
        page = page_of(tables + sequence * table_row + ahead, DIRECT)
        k = tl.load(ik + page * (BLOCK * D) + key_at)  # [BLOCK, D]
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)  # [ROWS, BLOCK]
        best = tl.max(s, 1)[:, None]
        if DECODE:
            tl.store(score_at + block, best, mask=inside[:, None])
        else:
            # Single numbers, a row apart, would cost a fifth of the time; a store before the product would hold it up.
            place = block % PACK
            if (place == 0) & (block > low):
                tl.store(score_at + block - PACK, packed, mask=inside[:, None] & (block - PACK + columns >= low))
            packed = tl.where(columns == place, best, packed)
    if not DECODE:
        base = (high - 1) // PACK * PACK
        there = inside[:, None] & (base + columns >= low) & (base + columns < high)
        tl.store(score_at + base, packed, mask=there)


@triton.jit
def _sort_keys(score, first, last, own, LOCAL: tl.constexpr, INITIAL: tl.constexpr):
    """Numbers that sort as the definition ranks groups of blocks first … last by their best score; all different.

    Among equals the lower comes first. own: the query's block. Groups out of reach come last.
    """
    score = tl.where(score == 0.0, 0.0, score)  # −0 ties with 0
    bits = score.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(first < INITIAL, 0x7F7FFFFF, rank)
    rank = tl.where((last > own - LOCAL), 0x7F800000, rank)
    rank = tl.where(first > own, -0x80000000, rank)
    return (rank.to(tl.int64) << 32) | (0x7FFFFFFF - first).to(tl.int64)


@triton.jit
def _blocks(keys):
    return 0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def best_blocks(
    scores, own, LOCAL: tl.constexpr, INITIAL: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """The best WIDTH blocks of a row by falling score, then numbers above `own`. GROUPS · SIZE ≥ blocks, WIDTH.

    They lie in the WIDTH groups with the best best block: first groups are ranked, then the blocks of those.
    """
    groups, steps = tl.arange(0, GROUPS) * SIZE, tl.arange(0, SIZE)
    if GROUPS > WIDTH:
        blocks = groups[:, None] + steps[None, :]
        score = tl.max(tl.load(scores + blocks, mask=blocks <= own - LOCAL, other=-float("inf")), 1)
        best = tl.topk(_sort_keys(score, groups, groups + SIZE - 1, own, LOCAL, INITIAL), WIDTH)
        blocks = tl.reshape((_blocks(best) // SIZE * SIZE)[:, None] + steps[None, :], [WIDTH * SIZE])
    else:
        blocks = tl.arange(0, GROUPS * SIZE)
    score = tl.load(scores + blocks, mask=blocks <= own - LOCAL, other=-float("inf"))
    best = tl.topk(_sort_keys(score, blocks, blocks, own, LOCAL, INITIAL), WIDTH)
    return _blocks(best)


@triton.jit
def top_kernel(
    scores, starts, selected, counts, places, n, score_row, buckets,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TOPK: tl.constexpr, LOCAL: tl.constexpr, INITIAL: tl.constexpr,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Grid (rows). selected[row, TOPK]: block ids by falling score, then −1. WIDTH ≥ TOPK is a power of two.

    With COUNT the choices are counted by (head, block), and a choice learns its place among those of its block.
    """
    row = tl.program_id(0)
    query = row // HEADS
    own = (tl.load(starts + query // n) + query % n).to(tl.int32) // BLOCK
    block = best_blocks(scores + row.to(tl.int64) * score_row, own, LOCAL, INITIAL, WIDTH, GROUPS, SIZE)
    slot = tl.arange(0, WIDTH)
    wanted = slot < TOPK
    found = wanted & (block <= own)
    tl.store(selected + row * TOPK + slot, tl.where(found, block, -1), mask=wanted)
    if COUNT:
        place = tl.atomic_add(counts + (row % HEADS) * buckets + block, 1, mask=found, sem="relaxed")
        tl.store(places + row * TOPK + slot, place, mask=wanted)
