"""Pages: chunked, cached and uncached passes agree, whatever pages a sequence stands on."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from m3agent.kernels.linear import FBGEMM
from m3agent.model import KVPages, M3Config, M3Model, Span
from tests.model.tiny import all_logits, plain, random_ids, random_tensors, scattered, tiny_config

TOKENS = 173  # 22 blocks of 8, the last one partial; sixteen, or three, are selected
CONFIGS = {
    "topk16": tiny_config(),
    "topk3": tiny_config(topk_blocks=3),
    "first_blocks": tiny_config(topk_blocks=4, init_blocks=1, local_blocks=2),
}
MODELS = {name: M3Model(config, random_tensors(config)) for name, config in CONFIGS.items()}


def chunked(model: M3Model, ids: Tensor, cuts: list[int], pages: KVPages, table: Tensor, start: int = 0) -> Tensor:
    """Logits of ids[start:] in chunks that end at the cuts and at the end; earlier tokens are in the pages."""
    outs: list[Tensor] = []
    for end in [*cuts, len(ids)]:
        outs += model.forward([Span(ids[start:end], start, table)], pages, "all")
        start = end
    return torch.cat(outs)


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=15)
@given(cuts=st.sets(st.integers(1, TOKENS - 1), max_size=6), seed=st.integers(0, 99))
def test_chunks_equal_one_pass(name: str, cuts: set[int], seed: int) -> None:
    model, ids = MODELS[name], random_ids(TOKENS)
    pages, table = scattered(model.config, TOKENS, seed)
    logits = chunked(model, ids, sorted(cuts), pages, table)
    assert (logits - all_logits(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_token_by_token_equals_one_pass(name: str) -> None:
    model, ids = MODELS[name], random_ids(TOKENS)
    pages, table = scattered(model.config, TOKENS)
    logits = chunked(model, ids, list(range(1, TOKENS)), pages, table)
    assert (logits - all_logits(model, ids)).abs().max() < 1e-5


@pytest.mark.parametrize("kept", [8, 20, 64, 131])
def test_reused_prefix_gives_the_same_bits(kept: int) -> None:
    """The same chunks after an earlier run's pages, or after fresh ones: no difference, not even in the last bit."""
    model, ids = MODELS["topk3"], random_ids(TOKENS)
    cuts = [kept, 150]
    pages, table = scattered(model.config, TOKENS)
    fresh = chunked(model, ids, cuts, pages, table)

    other = torch.cat((ids[:kept], random_ids(TOKENS - kept, seed=7)))
    pages, table = scattered(model.config, TOKENS)
    chunked(model, other, cuts, pages, table)
    reused = chunked(model, ids, cuts[1:], pages, table, start=kept)
    assert reused.equal(fresh[kept:])


def test_page_order_does_not_change_a_bit() -> None:
    model, ids = MODELS["topk3"], random_ids(TOKENS)
    pages, table = scattered(model.config, TOKENS)
    assert Span(ids, 0, table).first_page is None
    row = torch.arange(5, 5 + len(table))
    in_a_row = KVPages.allocate(model.config, 5 + len(table))
    assert Span(ids, 0, row).first_page == 5
    cuts = [50, 100, 101]
    assert chunked(model, ids, cuts, pages, table).equal(chunked(model, ids, cuts, in_a_row, row))


def test_stale_pages_do_not_show() -> None:
    """Whatever an earlier sequence left behind a partial page is never seen."""
    model, ids = MODELS["topk3"], random_ids(60)
    pages, table = scattered(model.config, TOKENS)
    for tensors in (pages.k, pages.v, pages.ik):
        for tensor in tensors:
            if tensor is not None:
                tensor.fill_(1e4)
    assert chunked(model, ids, [13, 27, 59], pages, table).allclose(all_logits(model, ids), atol=1e-5)


