"""Routed experts: each token through its chosen gated MLPs, the outputs summed by the router's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from m3agent.kernels.linear import linear
from m3agent.kernels.swiglu import swiglu_oai


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float) -> Tensor:
    """x: [n, hidden]; gate_up: [2 · inner, hidden], gate rows first; down: [hidden, inner]. Returns [n, hidden]."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(swiglu_oai(gate, up, alpha, limit), down)


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor, alpha: float, limit: float
) -> Tensor:
    """Σ over a token's experts of weight · expert(x).

    x: [n, hidden]; chosen: [n, k] expert ids; weights: [n, k] float32; gate_up: [experts, 2 · inner, hidden];
    down: [experts, hidden, inner]. Only chosen experts are touched. Returns [n, hidden].
    """
    n, k = chosen.shape
    if n == 1:  # decoding: no rows to sort
        outs = [gated_mlp(x, gate_up[expert], down[expert], alpha, limit) for expert in chosen[0].tolist()]
        return torch.mm(weights, torch.cat(outs).float()).to(x.dtype)
    order = chosen.flatten().argsort(stable=True)  # rows (token, place) sorted by expert
    counts = torch.bincount(chosen.flatten(), minlength=gate_up.shape[0]).tolist()
    rows = x[order // k]  # [n · k, hidden]
    outs = []
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            outs.append(gated_mlp(rows[begin : begin + count], gate_up[expert], down[expert], alpha, limit))
            begin += count
    placed = torch.empty_like(rows).index_copy_(0, order, torch.cat(outs)).view(n, k, -1)
    return torch.bmm(weights.unsqueeze(1), placed.float()).squeeze(1).to(x.dtype)
