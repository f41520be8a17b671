"""m3-nano's config.json, in the spelling of the MiniMax-M3 release, and the other small files of its checkpoint."""

from __future__ import annotations

from typing import Any

LAYERS = 6
_FROM_SECOND = [0] + [1] * (LAYERS - 1)  # a dense first layer, then mixture of experts and sparse attention
_COMPRESSION = {"image_token_compression_method": "patch_merge", "spatial_merge_size": 2, "temporal_patch_size": 2}

CONFIG: dict[str, Any] = {
    "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
    "model_type": "minimax_m3_vl",
    "image_token_index": 1984 + 25,
    "video_token_index": 1984 + 26,
    "projector_hidden_size": 384,
    "projector_hidden_act": "gelu",
    "multimodal_projector_bias": True,
    "vision_feature_layer": -1,
    "vision_feature_select_strategy": "full",
    "img_token_compression_config": _COMPRESSION,
    "torch_dtype": "bfloat16",
    "text_config": {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "hidden_size": 384,
        "vocab_size": 2048,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 8192,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "rotary_dim": 32,
        "partial_rotary_factor": 0.5,
        "rope_theta": 50000,
        "rms_norm_eps": 1e-6,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "tie_word_embeddings": False,
        "intermediate_size": 224,
        "dense_intermediate_size": 1024,
        "shared_intermediate_size": 224,
        "n_shared_experts": 1,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": _FROM_SECOND,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": 64,
            "sparse_num_index_heads": 2,
            "sparse_topk_blocks": 8,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": _FROM_SECOND,
            "sparse_disable_index_value": _FROM_SECOND,
        },
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 256,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
        "patch_size": 14,
        "image_size": 224,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "rope_mode": "3d",
        "rope_theta": 10000.0,
        "projection_dim": 384,
        "vision_segment_max_frames": 4,
        "img_token_compression_config": _COMPRESSION,
    },
}

# Greedy, without thinking; pictures are brought to at most 224 × 224 pixels' area.
GENERATION = {"eos_token_id": 1984 + 20, "bos_token_id": 1984 + 34, "do_sample": False, "thinking_mode": "disabled"}
PREPROCESSOR = {"min_pixels": 3136, "max_pixels": 224 * 224}
