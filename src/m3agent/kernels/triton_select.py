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
from triton.language.extra import cuda


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
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, splits, sequences). scores[row, block] = max over the block's keys of iq[row] · key.

    With DECODE it also sets to zero what `decode_kernel` counts in.
    """
    if PDL:
        cuda.gdc_launch_dependents()
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
        place = block % PACK
        packed = tl.where(columns == place, tl.max(s, 1)[:, None], packed)
        if (place == PACK - 1) | (block == high - 1):  # single numbers, a row apart, would cost a fifth of the time
            base = block - place
            there = inside[:, None] & (columns <= place) & (base + columns >= low)
            tl.store(score_at + base, packed, mask=there)


@triton.jit
def _sort_keys(scores, blocks, own, LOCAL: tl.constexpr, INITIAL: tl.constexpr):
    """Numbers that sort as the definition ranks: by score, among equals the lower block first; all different.

    scores: where a row's scores lie; own: its query's block. int64, the lowest for blocks that are out of reach.
    """
    score = tl.load(scores + blocks, mask=(blocks <= own - LOCAL) & (blocks >= INITIAL), other=0.0)
    score = tl.where(score == 0.0, 0.0, score)  # −0 ties with 0
    bits = score.to(tl.int32, bitcast=True)
    rank = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    rank = tl.where(blocks < INITIAL, 0x7F7FFFFF, rank)
    rank = tl.where(blocks > own - LOCAL, 0x7F800000, rank)
    key = (rank.to(tl.int64) << 32) | (0x7FFFFFFF - blocks).to(tl.int64)
    return tl.where(blocks <= own, key, -0x8000000000000000 + (0x7FFFFFFF - blocks).to(tl.int64))


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
    groups, steps = tl.arange(0, GROUPS), tl.arange(0, SIZE)
    keys = _sort_keys(scores, groups[:, None] * SIZE + steps[None, :], own, LOCAL, INITIAL)  # [GROUPS, SIZE]
    if GROUPS > WIDTH:
        best = tl.topk(tl.max(keys, 1), WIDTH)
        keys = _sort_keys(scores, (_blocks(best) // SIZE * SIZE)[:, None] + steps[None, :], own, LOCAL, INITIAL)
        best = tl.topk(tl.reshape(keys, [WIDTH * SIZE]), WIDTH)
    else:
        best = tl.topk(tl.reshape(keys, [GROUPS * SIZE]), WIDTH)
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
