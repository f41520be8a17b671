"""The routed experts of M3's real shapes on one GPU: `python -m benchmarks.kernels_experts`.

128 experts of 3,072, hidden 6,144, four a token, bf16, random data: plan, both products and the weighted sum, from one
token to a long prompt, routed evenly and by a power law. `floor` is the larger of bytes (each touched expert's weights
once) over the card's copy rate and operations over its matrix rate, both measured here; `grouped_mm` is the same in
torch, around its grouped product; `error` is against float32. Prints a table and writes
benchmarks/results/kernels_experts.json.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu import ceilings, milliseconds, report, require_gpu
from m3agent.kernels.experts import routed_experts
from m3agent.kernels.swiglu import swiglu_oai

HIDDEN, INNER, EXPERTS, CHOSEN = 6144, 3072, 128, 4
ALPHA, LIMIT = 1.702, 7.0
# (tokens, exponent of the power law), bar in ms
ROWS = [
    (1, 0.0, 0.112), (16, 0.0, 1.55), (64, 0.0, None), (128, 0.0, 3.4), (512, 0.0, None), (2048, 0.0, None),
    (4096, 0.0, 3.9), (16384, 0.0, 10.4), (4096, 1.2, 4.4), (16384, 1.2, 11.4),
]  # fmt: skip

Weights = tuple[Tensor, Tensor]


def weights() -> Weights:
    """gate and up [experts, 2 · inner, hidden], down [experts, hidden, inner]."""
    gate_up = torch.empty(EXPERTS, 2 * INNER, HIDDEN, device="cuda", dtype=torch.bfloat16)
    down = torch.empty(EXPERTS, HIDDEN, INNER, device="cuda", dtype=torch.bfloat16)
    for expert in range(EXPERTS):
        gate_up[expert].normal_(0, HIDDEN**-0.5)
        down[expert].normal_(0, INNER**-0.5)
    return gate_up, down


def tokens(n: int, exponent: float) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs [n, hidden], chosen experts [n, 4] and their weights."""
    likely = torch.arange(1, EXPERTS + 1, device="cuda").float() ** -exponent
    likely = likely[torch.randperm(EXPERTS, device="cuda")]
    chosen = torch.multinomial(likely.expand(n, EXPERTS), CHOSEN)
    share = torch.rand(n, CHOSEN, device="cuda") + 0.1
    x = torch.randn(n, HIDDEN, device="cuda", dtype=torch.bfloat16)
    return x, chosen, share / share.sum(-1, keepdim=True) * 2


def in_torch(x: Tensor, chosen: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Sort, torch's grouped product twice, weigh and add."""
    order = chosen.flatten().argsort(stable=True)
    ends = torch.bincount(chosen.flatten(), minlength=EXPERTS).cumsum(0).to(torch.int32)
    gate, up = torch._grouped_mm(x[order // CHOSEN], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    rows = torch._grouped_mm(swiglu_oai(gate, up, ALPHA, LIMIT), down.transpose(1, 2), offs=ends)
    placed = torch.empty_like(rows).index_copy_(0, order, rows).view(*chosen.shape, -1)
    return torch.bmm(share.to(x.dtype).unsqueeze(1), placed).squeeze(1)


def error(x: Tensor, chosen: Tensor, share: Tensor, gate_up: Tensor, down: Tensor) -> float:
    """Relative, against float32 on the same inputs; the first 256 tokens tell."""
    x, chosen, share = x[:256], chosen[:256], share[:256]
    found = routed_experts(x, chosen, share, gate_up, down, ALPHA, LIMIT).float()
    wanted = torch.zeros_like(found)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token].float(), gate_up[expert].float()).chunk(2, -1)
        out = F.linear(swiglu_oai(gate, up, ALPHA, LIMIT), down[expert].float())
        wanted.index_add_(0, token, share[token, place, None] * out)
    return float((found - wanted).norm() / wanted.norm())


def floor_ms(row: dict[str, Any], ceiling: dict[str, float]) -> float:
    bytes_read, operations = row["experts"] * 6 * HIDDEN * INNER, row["tokens"] * CHOSEN * 6 * HIDDEN * INNER
    return max(bytes_read / ceiling["copy_tb_s"], operations / ceiling["bf16_tflop_s"]) / 1e9


def measure(n: int, exponent: float, bar: float | None, matrices: Weights) -> dict[str, Any]:
    sets = [tokens(n, exponent) for _ in range(8 if n <= 128 else 2)]
    ours = milliseconds([lambda s=s: routed_experts(*s, *matrices, ALPHA, LIMIT) for s in sets], graph=n <= 512)
    torch_ms = milliseconds([lambda s=s: in_torch(*s, *matrices) for s in sets])
    return {
        "tokens": n,
        "routing": f"power law {exponent}" if exponent else "uniform",
        "experts": sets[0][1].unique().numel(),
        "ours_ms": ours,
        "bar_ms": bar,
        "grouped_mm_ms": torch_ms,
        "error": error(*sets[0], *matrices),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", help="where the figures go, instead of benchmarks/results")
    arguments = parser.parse_args()
    require_gpu()
    torch.manual_seed(0)
    matrices = weights()
    rows = [measure(n, exponent, bar, matrices) for n, exponent, bar in ROWS]
    ceiling = ceilings()  # last: they heat the card
    report("kernels_experts", ceiling, [{**row, "floor_ms": floor_ms(row, ceiling)} for row in rows], arguments.out)


if __name__ == "__main__":
    main()
