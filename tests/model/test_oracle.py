"""The same logits and tokens as transformers' `minimax_m3_vl`, whose code shares nothing with this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3agent.model import M3Config, M3Model, Span, load_model
from tests.model.oracle import transformers_logits, transformers_model
from tests.model.tiny import all_logits, greedy, random_ids, random_tensors, rows_at, scattered, tiny_config

CONFIGS: dict[str, dict[str, Any]] = {
    "topk16_block8": {},
    "topk3_block16": {"topk_blocks": 3, "block_size": 16},
    "wide_index_and_local": {"index_dim": 24, "topk_blocks": 4, "local_blocks": 2},
    "whole_head_turns": {"rotary_dim": 16, "rope_theta": 10_000.0, "topk_blocks": 5},
    "many_experts": {"num_local_experts": 20, "num_experts_per_tok": 5, "num_key_value_heads": 3, "index_heads": 3},
    "dense_experts_swapped": {"sparse_layers": (True, False, True, False), "moe_layers": (True, True, False, False)},
}


def pair(config: M3Config, folder: Path, seed: int = 0) -> tuple[M3Model, Any]:
    tensors = random_tensors(config, seed)
    return M3Model(config, tensors), transformers_model(config, tensors, folder)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("tokens", [7, 211])
def test_text_logits(name: str, tokens: int, tmp_path: Path) -> None:
    """211 tokens are 27 blocks of 8, the last one partial: sixteen are kept and eleven dropped."""
    model, other = pair(tiny_config(**CONFIGS[name]), tmp_path)
    ids = random_ids(tokens)
    ours, theirs = all_logits(model, ids), transformers_logits(other, ids)
    assert (ours - theirs).abs().max() < 1e-4
    assert ours.argmax(-1).equal(theirs.argmax(-1))


def test_selection_matters_at_this_length(tmp_path: Path) -> None:
    """The texts above would be no test of the selection if dropping it changed nothing."""
    config = tiny_config()
    tensors = random_tensors(config)
    ids = random_ids(211)
    sparse = all_logits(M3Model(config, tensors), ids)
    full = all_logits(M3Model(tiny_config(topk_blocks=27), tensors), ids)
    assert (sparse[:128] - full[:128]).abs().max() < 1e-4
    assert (sparse[128:] - full[128:]).abs().max() > 0.1


def pixels_for(config: M3Config, grids: list[tuple[int, int, int]], seed: int) -> Tensor:
    assert config.vision is not None
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, config.vision.patch_channels, generator=torch.Generator().manual_seed(seed))


def with_placeholders(token: int, runs: list[int], seed: int) -> Tensor:
    """Text with one run of placeholders for each number."""
    parts = [random_ids(5, seed)]
    for i, run in enumerate(runs):
        parts += [torch.full((run,), token), random_ids(4 + i, seed + i + 1)]
    return torch.cat(parts)


MEDIA: dict[str, tuple[list[tuple[int, int, int]], list[tuple[int, int, int]]]] = {
    "image": ([(1, 4, 6)], []),
    "images": ([(1, 4, 6), (1, 8, 4), (1, 2, 2), (1, 10, 12)], []),
    "video": ([], [(4, 4, 6), (4, 4, 6), (2, 4, 6)]),
    "images_and_video": ([(1, 4, 4), (1, 4, 4)], [(4, 6, 4), (1, 6, 4)]),
}


@pytest.mark.parametrize("name", MEDIA)
def test_pictures_and_films(name: str, tmp_path: Path) -> None:
    images, film = MEDIA[name]
    config = tiny_config(topk_blocks=2)
    model, other = pair(config, tmp_path)
    ids = torch.cat(
        (
            random_ids(30),
            with_placeholders(config.image_token_id, [t * h * w // 4 for t, h, w in images], 3),
            with_placeholders(config.video_token_id, [h * w // 4 for t, h, w in film for _ in range(t)], 9),
        )
    )
    media: list[tuple[int, Tensor]] = []
    inputs: dict[str, Tensor] = {}
    for kind, suffix, grids, token in (
        ("image", "", images, config.image_token_id),
        ("video", "_videos", film, config.video_token_id),
    ):
        if grids:
            pixels = pixels_for(config, grids, seed=len(grids))
            media += rows_at(ids, token, model.encode_media(pixels, grids))
            inputs |= {f"pixel_values{suffix}": pixels, f"{kind}_grid_thw": torch.tensor(grids)}
    ours, theirs = all_logits(model, ids, media), transformers_logits(other, ids, **inputs)
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["topk16_block8", "topk3_block16"])
def test_greedy_tokens(name: str, tmp_path: Path) -> None:
    """256 tokens from the cache, here and there; with topk16_block8 the last context is 45 blocks."""
    config = tiny_config(**CONFIGS[name], num_hidden_layers=2, sparse_layers=(False, True), moe_layers=(False, True))
    model, other = pair(config, tmp_path, seed=4)
    prompt = random_ids(97, seed=2)
    theirs = other.generate(
        prompt[None], attention_mask=torch.ones(1, 97), max_new_tokens=256, do_sample=False, use_cache=True
    )[0, 97:]
    assert greedy(model, prompt, 256) == theirs.tolist()


def bfloat16_errors(config: M3Config, folder: Path, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Exact logits (float32 arithmetic on bfloat16 weights), and the errors in bfloat16 of ours and of theirs."""
    tensors = {name: x.bfloat16().float() for name, x in random_tensors(config, seed).items()}
    other = transformers_model(config, tensors, folder, torch.bfloat16)
    ids = random_ids(211, seed)
    exact = all_logits(M3Model(config, tensors), ids)
    ours = all_logits(M3Model(config, tensors, dtype=torch.bfloat16), ids)
    return exact, ours - exact, transformers_logits(other, ids) - exact


