"""Gated experts: each token through its chosen ones and the shared one, summed by the router's weights."""

from __future__ import annotations

import torch
from torch import Tensor

from m3agent.kernels.linear import HalfMatrix, Matrix, linear
from m3agent.kernels.swiglu import swiglu_oai

Experts = Tensor | list[HalfMatrix]  # a matrix for each expert


def gated_mlp(x: Tensor, gate_up: Matrix, down: Matrix, alpha: float, limit: float) -> Tensor:
    """x: [n, hidden]; gate_up: [2 · inner, hidden], gate rows first; down: [hidden, inner]. Returns [n, hidden]."""
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return linear(swiglu_oai(gate, up, alpha, limit), down)


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Experts, down: Experts, alpha: float, limit: float
) -> Tensor:
    """Σ over a token's experts of weight · expert(x); only chosen experts are touched.

    x: [n, hidden]; chosen: [n, k] expert ids; weights: [n, k] float32; gate_up: [experts, 2 · inner, hidden];
    down: [experts, hidden, inner]. Returns [n, hidden].
    """
    if x.is_cuda:
        from m3agent.kernels import experts_triton  # torch brings Triton along where it finds GPUs

        if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and experts_triton.supports(x, gate_up, down):
            return experts_triton.routed_experts(x, chosen, weights, gate_up, down, alpha, limit)
    n, k = chosen.shape
    if n == 1:
        return _one_token(x, chosen[0].tolist(), weights, gate_up, down, alpha, limit)
    order = chosen.flatten().argsort(stable=True)  # rows (token, place) sorted by expert
    counts = torch.bincount(chosen.flatten(), minlength=len(gate_up)).tolist()
    rows = x[order // k]  # [n · k, hidden]
    outs: list[Tensor] = []
    begin = 0
    for expert, count in enumerate(counts):
        if count:
            outs.append(gated_mlp(rows[begin : begin + count], gate_up[expert], down[expert], alpha, limit))
            begin += count
    placed = torch.empty_like(rows).index_copy_(0, order, torch.cat(outs)).view(n, k, -1)
    return torch.bmm(weights.unsqueeze(1), placed.float()).squeeze(1).to(x.dtype)


def _one_token(
    x: Tensor, chosen: list[int], weights: Tensor, gate_up: Experts, down: Experts, alpha: float, limit: float
) -> Tensor:
    """Decoding has no rows to sort, and its experts can share one activation."""
    gate, up = torch.cat([linear(x, gate_up[expert]) for expert in chosen]).chunk(2, dim=-1)
    rows = swiglu_oai(gate, up, alpha, limit).split(1)  # one row an expert
    outs = torch.cat([linear(row, down[expert]) for row, expert in zip(rows, chosen, strict=True)])
    return torch.mm(weights, outs.float()).to(x.dtype)
