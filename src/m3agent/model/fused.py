"""The pass of text.py on a GPU: one copy of numbers to the device, then few, fused kernels a layer.

Nothing in `hidden_states` waits for the device or depends on numbers that only the host has, beside the shape of the
batch; so a decode step can be captured as a graph (graphs.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels import msa
from m3agent.kernels.experts import routed_experts
from m3agent.model.batch import Span, check
from m3agent.model.config import TextConfig
from m3agent.model.pages import KVPages
from m3agent.model.weights import DenseWeights, MoeWeights, Weights

Rope = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Together:
    """Spans of equal length in a row, rows `begin` to `end` of the batch, whose attention runs in one go."""

    begin: int
    end: int
    paged: msa.Paged


@dataclass(frozen=True)
class Inputs:
    """A batch on the device. ids, positions, slots: [tokens]; a slot is page · block + offset."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    groups: list[Together]


def supported(w: Weights, t: TextConfig, pages: KVPages) -> bool:
    """Whether this pass takes the model: half precision on Hopper, heads and index heads of one width."""
    k = pages.k[0]
    if k.device.type != "cuda":
        return False
    attention = [layer.attention for layer in w.layers]
    if not msa.supported(k.new_empty(1, t.num_attention_heads, t.head_dim), k, pages.ik[-1], t.local_blocks):
        return False
    experts = [layer.mlp for layer in w.layers if isinstance(layer.mlp, MoeWeights)]
    return all(a.index_gain is None for a in attention) and all(isinstance(e.gate_up, Tensor) for e in experts)


def place_on_device(spans: Sequence[Span], block: int, device: torch.device) -> Inputs:
    """All that a batch's kernels read, by one copy. Raises ValueError for a span that its page table cannot hold."""
    check(spans, block)
    runs = _runs(spans)
    tokens, sequences = sum(span.ids.shape[0] for span in spans), len(spans)
    widths = [max(span.table.shape[0] for span in run) for run in runs]
    sizes = [tokens, tokens, tokens, sequences, *(len(run) * width for run, width in zip(runs, widths, strict=True))]
    packed = torch.zeros(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    ids, positions, slots, starts, *tables = packed.split(sizes)
    begin = 0
    for number, span in enumerate(spans):
        end = begin + span.ids.shape[0]
        ids[begin:end] = span.ids
        torch.arange(span.start, span.end, out=positions[begin:end])
        starts[number] = span.start
        here = positions[begin:end]
        slots[begin:end] = span.table.cpu()[here // block] * block + here % block
        begin = end
    for table, run in zip(tables, runs, strict=True):
        for row, span in zip(table.view(len(run), -1), run, strict=True):
            row[: span.table.shape[0]] = span.table
    ids, positions, slots, starts, *tables = packed.to(device, non_blocking=True).split(sizes)
    groups: list[Together] = []
    begin = first = 0
    for table, run in zip(tables, runs, strict=True):
        end = begin + len(run) * run[0].ids.shape[0]
        longest = max(span.end for span in run)
        paged = msa.Paged(table.view(len(run), -1), starts[first : first + len(run)], longest)
        groups.append(Together(begin, end, paged))
        begin, first = end, first + len(run)
    return Inputs(ids, positions, slots, groups)


def _runs(spans: Sequence[Span]) -> list[list[Span]]:
    """One-token spans in a row together, every other span by itself."""
    runs: list[list[Span]] = []
    for span in spans:
        if runs and span.ids.shape[0] == 1 == runs[-1][0].ids.shape[0]:
            runs[-1].append(span)
        else:
            runs.append([span])
    return runs


def hidden_states(
    x: Tensor, inputs: Inputs, w: Weights, t: TextConfig, rope: Rope, pages: KVPages
) -> tuple[Tensor, Tensor]:
    """x: embeddings [tokens, hidden] → what the last layer leaves, as two summands. Writes into the pages.

    rope: the tables for all positions.
    """
    from m3agent.kernels.norm_rope_triton import Heads, heads_to_pages
    from m3agent.kernels.norm_triton import add_norm

    eps = t.rms_norm_eps
    delta: Tensor | None = None
    for layer, weights in enumerate(w.layers):
        k, v, ik = pages.k[layer], pages.v[layer], pages.ik[layer]
        index = 0 if ik is None else t.index_heads
        heads = Heads(t.num_attention_heads, t.num_key_value_heads, index, t.head_dim)
        x, normed = add_norm(x, delta, weights.attention.norm, eps)
        rows = _linear(normed, weights.attention.qkv)
        places = (inputs.positions, inputs.slots)
        q, iq = heads_to_pages(rows, weights.attention.gain, *rope, *places, heads, k, v, ik, eps)
        attended = _attend(q, iq, k, v, ik, t, inputs.groups)
        x, normed = add_norm(x, _linear(attended, weights.attention.out), weights.mlp_norm, eps)
        delta = _mlp(normed, weights.mlp, t)
    assert delta is not None
    return x, delta


def head_logits(x: Tensor, delta: Tensor, w: Weights, t: TextConfig) -> Tensor:
    """The summands of `hidden_states` → float32 logits [tokens, vocab]."""
    from m3agent.kernels.norm_triton import add_norm

    return _linear(add_norm(x, delta, w.norm, t.rms_norm_eps)[1], w.head).float()


def _attend(
    q: Tensor, iq: Tensor | None, k: Tensor, v: Tensor, ik: Tensor | None, t: TextConfig, groups: list[Together]
) -> Tensor:
    """[tokens, heads · head_dim], group by group."""
    choice = msa.Choice(t.topk_blocks, t.local_blocks, t.init_blocks)
    outs: list[Tensor] = []
    for g in groups:
        here = slice(g.begin, g.end)
        if iq is None or ik is None:
            outs.append(msa.full(q[here], k, v, g.paged))
        else:
            outs.append(msa.sparse(q[here], iq[here], k, v, ik, g.paged, choice))
    return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


def _mlp(x: Tensor, w: DenseWeights | MoeWeights, t: TextConfig) -> Tensor:
    """x: [tokens, hidden] → the same; the shared expert's product adds to the routed ones' sum."""
    from m3agent.kernels.router_triton import choose

    if isinstance(w, DenseWeights):
        return _linear(_activated(x, w, t), w.down)
    down = w.shared.down
    assert isinstance(down, Tensor)
    logits = F.linear(x.float(), w.router)
    chosen, weights = choose(logits, w.bias, t.num_experts_per_tok, t.routed_scaling_factor)
    routed = routed_experts(x, chosen, weights, w.gate_up, w.down, t.swiglu_alpha, t.swiglu_limit)
    return torch.addmm(routed, _activated(x, w.shared, t), down.T)


def _activated(x: Tensor, w: DenseWeights, t: TextConfig) -> Tensor:
    from m3agent.kernels.swiglu_triton import swiglu_rows

    return swiglu_rows(_linear(x, w.gate_up), t.swiglu_alpha, t.swiglu_limit)


def _linear(x: Tensor, weight: object) -> Tensor:
    assert isinstance(weight, Tensor)  # packed weights are for the CPU
    return F.linear(x, weight)