BFLOAT16: dict[str, dict[str, Any]] = {
    "no_choices": {"topk_blocks": 32, "num_experts_per_tok": 8},
    "blocks_chosen": {"num_experts_per_tok": 8},
}


@pytest.mark.parametrize("name", BFLOAT16)
def test_bfloat16_rounds_no_worse_than_transformers(name: str, tmp_path: Path) -> None:
    """All eight experts run, so that no near-tie of the router turns rounding into another expert."""
    exact, ours, theirs = bfloat16_errors(tiny_config(**BFLOAT16[name]), tmp_path, seed=3)
    assert 0 < ours.square().mean() < 1.2 * theirs.square().mean()
    assert ours.square().mean().sqrt() < 0.05 * exact.std()


def test_bfloat16_with_everything_chosen(tmp_path: Path) -> None:
    """Where near-ties of the router fall differently a token's logits differ wholly; the typical token agrees."""
    exact, ours, theirs = bfloat16_errors(tiny_config(), tmp_path, seed=1)
    assert ours.abs().median() < 1.3 * theirs.abs().median()
    assert ours.abs().median() < 0.05 * exact.std()


def test_ragged_batch_equals_each_alone(tmp_path: Path) -> None:
    config = tiny_config(topk_blocks=3)
    model, other = pair(config, tmp_path)
    lengths = [1, 8, 61, 30, 119]
    counts = [-(-n // 8) for n in lengths]
    pages, order = scattered(config, 8 * sum(counts))
    tables = order.split(counts)
    spans = [Span(random_ids(n, i), 0, table) for i, (n, table) in enumerate(zip(lengths, tables, strict=True))]
    together = model.forward(spans, pages, "all")
    for span, logits in zip(spans, together, strict=True):
        assert (logits - all_logits(model, span.ids)).abs().max() < 1e-5
        assert (logits - transformers_logits(other, span.ids)).abs().max() < 1e-4


def test_reads_what_transformers_saves(tmp_path: Path) -> None:
    """`save_pretrained` writes the flat config spelling and the released tensor names."""
    config = tiny_config(topk_blocks=3)
    tensors = random_tensors(config)
    other = transformers_model(config, tensors, tmp_path / "ours")
    other.save_pretrained(tmp_path / "theirs", max_shard_size="100KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    model = load_model(tmp_path / "theirs")
    assert model.config.text == config.text
    ids = random_ids(100)
    assert all_logits(model, ids).equal(all_logits(M3Model(config, tensors), ids))
