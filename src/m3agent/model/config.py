"""A checkpoint's config.json as frozen dataclasses.

Two spellings are read: the released one (`sparse_attention_config`, `moe_layer_freq`, `rope_theta`) and the flat one
that transformers saves (`index_*`, `layer_types`, `mlp_layer_types`, `rope_parameters`). The released one is written.
What this code cannot run is refused with `ConfigError` and the field's dotted name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from m3agent.errors import CheckpointError, ConfigError
from m3agent.json_file import read_object
from m3agent.model.fields import Fields
from m3agent.model.released import released_config


@dataclass(frozen=True)
class TextConfig:
    """The decoder. Sizes in channels, `block_size` in tokens; one entry a layer in the two schedules."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    swiglu_alpha: float
    swiglu_limit: float
    intermediate_size: int
    shared_intermediate_size: int
    dense_intermediate_size: int
    num_local_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    max_position_embeddings: int
    index_heads: int
    index_dim: int
    block_size: int
    topk_blocks: int
    local_blocks: int
    init_blocks: int
    sparse_layers: tuple[bool, ...]  # block-sparse attention in this layer
    moe_layers: tuple[bool, ...]  # routed experts in this layer


@dataclass(frozen=True)
class VisionConfig:
    """The vision tower. `segment_max_frames` counts temporal patches of a film that see each other."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    num_channels: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    layer_norm_eps: float
    rope_theta: float
    segment_max_frames: int

    @property
    def patch_channels(self) -> int:
        """Numbers in one patch row: channels · frames · height · width."""
        return self.num_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True)
class M3Config:
    """A whole model; `vision` is None for a text-only checkpoint, `raw` is what was read."""

    text: TextConfig
    vision: VisionConfig | None
    image_token_id: int
    video_token_id: int
    projector_hidden_size: int
    raw: Mapping[str, Any] = field(default_factory=dict[str, Any], compare=False, repr=False)

    @classmethod
    def load(cls, folder: str | Path) -> M3Config:
        """Read `config.json`.

        Raises CheckpointError if it is missing or no JSON object, ConfigError if it cannot be run.
        """
        path = Path(folder) / "config.json"
        raw = read_object(path)
        if raw is None:
            raise CheckpointError(f"{path}: no such file; a checkpoint folder holds config.json")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> M3Config:
        """From a parsed config.json in either spelling. Raises ConfigError."""
        top = Fields(raw)
        top.must("model_type", ("minimax_m3_vl",), absent_is_fine=False)
        top.must("tie_word_embeddings", (False,))
        top.must("num_reward_heads", (0,))
        text = _text(top.section("text_config", required=True))
        vision = _vision(top) if raw.get("vision_config") is not None else None
        image, video = (top.integer(f"{kind}_token_index", alias=f"{kind}_token_id") for kind in ("image", "video"))
        for name, token in (("image_token_index", image), ("video_token_index", video)):
            if not 0 <= token < text.vocab_size:
                raise ConfigError(name, f"{token} lies outside the vocabulary of {text.vocab_size}")
        projector = top.integer("projector_hidden_size", default=text.hidden_size)
        _quantization(top.section("quantization_config"))
        return cls(text, vision, image, video, projector, raw)

    def to_dict(self) -> dict[str, Any]:
        """The released spelling, complete enough for every reader of it; quantisation is added by the writer."""
        return released_config(self)


def _text(f: Fields) -> TextConfig:
    f.must("hidden_act", ("swigluoai", "silu"))  # transformers writes silu and computes SwiGLU-OAI all the same
    f.must("swiglu_beta", (1, 1.0))
    f.must("scoring_func", ("sigmoid",))
    f.must("use_routing_bias", (True,))
    f.must("use_qk_norm", (True,))
    f.must("qk_norm_type", ("per_head",))
    f.must("use_gemma_norm", (True,))
    f.must("attention_output_gate", (False,))
    f.must("tie_word_embeddings", (False,))
    f.must("attention_bias", (False,))
    f.must("rope_scaling", (None,))
    f.must("n_shared_experts", (1,))
    rope = f.section("rope_parameters")
    rope.must("rope_type", ("default",))
    sparse = f.section("sparse_attention_config")
    sparse.must("sparse_score_type", ("max",))

    layers = f.integer("num_hidden_layers")
    head_dim = f.integer("head_dim")
    moe_layers = f.schedule(layers, flat=("mlp_layer_types", "sparse", "dense"), legacy="moe_layer_freq")
    sparse_layers = f.schedule(
        layers, flat=("layer_types", "minimax_m3_sparse", "full_attention"), legacy="sparse_attention_freq", at=sparse
    )
    no_values = sparse.raw.get("sparse_disable_index_value") or ()
    for layer, (is_sparse, no_value) in enumerate(zip(sparse_layers, no_values, strict=False)):
        if is_sparse and not no_value:
            name = f"{sparse.name('sparse_disable_index_value')}[{layer}]"
            raise ConfigError(name, "an index branch with its own values is not supported")

    def index_field(released: str, flat: str, unused: int) -> int:
        """Needed where a layer is sparse; elsewhere it has no effect, but pages still have a size."""
        return sparse.integer(released, fallback=(f, flat), default=None if any(sparse_layers) else unused)

    kv_heads = f.integer("num_key_value_heads")
    config = TextConfig(
        vocab_size=f.integer("vocab_size"),
        hidden_size=f.integer("hidden_size"),
        num_hidden_layers=layers,
        num_attention_heads=f.integer("num_attention_heads"),
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rotary_dim=_rotary_dim(f, rope, head_dim),
        rope_theta=rope.number("rope_theta", default=f.number("rope_theta", default=5_000_000.0)),
        rms_norm_eps=f.number("rms_norm_eps", default=1e-6),
        swiglu_alpha=f.number("swiglu_alpha", default=1.702),
        swiglu_limit=f.number("swiglu_limit", default=7.0),
        intermediate_size=f.integer("intermediate_size"),
        shared_intermediate_size=f.integer("shared_intermediate_size", default=f.integer("intermediate_size")),
        dense_intermediate_size=f.integer("dense_intermediate_size"),
        num_local_experts=f.integer("num_local_experts", alias="num_experts"),
        num_experts_per_tok=f.integer("num_experts_per_tok"),
        routed_scaling_factor=f.number("routed_scaling_factor", default=1.0),
        max_position_embeddings=f.integer("max_position_embeddings"),
        index_heads=index_field("sparse_num_index_heads", "index_n_heads", kv_heads),
        index_dim=index_field("sparse_index_dim", "index_head_dim", 128),
        block_size=index_field("sparse_block_size", "index_block_size", 128),
        topk_blocks=index_field("sparse_topk_blocks", "index_topk_blocks", 16),
        local_blocks=sparse.integer("sparse_local_block", fallback=(f, "index_local_blocks"), default=1),
        init_blocks=sparse.integer("sparse_init_block", default=0, least=0),
        sparse_layers=sparse_layers,
        moe_layers=moe_layers,
    )
    _check_text(config, f, sparse)
    return config


def _rotary_dim(f: Fields, rope: Fields, head_dim: int) -> int:
    """The factor decides where it is present: transformers stores `rotary_dim` without ever using it."""
    factor = rope.number("partial_rotary_factor", default=f.number("partial_rotary_factor", default=0.0))
    rotary = int(head_dim * factor) if factor else f.integer("rotary_dim")
    name = f.name("partial_rotary_factor" if factor else "rotary_dim")
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ConfigError(name, f"turns {rotary} channels of {head_dim}; an even number up to head_dim is needed")
    return rotary


def _check_text(c: TextConfig, f: Fields, sparse: Fields) -> None:
    if c.num_attention_heads % c.num_key_value_heads:
        raise ConfigError(
            f.name("num_attention_heads"), f"{c.num_attention_heads} is no multiple of {c.num_key_value_heads} KV heads"
        )
    if any(c.moe_layers) and c.num_experts_per_tok > c.num_local_experts:
        raise ConfigError(
            f.name("num_experts_per_tok"), f"{c.num_experts_per_tok} of {c.num_local_experts} experts cannot be chosen"
        )
    if not any(c.sparse_layers):
        return
    if c.index_heads != c.num_key_value_heads:
        raise ConfigError(
            sparse.name("sparse_num_index_heads"),
            f"{c.index_heads}, but each of {c.num_key_value_heads} KV heads needs one",
        )
    if c.index_dim < c.rotary_dim:
        raise ConfigError(sparse.name("sparse_index_dim"), f"{c.index_dim} is below the {c.rotary_dim} rotary channels")
    if c.local_blocks + c.init_blocks > c.topk_blocks:
        raise ConfigError(
            sparse.name("sparse_topk_blocks"),
            f"{c.topk_blocks} blocks cannot hold {c.local_blocks} local and {c.init_blocks} initial ones",
        )


def _vision(top: Fields) -> VisionConfig:
    f = top.section("vision_config", required=True)
    places = (f.section("img_token_compression_config"), top.section("img_token_compression_config"), f)
    for place in places:
        place.must("image_token_compression_method", ("patch_merge",))
    top.must("projector_hidden_act", ("gelu",))
    top.must("multimodal_projector_bias", (True,))
    top.must("vision_feature_layer", (-1,))
    top.must("vision_feature_select_strategy", ("full",))
    f.must("hidden_act", ("gelu",))
    f.must("num_channels", (3,))
    f.must("position_embedding_type", ("rope",))
    f.must("rope_mode", ("3d",))
    rope = f.section("rope_parameters")
    rope.must("rope_type", ("axial",))
    config = VisionConfig(
        hidden_size=f.integer("hidden_size"),
        num_hidden_layers=f.integer("num_hidden_layers"),
        num_attention_heads=f.integer("num_attention_heads"),
        intermediate_size=f.integer("intermediate_size"),
        num_channels=3,
        patch_size=f.integer("patch_size"),
        temporal_patch_size=_agreed("temporal_patch_size", places, default=2),
        spatial_merge_size=_agreed("spatial_merge_size", places, default=2),
        layer_norm_eps=f.number("layer_norm_eps", default=1e-5),
        rope_theta=rope.number("rope_theta", default=f.number("rope_theta", default=10_000.0)),
        segment_max_frames=f.integer("vision_segment_max_frames", default=4),
    )
    if config.hidden_size % config.num_attention_heads:
        raise ConfigError(
            f.name("num_attention_heads"),
            f"{config.num_attention_heads} heads do not divide {config.hidden_size} channels",
        )
    if config.hidden_size // config.num_attention_heads < 6:
        raise ConfigError(f.name("num_attention_heads"), "a head needs 6 channels or more for three rotary axes")
    return config


def _agreed(key: str, places: Sequence[Fields], default: int) -> int:
    """A field that released files have in several places; they must agree, since readers differ in which counts."""
    found = [(place.name(key), place.integer(key)) for place in places if place.raw.get(key) is not None]
    for name, value in found[1:]:
        if value != found[0][1]:
            raise ConfigError(name, f"{value}, but {found[0][0]} is {found[0][1]}")
    return found[0][1] if found else default


def _quantization(f: Fields) -> None:
    if not f:
        return
    f.must("quant_method", ("mxfp8",), absent_is_fine=False)
    f.must("weight_block_size", ([1, 32],))