def test_decoding_in_one_batch_with_prefill() -> None:
    """Two sequences that decode and one that starts, in one forward pass, against each alone."""
    model = MODELS["topk3"]
    pages = KVPages.allocate(model.config, 60)
    first, second, third = random_ids(70, 1), random_ids(9, 2), random_ids(33, 3)
    tables = [torch.arange(0, 10), torch.tensor([40, 12, 33]), torch.arange(50, 56)]
    model.forward([Span(first[:-1], 0, tables[0]), Span(second[:-1], 0, tables[1])], pages)
    outs = model.forward(
        [Span(first[-1:], 69, tables[0]), Span(third, 0, tables[2]), Span(second[-1:], 8, tables[1])], pages
    )
    for ids, logits in zip((first, third, second), outs, strict=True):
        assert logits.shape == (1, 97)
        assert (logits - all_logits(model, ids)[-1:]).abs().max() < 1e-5


def test_copied_page_holds_index_keys_too() -> None:
    model, ids = MODELS["topk3"], random_ids(90)
    pages = KVPages.allocate(model.config, 30)
    table = torch.arange(12)
    model.forward([Span(ids[:84], 0, table)], pages)
    fork = table.clone()
    for block in range(11):
        fork[block] = 29 - block
        pages.copy_page(block, 29 - block)
    for tensors in (pages.k, pages.v, pages.ik):
        for tensor in tensors:
            if tensor is not None:
                tensor[:11] = float("nan")
    logits = model.forward([Span(ids[84:], 84, fork)], pages)[0]
    assert (logits - all_logits(model, ids)[-1:]).abs().max() < 1e-5


def test_bytes_per_page_is_what_is_allocated() -> None:
    config: M3Config = CONFIGS["topk3"]
    pages = KVPages.allocate(config, 7, torch.bfloat16)
    total = sum(x.nbytes for xs in (pages.k, pages.v, pages.ik) for x in xs if x is not None)
    assert total == 7 * KVPages.bytes_per_page(config, torch.bfloat16)


def test_spans_that_cannot_run() -> None:
    model = MODELS["topk3"]
    pages = KVPages.allocate(model.config, 4)
    with pytest.raises(ValueError, match="2 pages of 8 tokens cannot hold 17 tokens"):
        model.forward([Span(random_ids(17), 0, torch.arange(2))], pages)
    with pytest.raises(ValueError, match="at least one token"):
        model.forward([Span(random_ids(0), 3, torch.arange(2))], pages)
    with pytest.raises(ValueError, match="3 media rows at 2 leave their span of 4 tokens"):
        model.forward([Span(random_ids(4), 0, torch.arange(2), [(2, torch.zeros(3, 48))])], pages)


def test_pixels_that_do_not_fit() -> None:
    model = MODELS["topk3"]
    with pytest.raises(ValueError, match="multiples of 2"):
        model.encode_media(torch.zeros(12, 96), [(1, 3, 4)])
    with pytest.raises(ValueError, match=r"pixels are \[12, 96\]; the grids ask for \[16, 96\]"):
        model.encode_media(torch.zeros(12, 96), [(1, 4, 4)])


def test_float16_weights_on_the_cpu() -> None:
    """bfloat16 weights fit into float16, and compute in float32; without FBGEMM a single row is rounded to float16."""
    config = CONFIGS["topk3"]
    tensors = {name: x.bfloat16().float() for name, x in random_tensors(config).items()}
    ids = random_ids(60)
    exact = all_logits(M3Model(config, tensors), ids)
    model = M3Model(config, tensors, dtype=torch.float16)
    assert plain(model.weights.head).dtype is torch.float16
    assert model.dtype is torch.float32
    assert (all_logits(model, ids) - exact).abs().max() < 1e-5
    pages, table = scattered(config, 60)
    decoded = chunked(model, ids, list(range(1, 60)), pages, table)
    error = (decoded - exact).abs()
    assert error.median() < (1e-5 if FBGEMM else 1e-3)
    assert model.encode_media(torch.randn(16, 96), [(1, 4, 4)]).dtype is torch.float32


@pytest.mark.parametrize("name", MODELS)
def test_what_others_left_in_the_pages_is_never_read(name: str) -> None:
    """A sequence that overflowed leaves NaN behind; who gets its pages must not notice."""
    model, ids = MODELS[name], random_ids(TOKENS)
    pages, table = scattered(model.config, TOKENS)
    for tensor in (*pages.k, *pages.v, *pages.ik):
        if tensor is not None:
            tensor.fill_(torch.nan)
    logits = chunked(model, ids, [150, 151, 152], pages, table)
    assert (logits - all_logits(model, ids)).abs().max() < 1e-5
