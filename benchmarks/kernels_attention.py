"""MiniMax Sparse Attention's core on one GPU, in M3's shape: index scoring, choice of blocks, sparse attention.

    python -m benchmarks.kernels_attention [--out benchmarks/results/kernels_attention.json]

Random data and shuffled pages, one layer in bf16: 64 query heads, 4 KV heads, head size 128, 4 index heads with one
index key, blocks of 128, 16 of them for each query. Every call is replayed from a CUDA graph, over as many inputs as it
takes to leave the L2 cache. The floor is the larger of arithmetic and bytes, of scoring and of attention, at the
ceilings that the script measures first.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from m3agent.kernels import msa
from m3agent.kernels.msa_launch import Choice, Paged
from m3agent.kernels.select import block_scores, select_blocks
from m3agent.kernels.sparse_attention import sparse_attention

HEADS, KV_HEADS, D, BLOCK = 64, 4, 128, 128
CHOICE = Choice(topk=16, local=1, initial=0)
K32, K128, M1 = 32768, 131072, 1048576
PAGES = 32 * K128 // BLOCK + 512


@dataclass
class Row:
    """Times in ms. `peer` is vLLM's Triton code, measured elsewhere on a card of the same kind; `bar` the aim."""

    new: int
    sequences: int
    context: int
    peer: float
    bar: float
    floor: float = 0.0
    ours: float = 0.0


ROWS = [
    Row(8192, 1, K32, 5.2, 2.2),
    Row(8192, 1, K128, 8.8, 3.8),
    Row(8192, 1, M1, 36.7, 17.0),
    Row(2048, 1, K32, 1.57, 0.6),
    Row(2048, 1, K128, 3.18, 1.0),
    Row(2048, 1, M1, 17.0, 4.5),
    Row(512, 1, K32, 0.67, 0.20),
    Row(512, 1, K128, 1.84, 0.30),
    Row(512, 1, M1, 12.5, 1.2),
    Row(64, 1, K32, 0.41, 0.08),
    Row(64, 1, K128, 1.49, 0.12),
    Row(64, 1, M1, 11.4, 0.28),
    Row(1, 1, K32, 0.016, 0.011),
    Row(1, 1, K128, 0.021, 0.016),
    Row(1, 1, M1, 0.094, 0.078),
    Row(1, 32, K32, 0.109, 0.098),
    Row(1, 32, K128, 0.299, 0.290),
]


class Data:
    """Pages of random keys and values that all rows share."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.k, self.v = self.random(PAGES, BLOCK, KV_HEADS, D), self.random(PAGES, BLOCK, KV_HEADS, D)
        self.ik = self.random(PAGES, BLOCK, D)
        self.q, self.iq = self.random(8192, HEADS, D), self.random(8192, KV_HEADS, D)

    def random(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_()

    def paged(self, new: int, sequences: int, context: int) -> Paged:
        pages = torch.randperm(PAGES, device="cuda")[: sequences * context // BLOCK]
        starts = torch.full((sequences,), context - new, device="cuda")
        return Paged(pages.view(sequences, -1).contiguous(), starts, context)

    def core(self, tokens: int, paged: Paged) -> Tensor:
        return msa.sparse(self.q[:tokens], self.iq[:tokens], self.k, self.v, self.ik, paged, CHOICE)


def replayed(calls: list[Callable[[], object]], repeats: int = 15) -> float:
    """Median milliseconds of one call, all of them replayed from one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times: list[float] = []
    for i in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(begin.elapsed_time(end) / len(calls))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """FLOP/s of a large bf16 product on random data, bytes/s of a large copy (read plus written)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    flops = 2 * 8192**3 / replayed([lambda: a @ b] * 4) * 1e3
    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    return flops, 2 * x.nbytes / replayed([lambda: torch.neg(x, out=y)] * 2) * 1e3  # a copy would go another way


def floor(row: Row, flops: float, speed: float) -> float:
    """The least milliseconds: each needed index key and each chosen block read once, each needed product done once."""
    seen = (row.context - row.new / 2) * row.new * row.sequences
    index_bytes = row.sequences * row.context * D * 2
    scoring = max(seen * KV_HEADS * 2 * D / flops, index_bytes / speed)
    blocks = row.context / BLOCK
    chosen = blocks * (1 - (1 - CHOICE.topk / blocks) ** row.new)  # expected, for random choices
    attended = row.new * row.sequences * CHOICE.topk * BLOCK * HEADS * D * 4
    kv_bytes = row.sequences * chosen * KV_HEADS * BLOCK * D * 2 * 2
    return 1e3 * (scoring + max(attended / flops, kv_bytes / speed))


def check(data: Data) -> None:
    """The core against its meaning in float64, at a length with a partial last page."""
    for new, start in [(1, 6123), (50, 6123), (300, 6123)]:
        paged = data.paged(new, 1, 51 * BLOCK)
        paged = Paged(paged.tables[:, : -(-(start + new) // BLOCK)], torch.tensor([start], device="cuda"), start + new)
        table = paged.tables[0]
        ik = data.ik[table].flatten(0, 1)[: start + new].double()
        scores = block_scores(data.iq[:new].double(), ik, start, BLOCK)
        selected = select_blocks(scores, start, BLOCK, CHOICE.topk)
        k, v = data.k[table].double(), data.v[table].double()
        places = torch.arange(len(table), device="cuda")
        expected = sparse_attention(data.q[:new].double(), k, v, places, selected, start)
        error = (data.core(new, paged).double() - expected).norm() / expected.norm()
        print(f"{new} new after {start}: relative error {error:.1e}")
        if not error < 1e-2:
            raise SystemExit("the result is wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels_attention.json"))
    out: Path = parser.parse_args().out
    data = Data()
    check(data)
    flops, speed = ceilings()
    print(f"{torch.cuda.get_device_name()}: {flops / 1e12:.0f} TFLOP/s bf16, {speed / 1e12:.2f} TB/s copy")
    print("| new | sequences | context | floor, ms | peer | bar | ours | peer / ours |", "|---" * 8 + "|", sep="\n")
    for row in ROWS:
        inputs = 12 if row.context * row.sequences <= K128 and row.new <= 512 else 4 if row.new <= 2048 else 1
        batches = [data.paged(row.new, row.sequences, row.context) for _ in range(inputs)]
        tokens = row.new * row.sequences
        row.floor = floor(row, flops, speed)
        row.ours = replayed([lambda p=paged, t=tokens: data.core(t, p) for paged in batches])
        cells = [row.new, row.sequences, row.context, f"{row.floor:.3g}", row.peer, row.bar, f"{row.ours:.4g}"]
        note = "" if row.ours <= row.bar else " over the bar"
        print("|", *(f"{cell} |" for cell in cells), f"{row.peer / row.ours:.2f} |{note}", flush=True)
    figures = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bf16_tflops": round(flops / 1e12, 1),
        "copy_tb_s": round(speed / 1e12, 3),
        "rows_ms": [{k: round(v, 5) if isinstance(v, float) else v for k, v in asdict(row).items()} for row in ROWS],
    }
    out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
