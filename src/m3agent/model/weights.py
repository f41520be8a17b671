"""The weights as the forward pass wants them: rows fused, experts stacked, norms as gains (1 + weight).

Built from any mapping of released names to tensors, one tensor at a time, so that a checkpoint is never in memory
twice.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from m3agent.errors import CheckpointError
from m3agent.kernels.experts import Experts
from m3agent.kernels.linear import HalfMatrix, Matrix, for_few_rows, input_major
from m3agent.model.config import M3Config, TextConfig
from m3agent.model.released import released_config, released_tensors


@dataclass(frozen=True)
class AttentionWeights:
    """qkv rows: [q | k | v], in sparse layers [q | k | index q | index k | v]; gains are float32."""

    norm: Tensor  # [hidden]
    qkv: Matrix
    gain: Tensor  # [heads + kv_heads, head_dim]; one row for every normed head, index heads too if they are as wide
    index_gain: Tensor | None  # [index_heads + 1, index_dim] where index heads have another width
    out: Matrix  # [hidden, heads · head_dim]


@dataclass(frozen=True)
class DenseWeights:
    gate_up: Matrix  # [2 · inner, hidden]
    down: Matrix  # [hidden, inner]


@dataclass(frozen=True)
class MoeWeights:
    router: Tensor  # [experts, hidden] float32
    bias: Tensor  # [experts] float32
    gate_up: Experts  # [experts, 2 · inner, hidden]
    down: Experts  # [experts, hidden, inner]
    shared: DenseWeights


@dataclass(frozen=True)
class LayerWeights:
    attention: AttentionWeights
    mlp_norm: Tensor  # [hidden]
    mlp: DenseWeights | MoeWeights


@dataclass(frozen=True)
class Linear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class VisionLayerWeights:
    norm1: Linear
    qkv: Linear  # [3 · width, width]
    out: Linear
    norm2: Linear
    fc1: Linear
    fc2: Linear


@dataclass(frozen=True)
class VisionWeights:
    patch: Tensor  # [width, channels · frames · height · width]
    pre_norm: Linear
    layers: list[VisionLayerWeights]
    projector: tuple[Linear, Linear]
    merge: tuple[Linear, Linear]


@dataclass(frozen=True)
class Weights:
    embed: Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    norm: Tensor
    head: Matrix  # [vocab, hidden]
    vision: VisionWeights | None
    fingerprint: str


def activation_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What the weights' dtype computes in: on the CPU half-precision weights multiply float32 activations."""
    return torch.float32 if dtype is torch.float16 and device.type == "cpu" else dtype


@dataclass
class Reader:
    """Takes tensors by released name, checks their shapes, places them, and hashes what passes."""

    config: M3Config
    tensors: Mapping[str, Tensor]
    dtype: torch.dtype  # of embeddings and matrices
    device: torch.device

    def __post_init__(self) -> None:
        self.activations = activation_dtype(self.dtype, self.device)
        self.shapes = released_tensors(self.config)
        header = json.dumps([released_config(self.config), str(self.dtype)], sort_keys=True)
        self.digest = hashlib.blake2b(header.encode(), digest_size=16)

    def take(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.raw(name).to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def matrix(self, name: str) -> Tensor:
        """A weight [out, in], flattened to that if it is a convolution's."""
        tensor = self.raw(name).flatten(1)
        return self.empty(*tensor.shape).copy_(tensor)

    def empty(self, *shape: int) -> Tensor:
        return input_major(shape, self.dtype, self.device)

    def raw(self, name: str) -> Tensor:
        """One tensor as stored; every number of it enters the fingerprint."""
        try:
            tensor = self.tensors[name]
        except KeyError:
            raise CheckpointError(
                f"tensor {name!r} is missing; the config asks for {list(self.shapes[name])}"
            ) from None
        if tuple(tensor.shape) != self.shapes[name]:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensor.shape)}; the config asks for {list(self.shapes[name])}"
            )
        if self.dtype is torch.float16 and tensor.abs().amax() > torch.finfo(torch.float16).max:
            raise CheckpointError(f"tensor {name!r} has numbers beyond float16; load it with dtype=torch.float32")
        self.digest.update(f"{name}{list(tensor.shape)}".encode() + content_hash(tensor))
        return tensor

    def gain(self, name: str) -> Tensor:
        return 1.0 + self.take(name, torch.float32)

    def rows(self, *names: str) -> Tensor:
        """Several weights under each other in one matrix, filled in place."""
        sizes = [self.shapes[name][0] for name in names]
        fused = self.empty(sum(sizes), self.shapes[names[0]][1])
        for part, name in zip(fused.split(sizes), names, strict=True):
            part.copy_(self.raw(name))
        return fused

    def linear(self, at: str) -> Linear:
        return Linear(self.matrix(at + ".weight"), self.take(at + ".bias", self.activations))

    def norm(self, at: str) -> Linear:
        return Linear(self.take(at + ".weight", self.activations), self.take(at + ".bias", self.activations))


HASH_PIECE = 1 << 18


def content_hash(tensor: Tensor) -> bytes:
    """8 bytes for every 2^18 numbers: the sum of each one's float32 bits times an odd factor of its place, mod 2^64.

    A change of one number always changes it. A cryptographic hash would take longer than reading the checkpoint.
    """
    factors = _hash_factors(tensor.device)
    pieces = tensor.detach().reshape(-1).split(HASH_PIECE)
    bits = (piece.float().view(torch.int32).to(torch.int64) for piece in pieces)
    return torch.stack([(x * factors[: x.shape[0]]).sum() for x in bits]).cpu().numpy().tobytes()


