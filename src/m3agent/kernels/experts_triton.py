"""The routed experts on a GPU, in Triton: plan, gate and up with SwiGLU, down, combine. `experts.py` has the meaning.

Until some tens of rows meet each expert, reading its weights is all the time: few rows then stand on the right of the
product, where the tensor core's tile is narrowest. Many rows stand on the left, sorted by expert, and come by TMA.
Nothing here waits for the device, so a step of these can be captured as a graph.
"""

# Triton's launch options and its loops are not known to type checkers.
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false, reportArgumentType=false
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

# Rows of an expert, on average, up to which a tile of 16 or 32 rows is the fastest (H200, 128 experts of M3's size).
ROWS_16, ROWS_32 = 8, 20


@dataclass(frozen=True)
class Plan:
    """The assignments (token, place), n · k of them, sorted by expert and cut into tiles of one expert's rows.

    order[p]: the assignment at sorted place p; place[a]: where assignment a went; expert, row, end: of each tile, its
    rows are the sorted places from row to end; tiles[0]: how many tiles there are. All int32, on the device.
    """

    order: Tensor
    place: Tensor
    expert: Tensor
    row: Tensor
    end: Tensor
    tiles: Tensor


@triton.jit
def _plan(
    chosen, order, place, tile_expert, tile_row, tile_end, tiles, assigned,
    EXPERTS: tl.constexpr, BINS: tl.constexpr, ROWS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """One program an expert. Each counts all experts' rows, so that none has to wait for another."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, assigned, SIZE):
        at = begin + tl.arange(0, SIZE)
        counts += tl.histogram(tl.load(chosen + at, mask=at < assigned, other=EXPERTS).to(tl.int32), BINS)
    counts = tl.where(bins < EXPERTS, counts, 0)
    tiles_of = (counts + ROWS - 1) // ROWS
    first = tl.sum(tl.where(bins < expert, counts, 0))
    count = tl.sum(tl.where(bins == expert, counts, 0))
    tile = tl.sum(tl.where(bins < expert, tiles_of, 0))
    if expert == 0:
        tl.store(tiles, tl.sum(tiles_of))
    done = first
    for begin in range(0, assigned, SIZE):
        at = begin + tl.arange(0, SIZE)
        mine = (tl.load(chosen + at, mask=at < assigned, other=EXPERTS).to(tl.int32) == expert).to(tl.int32)
        to = done + tl.cumsum(mine) - mine
        tl.store(order + to, at, mask=mine == 1)
        tl.store(place + at, to, mask=mine == 1)
        done += tl.sum(mine)
    same = tl.zeros((BINS,), tl.int32)
    for begin in range(0, (count + ROWS - 1) // ROWS, BINS):
        row = (begin + bins) * ROWS
        tl.store(tile_expert + tile + begin + bins, same + expert, mask=row < count)
        tl.store(tile_row + tile + begin + bins, first + row, mask=row < count)
        tl.store(tile_end + tile + begin + bins, same + tl.minimum(first + row + ROWS, first + count), mask=row < count)


@triton.jit
def swiglu(gate, up, alpha, limit):
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    return (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))


@triton.jit
def _one_gate_up(
    x, weight, hidden, chosen, alpha, limit,
    H: tl.constexpr, INNER: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A single token. hidden: [k, INNER]; a program: BN columns of one of its experts."""
    blocks: tl.constexpr = INNER // BN
    place, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    expert = tl.load(chosen + place).to(tl.int64)
    columns = block * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    gates = weight + expert * (2 * INNER * H) + columns[:, None].to(tl.int64) * H + depth[None, :]
    gate = tl.zeros((BN, BK), tl.float32)
    up = tl.zeros((BN, BK), tl.float32)
    for k in tl.range(0, H, BK, num_stages=STAGES):
        row = tl.load(x + k + depth).to(tl.float32)[None, :]
        gate += tl.load(gates + k, eviction_policy="evict_first").to(tl.float32) * row
        up += tl.load(gates + INNER * H + k, eviction_policy="evict_first").to(tl.float32) * row
    act = swiglu(tl.sum(gate, 1), tl.sum(up, 1), alpha, limit)
    tl.store(hidden + place * INNER + columns, act.to(hidden.dtype.element_ty))


@triton.jit
def _one_down(
    hidden, weight, weights, chosen, out,
    H: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A single token: BN columns of the output, summed over its experts."""
    columns = tl.program_id(0) * BN + tl.arange(0, BN)
    depth = tl.arange(0, BK)
    total = tl.zeros((BN, BK), tl.float32)
    steps: tl.constexpr = INNER // BK
    for step in tl.range(0, K * steps, num_stages=STAGES):
        place, k = step // steps, (step % steps) * BK
        expert = tl.load(chosen + place).to(tl.int64)
        left = weight + expert * (H * INNER) + columns[:, None].to(tl.int64) * INNER + k + depth[None, :]
        row = tl.load(hidden + place * INNER + k + depth).to(tl.float32) * tl.load(weights + place)
        total += tl.load(left, eviction_policy="evict_first").to(tl.float32) * row[None, :]
    tl.store(out + columns, tl.sum(total, 1).to(out.dtype.element_ty))


@triton.jit
def _few_gate_up(
    x, weight, hidden, order, tile_expert, tile_row, tile_end, tiles, alpha, limit,
    H: tl.constexpr, INNER: tl.constexpr, K: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """hidden: [n · k, INNER] in sorted order; a program: BN columns of one tile of at most ROWS rows."""
    blocks: tl.constexpr = INNER // BN
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile < tl.load(tiles):
        expert = tl.load(tile_expert + tile).to(tl.int64)
        rows = tl.load(tile_row + tile) + tl.arange(0, ROWS)
        real = rows < tl.load(tile_end + tile)
        token = tl.load(order + rows, mask=real, other=0) // K
        columns = block * BN + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        gates = weight + expert * (2 * INNER * H) + columns[:, None].to(tl.int64) * H + depth[None, :]
        inputs = x + token[None, :].to(tl.int64) * H + depth[:, None]
        gate = tl.zeros((BN, ROWS), tl.float32)
        up = tl.zeros((BN, ROWS), tl.float32)
        for k in tl.range(0, H, BK, num_stages=STAGES):
            right = tl.load(inputs + k)
            gate = tl.dot(tl.load(gates + k, eviction_policy="evict_first"), right, gate)
            up = tl.dot(tl.load(gates + INNER * H + k, eviction_policy="evict_first"), right, up)
        act = swiglu(gate, up, alpha, limit).to(hidden.dtype.element_ty)
        tl.store(hidden + rows[None, :].to(tl.int64) * INNER + columns[:, None], act, mask=real[None, :])


@triton.jit
def _few_down(
    hidden, weight, out, order, tile_expert, tile_row, tile_end, tiles,
    H: tl.constexpr, INNER: tl.constexpr,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """out: [n · k, H] by assignment, not weighted yet."""
    blocks: tl.constexpr = H // BN
    tile, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if tile < tl.load(tiles):
        expert = tl.load(tile_expert + tile).to(tl.int64)
        rows = tl.load(tile_row + tile) + tl.arange(0, ROWS)
        real = rows < tl.load(tile_end + tile)
        target = tl.load(order + rows, mask=real, other=0)
        columns = block * BN + tl.arange(0, BN)
        depth = tl.arange(0, BK)
        left = weight + expert * (H * INNER) + columns[:, None].to(tl.int64) * INNER + depth[None, :]
        right = hidden + rows[None, :].to(tl.int64) * INNER + depth[:, None]
        acc = tl.zeros((BN, ROWS), tl.float32)
        for k in tl.range(0, INNER, BK, num_stages=STAGES):
            rest = tl.load(right + k, mask=real[None, :], other=0.0)
            acc = tl.dot(tl.load(left + k, eviction_policy="evict_first"), rest, acc)
        where = out + target[None, :].to(tl.int64) * H + columns[:, None]
        tl.store(where, acc.to(out.dtype.element_ty), mask=real[None, :])


@triton.jit
def _spread(x, place, out, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[place[token, i]] = x[token]: each token's row to its sorted places."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(x + token * H + columns, mask=columns < H)
    for i in tl.static_range(K):
        to = tl.load(place + token * K + i).to(tl.int64)
        tl.store(out + to * H + columns, row, mask=columns < H)


@triton.jit
def _many_gate_up(
    x_rows, weight_rows, hidden, tile_expert, tile_row, tile_end, tiles, alpha, limit,
    H: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Persistent: a program takes every PROGRAMS-th tile; the tiles of one row block are neighbours and share it in L2.
    What a tile reads beyond its expert's rows belongs to the next one, and is not written.
    """
    blocks: tl.constexpr = INNER // BN
    for work in range(tl.program_id(0), tl.load(tiles) * blocks, PROGRAMS):
        tile, block = work // blocks, work % blocks
        row, end = tl.load(tile_row + tile), tl.load(tile_end + tile)
        first = tl.load(tile_expert + tile) * (2 * INNER) + block * BN
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in range(0, H, BK):
            left = x_rows.load([row, k])
            gate = tl.dot(left, weight_rows.load([first, k]).T, gate)
            up = tl.dot(left, weight_rows.load([first + INNER, k]).T, up)
        rows = row + tl.arange(0, BM)
        columns = block * BN + tl.arange(0, BN)
        act = swiglu(gate, up, alpha, limit).to(hidden.dtype.element_ty)
        tl.store(hidden + rows[:, None].to(tl.int64) * INNER + columns[None, :], act, mask=(rows < end)[:, None])


@triton.jit
def _many_down(
    hidden_rows, weight_rows, out, order, tile_expert, tile_row, tile_end, tiles,
    H: tl.constexpr, INNER: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """out: [n · k, H] by assignment, not weighted yet."""
    blocks: tl.constexpr = H // BN
    for work in range(tl.program_id(0), tl.load(tiles) * blocks, PROGRAMS):
        tile, block = work // blocks, work % blocks
        row, end = tl.load(tile_row + tile), tl.load(tile_end + tile)
        first = tl.load(tile_expert + tile) * H + block * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, INNER, BK):
            acc = tl.dot(hidden_rows.load([row, k]), weight_rows.load([first, k]).T, acc)
        rows = row + tl.arange(0, BM)
        target = tl.load(order + rows, mask=rows < end, other=0).to(tl.int64)
        columns = block * BN + tl.arange(0, BN)
        where = out + target[:, None] * H + columns[None, :]
        tl.store(where, acc.to(out.dtype.element_ty), mask=(rows < end)[:, None])


@triton.jit
def _combine(placed, weights, out, H: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = Σ weight · the expert's row, in float32."""
    token, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(placed + (token * K + i) * H + columns, mask=columns < H, other=0.0)
        total += tl.load(weights + token * K + i) * row.to(tl.float32)
    tl.store(out + token * H + columns, total.to(out.dtype.element_ty), mask=columns < H)


def supports(x: Tensor, gate_up: Tensor, down: Tensor) -> bool:
    """Whether these kernels take such tensors: half precision, sizes in steps of 16."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and x.dtype == gate_up.dtype == down.dtype
        and gate_up.is_contiguous()
        and down.is_contiguous()
        and x.shape[1] % 16 == 0
        and down.shape[2] % 16 == 0
    )


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float
) -> Tensor:
    """As `m3agent.kernels.experts.routed_experts`, for what `supports` accepts."""
    x, chosen, weights = x.contiguous(), chosen.contiguous(), weights.contiguous()
    assigned, experts = chosen.numel(), down.shape[0]
    if x.shape[0] == 1:
        return one_token(x, chosen, weights, gate_up, down, alpha, limit)
    if assigned <= ROWS_32 * experts:
        rows = 16 if assigned <= ROWS_16 * experts else 32
        return few_rows(x, chosen, weights, gate_up, down, alpha, limit, rows)
    return many_rows(x, chosen, weights, gate_up, down, alpha, limit)


def plan(chosen: Tensor, experts: int, rows: int) -> Plan:
    """Tiles of at most `rows` rows. chosen: [n, k]."""
    assigned = chosen.numel()
    most = min(assigned, experts + assigned // rows)  # tiles that there can be

    def ints(size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, device=chosen.device)

    made = Plan(ints(assigned), ints(assigned), ints(most), ints(most), ints(most), ints(1))
    size = min(4096, triton.next_power_of_2(assigned))
    bins = triton.next_power_of_2(experts + 1)
    _plan[(experts,)](
        chosen, made.order, made.place, made.expert, made.row, made.end, made.tiles, assigned,
        experts, bins, rows, size, num_warps=8 if size == 4096 else 4,
    )  # fmt: skip
    return made


def one_token(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float
) -> Tensor:
    """Two kernels: no plan, no combining."""
    k, (_, hidden, inner) = chosen.shape[1], down.shape
    act, out = x.new_empty(k, inner), torch.empty_like(x)
    bn = _divisor(inner, 8)
    _one_gate_up[(k * (inner // bn),)](
        x, gate_up, act, chosen, alpha, limit, hidden, inner, bn, _divisor(hidden, 512), 3, num_warps=4
    )
    bn = _divisor(hidden, 8)
    _one_down[(hidden // bn,)](
        act, down, weights, chosen, out, hidden, inner, k, bn, _divisor(inner, 512), 3, num_warps=4
    )
    return out


def few_rows(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float, rows: int
) -> Tensor:
    """rows: 16 or 32, the height of a tile."""
    (n, k), (experts, hidden, inner) = chosen.shape, down.shape
    p = plan(chosen, experts, rows)
    where = (p.order, p.expert, p.row, p.end, p.tiles)
    act, placed = x.new_empty(n * k, inner), x.new_empty(n * k, hidden)
    bn, bk = _divisor(inner, 64), _divisor(hidden, 128)
    _few_gate_up[(p.expert.shape[0] * (inner // bn),)](
        x, gate_up, act, *where, alpha, limit, hidden, inner, k, rows, bn, bk, 5 if rows == 16 else 3, num_warps=4
    )
    bn, bk = _divisor(hidden, 64), _divisor(inner, 128)
    _few_down[(p.expert.shape[0] * (hidden // bn),)](
        act, down, placed, *where, hidden, inner, rows, bn, bk, 5 if rows == 16 else 3, num_warps=4
    )
    return combine(placed, weights)


def many_rows(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float
) -> Tensor:
    """A tile of 128 rows by 256 columns is what the registers hold; reading its operands from L2 is what limits it."""
    (n, k), (experts, hidden, inner) = chosen.shape, down.shape
    rows = 128
    p = plan(chosen, experts, rows)
    where = (p.expert, p.row, p.end, p.tiles)
    sorted_x, act, placed = x.new_empty(n * k, hidden), x.new_empty(n * k, inner), x.new_empty(n * k, hidden)
    block = min(2048, triton.next_power_of_2(hidden))
    _spread[(n, triton.cdiv(hidden, block))](x, p.place, sorted_x, hidden, k, block, num_warps=4)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 3
    bn, bk = _divisor(inner, 128), _divisor(hidden, 64)
    _many_gate_up[(programs,)](
        _blocks(sorted_x, rows, bk), _blocks(gate_up.view(-1, hidden), bn, bk), act, *where, alpha, limit,
        hidden, inner, rows, bn, bk, programs, num_warps=8, num_stages=3,
    )  # fmt: skip
    bn, bk = _divisor(hidden, 256), _divisor(inner, 64)
    _many_down[(programs,)](
        _blocks(act, rows, bk), _blocks(down.view(-1, inner), bn, bk), placed, p.order, *where,
        hidden, inner, rows, bn, bk, programs, num_warps=8, num_stages=3,
    )  # fmt: skip
    return combine(placed, weights)


def combine(placed: Tensor, weights: Tensor) -> Tensor:
    """placed: [n · k, hidden]; weights: [n, k] float32 → [n, hidden]."""
    (n, k), hidden = weights.shape, placed.shape[1]
    out = placed.new_empty(n, hidden)
    block = min(2048, triton.next_power_of_2(hidden))
    _combine[(n, triton.cdiv(hidden, block))](placed, weights, out, hidden, k, block, num_warps=4)
    return out


def _blocks(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def _divisor(size: int, most: int) -> int:
    """The largest power of two that divides `size`, at most `most`."""
    return min(size & -size, most)
