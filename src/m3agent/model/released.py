"""The released layout: config.json in its own spelling, and the name and shape of every tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from m3agent.model.config import M3Config, TextConfig, VisionConfig

Shape = tuple[int, ...]


def released_config(config: M3Config) -> dict[str, Any]:
    """config.json of a release; readers that know only the released spelling find every field they use."""
    t, v = config.text, config.vision
    sparse = [int(flag) for flag in t.sparse_layers]
    result: dict[str, Any] = {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "image_token_index": config.image_token_id,
        "video_token_index": config.video_token_id,
        "projector_hidden_size": config.projector_hidden_size,
        "projector_hidden_act": "gelu",
        "multimodal_projector_bias": True,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {
            "architectures": ["MiniMaxM3SparseForCausalLM"],
            "vocab_size": t.vocab_size,
            "hidden_size": t.hidden_size,
            "num_hidden_layers": t.num_hidden_layers,
            "num_attention_heads": t.num_attention_heads,
            "num_key_value_heads": t.num_key_value_heads,
            "head_dim": t.head_dim,
            "rotary_dim": t.rotary_dim,
            "partial_rotary_factor": t.rotary_dim / t.head_dim,
            "rope_theta": t.rope_theta,
            "rms_norm_eps": t.rms_norm_eps,
            "max_position_embeddings": t.max_position_embeddings,
            "hidden_act": "swigluoai",
            "swiglu_alpha": t.swiglu_alpha,
            "swiglu_limit": t.swiglu_limit,
            "use_qk_norm": True,
            "qk_norm_type": "per_head",
            "use_gemma_norm": True,
            "attention_output_gate": False,
            "tie_word_embeddings": False,
            "intermediate_size": t.intermediate_size,
            "shared_intermediate_size": t.shared_intermediate_size,
            "dense_intermediate_size": t.dense_intermediate_size,
            "n_shared_experts": 1,
            "num_local_experts": t.num_local_experts,
            "num_experts_per_tok": t.num_experts_per_tok,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": t.routed_scaling_factor,
            "moe_layer_freq": [int(flag) for flag in t.moe_layers],
            "sparse_attention_config": {
                "use_sparse_attention": any(t.sparse_layers),
                "sparse_index_dim": t.index_dim,
                "sparse_num_index_heads": t.index_heads,
                "sparse_topk_blocks": t.topk_blocks,
                "sparse_block_size": t.block_size,
                "sparse_score_type": "max",
                "sparse_init_block": t.init_blocks,
                "sparse_local_block": t.local_blocks,
                "sparse_attention_freq": sparse,
                "sparse_disable_index_value": sparse,
            },
        },
    }
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):  # transformers' generate looks for them here
        if key in (config.raw.get("text_config") or {}):
            result["text_config"][key] = config.raw["text_config"][key]
    if v is not None:
        compression = {
            "image_token_compression_method": "patch_merge",
            "spatial_merge_size": v.spatial_merge_size,
            "temporal_patch_size": v.temporal_patch_size,
        }
        result["img_token_compression_config"] = compression
        result["vision_config"] = {
            "model_type": "clip_vision_model",
            "hidden_size": v.hidden_size,
            "num_hidden_layers": v.num_hidden_layers,
            "num_attention_heads": v.num_attention_heads,
            "intermediate_size": v.intermediate_size,
            "num_channels": v.num_channels,
            "patch_size": v.patch_size,
            "hidden_act": "gelu",
            "layer_norm_eps": v.layer_norm_eps,
            "position_embedding_type": "rope",
            "rope_mode": "3d",
            "rope_theta": v.rope_theta,
            "vision_segment_max_frames": v.segment_max_frames,
            "spatial_merge_size": v.spatial_merge_size,
            "temporal_patch_size": v.temporal_patch_size,
            "img_token_compression_config": compression,
        }
    return result


def released_tensors(config: M3Config) -> dict[str, Shape]:
    """Name → shape of every tensor that a checkpoint of this config holds (scales of quantised ones apart)."""
    t = config.text
    shapes: dict[str, Shape] = {
        "language_model.model.embed_tokens.weight": (t.vocab_size, t.hidden_size),
        "language_model.lm_head.weight": (t.vocab_size, t.hidden_size),
        "language_model.model.norm.weight": (t.hidden_size,),
    }
    for layer in range(t.num_hidden_layers):
        at = f"language_model.model.layers.{layer}."
        shapes |= {at + name: shape for name, shape in _layer(t, layer).items()}
    if config.vision is not None:
        shapes |= _vision(config.vision)
        h, p, merge = t.hidden_size, config.projector_hidden_size, config.vision.spatial_merge_size**2
        shapes |= _linear("multi_modal_projector.linear_1", p, config.vision.hidden_size)
        shapes |= _linear("multi_modal_projector.linear_2", h, p)
        shapes |= _linear("patch_merge_mlp.linear_1", p, merge * h)
        shapes |= _linear("patch_merge_mlp.linear_2", h, p)
    return shapes


def is_quantised_name(name: str) -> bool:
    """Whether the MXFP8 release stores this weight in 8 bits: the decoder's projections, experts and dense MLPs."""
    return name.startswith("language_model.model.layers.") and (
        name.endswith("_proj.weight") or name.endswith((".w1.weight", ".w2.weight", ".w3.weight"))
    )


