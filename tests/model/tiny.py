"""Small models with random weights, and the fill of the test vectors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from m3agent.kernels.linear import HalfMatrix, Matrix
from m3agent.model import KVPages, M3Config, M3Model, Span
from m3agent.model.config import TextConfig, VisionConfig
from m3agent.model.released import released_tensors


def tiny_config(**text: Any) -> M3Config:
    """Four layers (dense + full, MoE + sparse ×3) with 16 blocks of 8 tokens; keywords replace decoder fields."""
    t = TextConfig(
        vocab_size=97,
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rotary_dim=8,
        rope_theta=5_000_000.0,
        rms_norm_eps=1e-6,
        swiglu_alpha=1.702,
        swiglu_limit=1.5,
        intermediate_size=32,
        shared_intermediate_size=64,
        dense_intermediate_size=96,
        num_local_experts=8,
        num_experts_per_tok=2,
        routed_scaling_factor=2.0,
        max_position_embeddings=4096,
        index_heads=2,
        index_dim=16,
        block_size=8,
        topk_blocks=16,
        local_blocks=1,
        init_blocks=0,
        sparse_layers=(False, True, True, True),
        moe_layers=(False, True, True, True),
    )
    t = replace(t, **text)
    v = VisionConfig(
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        num_channels=3,
        patch_size=4,
        temporal_patch_size=2,
        spatial_merge_size=2,
        layer_norm_eps=1e-5,
        rope_theta=10_000.0,
        segment_max_frames=4,
    )
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    return M3Config(t, v, image_token_id=90, video_token_id=91, projector_hidden_size=40, raw={"text_config": ends})


def random_tensors(config: M3Config, seed: int = 0) -> dict[str, Tensor]:
    """Released names → float32, with norms, biases and corrections that matter."""
    g = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, shape in released_tensors(config).items():
        scale = 0.25 if len(shape) == 1 else 1.2 / float(np.prod(shape[1:])) ** 0.5
        scale = 0.5 / shape[-1] ** 0.5 if "lm_head" in name else 1.0 if "embed_tokens" in name else scale
        x = torch.randn(shape, generator=g) * scale
        tensors[name] = x + 1 if name.startswith("vision_tower") and "norm" in name and name.endswith("weight") else x
    return tensors


def fill(shape: list[int], c: int, amp: float, add: float = 0.0) -> Tensor:
    """The closed-form fill of m3_vectors.json (its `recipe` says how)."""
    mask = np.uint64(0xFFFFFFFF)
    x = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(1 + 1_000_003 * c)) & mask
    x = (x * np.uint64(2_654_435_761)) & mask
    x ^= x >> np.uint64(15)
    x = (x * np.uint64(2_246_822_519)) & mask
    x ^= x >> np.uint64(13)
    return torch.from_numpy(((2 * x.astype(np.float64) / 2**32 - 1) * amp + add).astype(np.float32)).reshape(shape)


def random_ids(count: int, seed: int = 0) -> Tensor:
    """Tokens below 90, that is without placeholders."""
    return torch.randint(0, 90, (count,), generator=torch.Generator().manual_seed(seed))


def scattered(config: M3Config, tokens: int, seed: int = 1) -> tuple[KVPages, Tensor]:
    """Pages for so many tokens and a table that is not in order, so that nothing rests on a lucky layout."""
    count = -(-tokens // config.text.block_size)
    order = torch.randperm(count + 3, generator=torch.Generator().manual_seed(seed))[:count]
    return KVPages.allocate(config, count + 3), order


def all_logits(model: M3Model, ids: Tensor, media: list[tuple[int, Tensor]] | None = None) -> Tensor:
    """Logits of every position in one uncached pass, [n, vocab]."""
    pages = KVPages.allocate(model.config, -(-len(ids) // model.config.text.block_size), model.dtype)
    return model.forward([Span(ids, 0, torch.arange(pages.pages), media or [])], pages, "all")[0]


def greedy(model: M3Model, prompt: Tensor, count: int, media: list[tuple[int, Tensor]] | None = None) -> list[int]:
    """The tokens that greedy decoding adds, one cached pass each."""
    pages, table = scattered(model.config, len(prompt) + count)
    logits = model.forward([Span(prompt, 0, table, media or [])], pages)[0]
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(logits.argmax()))
        logits = model.forward([Span(torch.tensor(tokens[-1:]), len(prompt) + len(tokens) - 1, table)], pages)[0]
    return tokens


def rows_at(ids: Tensor, token: int, rows: Tensor) -> list[tuple[int, Tensor]]:
    """Media of a span, one run of placeholders after the other."""
    media: list[tuple[int, Tensor]] = []
    places = (ids == token).nonzero().squeeze(1).tolist()
    assert len(places) == rows.shape[0]
    for row, place in enumerate(places):
        if media and media[-1][0] + media[-1][1].shape[0] == place:
            media[-1] = (media[-1][0], torch.cat((media[-1][1], rows[row : row + 1])))
        else:
            media.append((place, rows[row : row + 1]))
    return media


def plain(weight: Matrix) -> Tensor:
    """A weight of a model as a tensor, however it is held."""
    return weight.values if isinstance(weight, HalfMatrix) else weight
