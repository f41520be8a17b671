"""Both spellings of config.json, and every refusal by the field's name."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest
from transformers import MiniMaxM3VLConfig

from m3agent.errors import CheckpointError, ConfigError
from m3agent.model import M3Config
from m3agent.model.released import is_quantised_name, released_tensors
from tests.model.tiny import tiny_config

RELEASED: dict[str, Any] = {  # the numbers of MiniMax-M3
    "model_type": "minimax_m3_vl",
    "image_token_index": 200025,
    "video_token_index": 200026,
    "projector_hidden_size": 6144,
    "num_reward_heads": 0,
    "text_config": {
        "hidden_size": 6144,
        "num_hidden_layers": 60,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rotary_dim": 64,
        "partial_rotary_factor": 0.5,
        "rope_theta": 5000000,
        "vocab_size": 200064,
        "max_position_embeddings": 1048576,
        "rms_norm_eps": 1e-6,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "intermediate_size": 3072,
        "dense_intermediate_size": 12288,
        "shared_intermediate_size": 3072,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": [0] * 3 + [1] * 57,
        "num_mtp_modules": 7,
        "sparse_attention_config": {
            "sparse_index_dim": 128,
            "sparse_num_index_heads": 4,
            "sparse_topk_blocks": 16,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": [0] * 3 + [1] * 57,
            "sparse_disable_index_value": [0] * 3 + [1] * 57,
        },
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "intermediate_size": 5120,
        "patch_size": 14,
        "hidden_act": "gelu",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """The released config with one field set, or removed where the value is `...`."""
    raw = json.loads(json.dumps(RELEASED))
    section = raw
    *parents, key = path.split(".")
    for parent in parents:
        section = section.setdefault(parent, {})
    if value is ...:
        del section[key]
    else:
        section[key] = value
    return raw


def test_the_released_numbers() -> None:
    config = M3Config.from_dict(RELEASED)
    t = config.text
    assert (t.rotary_dim, t.index_heads, t.index_dim, t.block_size, t.topk_blocks) == (64, 4, 128, 128, 16)
    assert sum(t.sparse_layers) == sum(t.moe_layers) == 57
    assert config.vision is not None
    assert config.vision.patch_channels == 1176
    assert config.vision.segment_max_frames == 4


def test_tensor_inventory_of_the_release() -> None:
    """23,416 tensors with 427,040,140,160 numbers, counted from the published files."""
    shapes = released_tensors(M3Config.from_dict(RELEASED))
    assert len(shapes) == 23_416
    assert sum(prod(shape) for shape in shapes.values()) == 427_040_140_160
    assert sum(map(is_quantised_name, shapes)) == 22_422


def test_patch_sizes_are_read_wherever_they_stand() -> None:
    raw = changed("vision_config.img_token_compression_config", ...)
    assert M3Config.from_dict(raw).vision == M3Config.from_dict(RELEASED).vision  # what they are by default
    sizes = {"spatial_merge_size": 1, "temporal_patch_size": 4}
    for place in (raw["vision_config"], raw):
        target = place if place is raw["vision_config"] else place.setdefault("img_token_compression_config", {})
        target.update(sizes)
        vision = M3Config.from_dict(raw).vision
        assert vision is not None
        assert (vision.spatial_merge_size, vision.temporal_patch_size) == (1, 4)
        for size in sizes:
            raw["vision_config"].pop(size, None)


def test_written_config_reads_back(tmp_path: Path) -> None:
    for config in (M3Config.from_dict(RELEASED), tiny_config()):
        assert M3Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_flat_spelling_of_transformers(tmp_path: Path) -> None:
    MiniMaxM3VLConfig(**json.loads(json.dumps(RELEASED))).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "sparse_attention_config" not in saved["text_config"]
    assert M3Config.load(tmp_path) == M3Config.from_dict(RELEASED)


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(init_blocks=0).to_dict()))
    theirs = MiniMaxM3VLConfig.from_pretrained(tmp_path)
    ours = tiny_config()
    assert theirs.text_config.rope_parameters["partial_rotary_factor"] == 0.5
    assert theirs.text_config.index_topk_blocks == ours.text.topk_blocks
    assert theirs.text_config.layer_types == ["full_attention"] + ["minimax_m3_sparse"] * 3
    assert theirs.text_config.mlp_layer_types == ["dense"] + ["sparse"] * 3
    assert theirs.vision_config.spatial_merge_size == 2


def test_rotary_width_falls_back_to_rotary_dim() -> None:
    raw = changed("text_config.partial_rotary_factor", ...)
    assert M3Config.from_dict(raw).text.rotary_dim == 64
    raw["text_config"]["rotary_dim"] = 32
    assert M3Config.from_dict(raw).text.rotary_dim == 32


def test_text_only() -> None:
    assert M3Config.from_dict(changed("vision_config", ...)).vision is None


REFUSED: list[tuple[str, Any, str]] = [
    ("model_type", "llama", "'llama' is not supported"),
    ("text_config", ..., "missing"),
    ("text_config", [1], "an object is needed"),
    ("tie_word_embeddings", True, "not supported"),
    ("num_reward_heads", 1, "not supported"),
    ("image_token_index", ..., "missing"),
    ("video_token_index", 200064, "outside the vocabulary"),
    ("multimodal_projector_bias", False, "not supported"),
    ("projector_hidden_act", "relu", "not supported"),
    ("vision_feature_layer", -2, "not supported"),
    ("text_config.hidden_act", "gelu", "not supported"),
    ("text_config.hidden_size", ..., "missing"),
    ("text_config.hidden_size", "6144", "a whole number is needed, not str '6144'"),
    ("text_config.hidden_size", 6144.5, "a whole number is needed"),
    ("text_config.hidden_size", True, "a whole number is needed"),
    ("text_config.num_hidden_layers", 0, "below 1"),
    ("text_config.rms_norm_eps", -1.0, "positive"),
    ("text_config.rope_theta", "big", "a number is needed"),
    ("text_config.attention_output_gate", True, "not supported"),
    ("text_config.tie_word_embeddings", True, "not supported"),
    ("text_config.use_qk_norm", False, "not supported"),
    ("text_config.use_gemma_norm", False, "not supported"),
    ("text_config.qk_norm_type", "full", "not supported"),
    ("text_config.scoring_func", "softmax", "not supported"),
    ("text_config.use_routing_bias", False, "not supported"),
    ("text_config.n_shared_experts", 2, "not supported"),
    ("text_config.swiglu_beta", 0.5, "not supported"),
    ("text_config.rope_scaling", {"type": "yarn"}, "not supported"),
    ("text_config.rope_parameters.rope_type", "yarn", "not supported"),
    ("text_config.partial_rotary_factor", 0.51, "turns 65 channels"),
    ("text_config.num_attention_heads", 66, "no multiple of 4 KV heads"),
    ("text_config.num_experts_per_tok", 129, "cannot be chosen"),
    ("text_config.moe_layer_freq", ..., "missing"),
    ("text_config.moe_layer_freq", [0, 1], "2 entries for 60 layers"),
    ("text_config.moe_layer_freq", "none", "a list is needed"),
    ("text_config.sparse_attention_config.sparse_attention_freq", [0, 1], "2 entries for 60 layers"),
    ("text_config.sparse_attention_config.sparse_score_type", "mean", "not supported"),
    ("text_config.sparse_attention_config.sparse_num_index_heads", 2, "each of 4 KV heads needs one"),
    ("text_config.sparse_attention_config.sparse_index_dim", 32, "below the 64 rotary channels"),
    ("text_config.sparse_attention_config.sparse_topk_blocks", ..., "missing"),
    ("text_config.sparse_attention_config.sparse_topk_blocks", 0, "below 1"),
    ("text_config.sparse_attention_config.sparse_local_block", 0, "below 1"),
    ("vision_config.hidden_act", "quick_gelu", "not supported"),
    ("vision_config.num_channels", 1, "not supported; this code runs 3"),
    (
        "vision_config.temporal_patch_size",
        4,
        "4, but vision_config.img_token_compression_config.temporal_patch_size is 2",
    ),
    (
        "vision_config.spatial_merge_size",
        1,
        "1, but vision_config.img_token_compression_config.spatial_merge_size is 2",
    ),
    ("vision_config.spatial_merge_size", "2", "a whole number is needed"),
    ("img_token_compression_config.temporal_patch_size", 1, "1, but .* is 2"),
    ("vision_config.img_token_compression_config.temporal_patch_size", 0, "below 1"),
    ("vision_config.img_token_compression_config.image_token_compression_method", "pool", "not supported"),
    ("vision_config.rope_mode", "2d", "not supported"),
    ("vision_config.patch_size", ..., "missing"),
    ("vision_config.num_attention_heads", 7, "do not divide"),
    ("quantization_config.quant_method", "fp8", "not supported"),
    ("quantization_config.quant_method", None, "missing"),
]


@pytest.mark.parametrize(("field", "value", "problem"), REFUSED, ids=[f"{name}={value}" for name, value, _ in REFUSED])
def test_refusals_name_the_field(field: str, value: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        M3Config.from_dict(changed(field, value))
    assert caught.value.field == field
    assert repr(field) in str(caught.value)


def test_refusals_name_the_layer() -> None:
    with pytest.raises(ConfigError, match="'weird' is not one of") as caught:
        M3Config.from_dict(changed("text_config.layer_types", ["full_attention", "weird"] * 30))
    assert caught.value.field == "text_config.layer_types[1]"
    with pytest.raises(ConfigError, match="its own values") as caught:
        M3Config.from_dict(changed("text_config.sparse_attention_config.sparse_disable_index_value", [0] * 60))
    assert caught.value.field == "text_config.sparse_attention_config.sparse_disable_index_value[3]"
    raw = changed("text_config.sparse_attention_config.sparse_local_block", 14)
    raw["text_config"]["sparse_attention_config"]["sparse_init_block"] = 3
    with pytest.raises(ConfigError, match="cannot hold 14 local and 3 initial"):
        M3Config.from_dict(raw)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        M3Config.load(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        M3Config.load(tmp_path)
    (tmp_path / "config.json").rmdir()
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        M3Config.load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        M3Config.load(tmp_path)
