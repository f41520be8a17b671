"""A whole model through the fused pass: prefill, extension and decoding in one batch; what a graph would replay."""

from __future__ import annotations

import pytest
import torch

from m3agent.kernels import msa
from m3agent.model import KVPages, M3Model, Span, fused, graphs
from tests.model.tiny import random_ids, random_tensors, tiny_config

pytest.importorskip("triton")

DEVICE, DTYPE = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
NEAR = 0.05 if DEVICE == "cuda" else 1e-5


def passes(model: M3Model) -> torch.Tensor:
    """Logits of three passes over three sequences on scattered pages: start, go on, decode."""
    pages = KVPages.allocate(model.config, 20, dtype=DTYPE, device=DEVICE)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    tables = [order[:6], order[6:8], order[8:16]]
    ids = [random_ids(n, n).to(DEVICE) for n in (72, 21, 98)]
    outs: list[torch.Tensor] = []
    for cuts in [((0, 40), (0, 20), (0, 90)), ((40, 71), None, (90, 97)), ((71, 72), (20, 21), (97, 98))]:
        spans = [Span(ids[i][c[0] : c[1]], c[0], tables[i]) for i, c in enumerate(cuts) if c]
        outs += model.forward(spans, pages, "all")
    return torch.cat(outs)


def test_the_model_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = {"topk_blocks": 4, "local_blocks": 2, "init_blocks": 1}
    config = tiny_config(num_attention_heads=8, block_size=16, num_hidden_layers=2, **choice)
    model = M3Model(config, random_tensors(config), dtype=DTYPE, device=DEVICE)
    monkeypatch.setattr(fused, "supported", lambda *_: False)
    expected = passes(model)
    monkeypatch.setattr(fused, "supported", lambda *_: True)
    monkeypatch.setattr(msa, "PROGRAMS", 8)
    monkeypatch.setattr(msa, "SPAN_LIMIT", 35)
    out = passes(model)
    assert (out - expected).norm() <= NEAR * expected.norm()


def test_a_decode_step_with_rows_that_fill_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sequences in a step for four, with page tables longer than they need: pages and logits as without."""
    config = tiny_config(num_attention_heads=8, block_size=16, num_hidden_layers=2, topk_blocks=4)
    model = M3Model(config, random_tensors(config), dtype=DTYPE, device=DEVICE)
    monkeypatch.setattr(fused, "supported", lambda *_: True)
    pages = [KVPages.allocate(config, 20, dtype=DTYPE, device=DEVICE) for _ in range(2)]
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1))
    tables, lengths = [order[:6], order[6:8], order[8:15]], [80, 21, 97]
    ids = [random_ids(n + 1, n) for n in lengths]
    for each in pages:
        model.forward([Span(i[:-1], 0, table) for i, table in zip(ids, tables, strict=True)], each)
    spans = [Span(i[-1:], n, table) for i, n, table in zip(ids, lengths, tables, strict=True)]
    expected = torch.cat(model.forward(spans, pages[0]))
    numbers = graphs.numbers_of(spans, 4, 16, 16).to(DEVICE)
    with torch.inference_mode():
        out = graphs.step(numbers, 4, model.weights, config.text, model._rope, pages[1])
    assert (out[:3] - expected).norm() <= NEAR * expected.norm()
    for ours, theirs in zip(pages[1].k, pages[0].k, strict=True):
        assert (ours - theirs).norm() <= NEAR * theirs.norm()


def test_who_is_supported() -> None:
    q, k = torch.zeros(1, 8, 16, device=DEVICE, dtype=DTYPE), torch.zeros(2, 16, 2, 16, device=DEVICE, dtype=DTYPE)
    hopper = DEVICE == "cuda" and torch.cuda.get_device_capability() == (9, 0)
    assert msa.supported(q, k) == hopper
    assert not msa.supported(q.float(), k.float())
    assert not msa.supported(q[:, :, :12], k[..., :12])
    assert not msa.supported(q.repeat(1, 3, 1), k)
    assert not msa.supported(q, k, local=0)