def is_router_name(name: str) -> bool:
    """The router's weight and correction bias, which every release stores in float32."""
    return name.endswith(("block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"))


def _layer(t: TextConfig, layer: int) -> dict[str, Shape]:
    h, d = t.hidden_size, t.head_dim
    q, kv = t.num_attention_heads * d, t.num_key_value_heads * d
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
    }
    if t.sparse_layers[layer]:
        shapes |= {
            "self_attn.index_q_proj.weight": (t.index_heads * t.index_dim, h),
            "self_attn.index_k_proj.weight": (t.index_dim, h),
            "self_attn.index_q_norm.weight": (t.index_dim,),
            "self_attn.index_k_norm.weight": (t.index_dim,),
        }
    if not t.moe_layers[layer]:
        return shapes | _gated("mlp.", t.dense_intermediate_size, h)
    moe = "block_sparse_moe."
    shapes |= {moe + "gate.weight": (t.num_local_experts, h), moe + "e_score_correction_bias": (t.num_local_experts,)}
    for expert in range(t.num_local_experts):
        at = f"{moe}experts.{expert}."
        shapes[at + "w1.weight"] = shapes[at + "w3.weight"] = (t.intermediate_size, h)
        shapes[at + "w2.weight"] = (h, t.intermediate_size)
    return shapes | _gated(moe + "shared_experts.", t.shared_intermediate_size, h)


def _gated(at: str, inner: int, outer: int) -> dict[str, Shape]:
    return {
        at + "gate_proj.weight": (inner, outer),
        at + "up_proj.weight": (inner, outer),
        at + "down_proj.weight": (outer, inner),
    }


def _linear(at: str, rows: int, columns: int) -> dict[str, Shape]:
    return {at + ".weight": (rows, columns), at + ".bias": (rows,)}


def _vision(v: VisionConfig) -> dict[str, Shape]:
    h, at = v.hidden_size, "vision_tower.vision_model."
    patch = (h, v.num_channels, v.temporal_patch_size, v.patch_size, v.patch_size)
    shapes: dict[str, Shape] = {
        at + "embeddings.patch_embedding.weight": patch,
        at + "pre_layrnorm.weight": (h,),
        at + "pre_layrnorm.bias": (h,),
    }
    for layer in range(v.num_hidden_layers):
        here = f"{at}encoder.layers.{layer}."
        for norm in ("layer_norm1", "layer_norm2"):
            shapes[f"{here}{norm}.weight"] = shapes[f"{here}{norm}.bias"] = (h,)
        for projection in ("q", "k", "v", "out"):
            shapes |= _linear(f"{here}self_attn.{projection}_proj", h, h)
        shapes |= _linear(here + "mlp.fc1", v.intermediate_size, h)
        shapes |= _linear(here + "mlp.fc2", h, v.intermediate_size)
    return shapes
