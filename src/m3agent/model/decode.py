"""One token of one sequence on the CPU: what text.py computes, in fewer operations.

At this size starting an operation costs as much as the operation. So norms and weighted sums take Python numbers, and
the experts share one activation.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.linear import linear
from m3agent.kernels.swiglu import swiglu_oai
from m3agent.model.batch import Batch
from m3agent.model.config import TextConfig
from m3agent.model.pages import KVPages
from m3agent.model.text import Rope, attend
from m3agent.model.weights import DenseWeights, MoeWeights, Weights


def decode_token(x: Tensor, w: Weights, t: TextConfig, rope: Rope, batch: Batch, pages: KVPages) -> Tensor:
    """x: the token's embedding, [1, hidden] float32 → its logits, [1, vocab] float32. Writes into the pages."""
    eps = t.rms_norm_eps
    for layer, weights in enumerate(w.layers):
        rows = linear(_norm(x, weights.attention.norm, eps), weights.attention.qkv)
        x = x + linear(attend(rows, weights.attention, layer, t, rope, batch, pages), weights.attention.out)
        x = _add_mlp(x, _norm(x, weights.mlp_norm, eps), weights.mlp, t)
    return linear(_norm(x, w.norm, eps), w.head)


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """RMSNorm of one row, [1, hidden]."""
    row = x.view(-1)
    mean = torch.dot(row, row).item() / row.shape[0]
    return torch.mul(x, gain).mul_(1.0 / math.sqrt(mean + eps))


def _add_mlp(x: Tensor, normed: Tensor, w: DenseWeights | MoeWeights, t: TextConfig) -> Tensor:
    """x + mlp(normed), both [1, hidden], in place: each expert's part is added with its weight."""
    if isinstance(w, DenseWeights):
        parts = [(1.0, w.gate_up, w.down)]
    else:
        parts = [(weight, w.gate_up[expert], w.down[expert]) for expert, weight in _route(normed, w, t)]
        parts.append((1.0, w.shared.gate_up, w.shared.down))
    halves = [linear(normed, gate_up).chunk(2, dim=-1) for _, gate_up, _ in parts]
    gate, up = torch.cat([gate for gate, _ in halves], dim=-1), torch.cat([up for _, up in halves], dim=-1)
    rows = swiglu_oai(gate, up, t.swiglu_alpha, t.swiglu_limit).split([g.shape[1] for g, _ in halves], dim=-1)
    for (weight, _, down), row in zip(parts, rows, strict=True):
        x.add_(linear(row, down), alpha=weight)
    return x


def _route(x: Tensor, w: MoeWeights, t: TextConfig) -> list[tuple[int, float]]:
    """The chosen experts of one row with their weights, as `kernels.router` has it, scaled."""
    scores = torch.sigmoid(F.linear(x, w.router))
    chosen: list[int] = torch.topk(scores + w.bias, t.num_experts_per_tok).indices[0].tolist()
    score: list[float] = scores[0].tolist()
    scale = t.routed_scaling_factor / sum(score[expert] for expert in chosen)
    return [(expert, score[expert] * scale) for expert in chosen]