@lru_cache(maxsize=4)
def _hash_factors(device: torch.device) -> Tensor:
    return (torch.arange(HASH_PIECE, device=device) * -7046029254386353131) | 1  # 2^64 / golden ratio


def build_weights(
    config: M3Config, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device | str
) -> Weights:
    """Raises CheckpointError for a tensor that is missing, misshapen or not of this model."""
    r = Reader(config, tensors, dtype, torch.device(device))
    extra = [name for name in tensors if name not in r.shapes and "mtp." not in name]
    if extra:
        raise CheckpointError(f"tensor {extra[0]!r} is not part of this model ({len(extra)} such in all)")
    with torch.no_grad():
        embed = r.take("language_model.model.embed_tokens.weight")
        layers = [_layer(r, layer) for layer in range(config.text.num_hidden_layers)]
        norm = r.gain("language_model.model.norm.weight")
        head = for_few_rows(r.matrix("language_model.lm_head.weight"))
        vision = _vision(r) if config.vision is not None else None
    return Weights(embed, layers, norm, head, vision, r.digest.hexdigest())


def _layer(r: Reader, layer: int) -> LayerWeights:
    t, at = r.config.text, f"language_model.model.layers.{layer}."
    attention = _attention(r, t, at, t.sparse_layers[layer])
    mlp = _moe(r, t, at + "block_sparse_moe.") if t.moe_layers[layer] else _dense(r, at + "mlp.")
    return LayerWeights(attention, r.gain(at + "post_attention_layernorm.weight"), mlp)


def _attention(r: Reader, t: TextConfig, at: str, sparse: bool) -> AttentionWeights:
    norm = r.gain(at + "input_layernorm.weight")
    at += "self_attn."
    names = [at + "q_proj.weight", at + "k_proj.weight"]
    gain = torch.cat(
        (
            r.gain(at + "q_norm.weight").expand(t.num_attention_heads, -1),
            r.gain(at + "k_norm.weight").expand(t.num_key_value_heads, -1),
        )
    )
    index_gain = None
    if sparse:
        names += [at + "index_q_proj.weight", at + "index_k_proj.weight"]
        query, key = r.gain(at + "index_q_norm.weight"), r.gain(at + "index_k_norm.weight")
        index_gain = torch.cat((query.expand(t.index_heads, -1), key[None]))
        if t.index_dim == t.head_dim:
            gain, index_gain = torch.cat((gain, index_gain)), None
    qkv = for_few_rows(r.rows(*names, at + "v_proj.weight"))
    return AttentionWeights(norm, qkv, gain, index_gain, for_few_rows(r.matrix(at + "o_proj.weight")))


def _dense(r: Reader, at: str) -> DenseWeights:
    gate_up = r.rows(at + "gate_proj.weight", at + "up_proj.weight")
    return DenseWeights(for_few_rows(gate_up), for_few_rows(r.matrix(at + "down_proj.weight")))


def _moe(r: Reader, t: TextConfig, at: str) -> MoeWeights:
    inner, hidden = t.intermediate_size, t.hidden_size
    gate_up = r.empty(t.num_local_experts, 2 * inner, hidden)
    down = r.empty(t.num_local_experts, hidden, inner)
    for expert in range(t.num_local_experts):
        name = f"{at}experts.{expert}."
        gate_up[expert, :inner].copy_(r.raw(name + "w1.weight"))
        gate_up[expert, inner:].copy_(r.raw(name + "w3.weight"))
        down[expert].copy_(r.raw(name + "w2.weight"))
    return MoeWeights(
        router=r.take(at + "gate.weight", torch.float32),
        bias=r.take(at + "e_score_correction_bias", torch.float32),
        gate_up=_experts(gate_up),
        down=_experts(down),
        shared=_dense(r, at + "shared_experts."),
    )


def _experts(stacked: Tensor) -> Experts:
    held = [for_few_rows(expert) for expert in stacked]
    return [matrix for matrix in held if isinstance(matrix, HalfMatrix)] or stacked


def _vision(r: Reader) -> VisionWeights:
    assert r.config.vision is not None
    at = "vision_tower.vision_model."
    layers: list[VisionLayerWeights] = []
    for layer in range(r.config.vision.num_hidden_layers):
        here = f"{at}encoder.layers.{layer}."
        parts = [f"{here}self_attn.{name}_proj" for name in "qkv"]
        layers.append(
            VisionLayerWeights(
                norm1=r.norm(here + "layer_norm1"),
                qkv=Linear(
                    r.rows(*(p + ".weight" for p in parts)),
                    torch.cat([r.take(p + ".bias", r.activations) for p in parts]),
                ),
                out=r.linear(here + "self_attn.out_proj"),
                norm2=r.norm(here + "layer_norm2"),
                fc1=r.linear(here + "mlp.fc1"),
                fc2=r.linear(here + "mlp.fc2"),
            )
        )
    return VisionWeights(
        patch=r.matrix(at + "embeddings.patch_embedding.weight"),
        pre_norm=r.norm(at + "pre_layrnorm"),
        layers=layers,
        projector=(r.linear("multi_modal_projector.linear_1"), r.linear("multi_modal_projector.linear_2")),
        merge=(r.linear("patch_merge_mlp.linear_1"), r.linear("patch_merge_mlp.linear_2")),
    )
