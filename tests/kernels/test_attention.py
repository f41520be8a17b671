"""Attention, block selection and their sparse union against loops in float64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m3agent.kernels import attention
from m3agent.kernels.attention import causal_attention, grouped_attention
from m3agent.kernels.segments import segment_attention
from m3agent.kernels.select import block_scores, past_scores, select_blocks, select_past
from m3agent.kernels.sparse_attention import sparse_attention, token_attention


def naive(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """One query and head at a time. seen: [n, kv_heads, t] bool."""
    n, heads, d = q.shape
    group = heads // k.shape[1]
    out = torch.zeros(n, heads, d, dtype=torch.float64)
    for i in range(n):
        for h in range(heads):
            keys = seen[i, h // group].nonzero().squeeze(1)
            scores = k[keys, h // group].double() @ q[i, h].double() / math.sqrt(d)
            out[i, h] = scores.softmax(0) @ v[keys, h // group].double()
    return out


def qkv(n: int, t: int, heads: int = 6, kv_heads: int = 2, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(n * 1000 + t)
    return (
        torch.randn(n, heads, d, generator=g),
        torch.randn(t, kv_heads, d, generator=g),
        torch.randn(t, kv_heads, d, generator=g),
    )


def causal(n: int, start: int, kv_heads: int = 2) -> Tensor:
    t = start + n
    return (torch.arange(t) <= torch.arange(start, t)[:, None])[:, None].expand(n, kv_heads, t)


@pytest.mark.parametrize(("n", "start"), [(1, 0), (1, 30), (9, 0), (9, 1), (9, 30)])
def test_causal_attention(n: int, start: int) -> None:
    q, k, v = qkv(n, start + n)
    assert (causal_attention(q, k, v, start) - naive(q, k, v, causal(n, start))).abs().max() < 2e-6


def test_tiles_of_a_long_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(20, 45)
    whole = causal_attention(q, k, v, 25)
    monkeypatch.setattr(attention, "MASK_LIMIT", 45 * 3)
    assert (causal_attention(q, k, v, 25) - whole).abs().max() < 2e-6


@pytest.mark.parametrize("n", [1, 5])
def test_mask_by_group(n: int) -> None:
    q, k, v = qkv(n, 12)
    seen = torch.rand(2, n, 12, generator=torch.Generator().manual_seed(n)) < 0.5
    seen[..., 0] = True
    assert (grouped_attention(q, k, v, seen) - naive(q, k, v, seen.transpose(0, 1))).abs().max() < 2e-6


@pytest.mark.parametrize("lengths", [[6], [4, 4, 4], [3, 8, 1]])
def test_segments_see_themselves_only(lengths: list[int]) -> None:
    n = sum(lengths)
    q, k, v = qkv(n, n, heads=3, kv_heads=3)
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (segment[:, None] == segment)[:, None].expand(n, 3, n)
    assert (segment_attention(q, k, v, lengths) - naive(q, k, v, seen)).abs().max() < 2e-6


def test_block_scores() -> None:
    iq, ik = torch.randn(5, 2, 8), torch.randn(15, 8)
    scores = block_scores(iq, ik, start=10, block=4)
    assert scores.shape == (5, 2, 4)
    for i in range(5):
        for h in range(2):
            for b in range(4):
                keys = [j for j in range(4 * b, min(4 * b + 4, 15)) if j <= 10 + i]
                expected = max((float(iq[i, h].double() @ ik[j].double()) for j in keys), default=-math.inf)
                assert scores[i, h, b].item() == pytest.approx(expected, abs=1e-5)


def test_scores_of_one_query_over_whole_blocks() -> None:
    iq, ik = torch.randn(2, 8), torch.randn(12, 8)
    assert past_scores(iq, ik, 4).equal(block_scores(iq[None], ik, 11, 4)[0])


def definition(scores: list[float], own: int, topk: int, local: int, initial: int) -> list[int]:
    """Of one query: forced blocks first, then by falling score, lower block first among equals."""
    near = {max(own - i, 0) for i in range(local)}

    def rank(b: int) -> tuple[int, float, int]:
        return (0 if b in near else 1 if b < initial else 2, 0.0 if b in near or b < initial else -scores[b], b)

    return sorted(range(own + 1), key=rank)[:topk]


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 3.0]), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_selection_with_ties_and_forced_blocks(
    values: list[float], extra: int, local: int, initial: int, within: int
) -> None:
    topk = max(local + initial, extra)
    start = (len(values) - 1) * 4 + within
    selected = select_blocks(torch.tensor([[values]]), start, 4, topk, local, initial)[0, 0].tolist()
    own = len(values) - 1
    assert selected == definition(values, own, topk, local, initial)
    if own >= topk > 1:
        past = select_past(torch.tensor([values[:own]]), topk - 1, local - 1, initial)[0].tolist()
        assert sorted(past) == sorted(set(selected) - {own})


def test_future_blocks_are_never_selected() -> None:
    scores = torch.full((2, 1, 4), float("-inf"))
    scores[0, 0, :1] = 1.0
    scores[1, 0, :2] = torch.tensor([1.0, -5.0])
    selected = select_blocks(scores, start=3, block=4, topk=3, local=2, initial=1)
    assert selected[:, 0].tolist() == [[0, -1, -1], [0, 1, -1]]


@pytest.mark.parametrize(("n", "start"), [(1, 43), (1, 40), (1, 47), (6, 40), (7, 40), (16, 32), (47, 0)])
def test_sparse_attention_over_scattered_pages(n: int, start: int) -> None:
    block, topk, t = 4, 3, start + n
    q, k, v = qkv(n, t)
    blocks = -(-t // block)
    table = torch.randperm(blocks + 4, generator=torch.Generator().manual_seed(t))[:blocks]
    # NaN, since even a masked key meets a weight of 0, and 0 · NaN is NaN
    k_pages, v_pages = torch.full((2, blocks + 4, block, 2, 8), math.nan)
    for j in range(t):
        k_pages[table[j // block], j % block] = k[j]
        v_pages[table[j // block], j % block] = v[j]
    scores = block_scores(torch.randn(n, 2, 8), torch.randn(t, 8), start, block)
    selected = select_blocks(scores, start, block, topk)

    seen = causal(n, start).clone()
    for i in range(n):
        for g in range(2):
            for b in set(range(blocks)) - set(selected[i, g].tolist()):
                seen[i, g, b * block : (b + 1) * block] = False
    found = sparse_attention(q, k_pages, v_pages, table, selected, start)
    assert (found - naive(q, k, v, seen)).abs().max() < 2e-6
    if n == 1:
        past = selected[0][selected[0] != start // block].view(2, -1)
        found = token_attention(q, k_pages, v_pages, table, past, start)
        assert (found - naive(q, k, v, seen)).abs().max() < 2e-6
