"""The vision tower with 3-D rotary positions, the projector, and the patch merge that follows it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.kernels.linear import linear
from m3agent.kernels.segments import segment_attention
from m3agent.model.config import VisionConfig
from m3agent.model.weights import Linear, VisionLayerWeights, VisionWeights

Grid = tuple[int, int, int]  # temporal patches, patch rows, patch columns


def encode_patches(pixels: Tensor, grids: list[Grid], w: VisionWeights, c: VisionConfig) -> Tensor:
    """pixels: [patches, channels · frames · height · width], grids one after the other → [patches / merge², hidden].

    Every grid is a segment of its own: an image, or a run of a film's temporal patches.
    """
    return merge_patches(vision_tower(pixels, grids, w, c), w, c)


def vision_tower(pixels: Tensor, grids: list[Grid], w: VisionWeights, c: VisionConfig) -> Tensor:
    """Last hidden state [patches, width]; there is no norm behind the last layer."""
    x = _norm(linear(pixels.to(w.pre_norm.weight.dtype), w.patch), w.pre_norm, c)
    rope = vision_rope(patch_positions(grids, c.spatial_merge_size).to(x.device), c)
    lengths = [t * h * width for t, h, width in grids]
    for layer in w.layers:
        x = _layer(x, layer, rope, lengths, c)
    return x


def merge_patches(x: Tensor, w: VisionWeights, c: VisionConfig) -> Tensor:
    """Project every patch, then merge the patches of a cell: [patches, width] → [patches / merge², hidden]."""
    x = _mlp(x, *w.projector)
    return _mlp(x.view(-1, c.spatial_merge_size**2 * x.shape[-1]), *w.merge)


def patch_positions(grids: list[Grid], merge: int) -> Tensor:
    """(t, row, column) of every patch in patch order, [patches, 3]: frames, then cells, then the patches of a cell."""
    parts: list[Tensor] = []
    for t, h, width in grids:
        ids = torch.cartesian_prod(torch.arange(t), torch.arange(h), torch.arange(width))
        cells = ids.view(t, h // merge, merge, width // merge, merge, 3).transpose(2, 3)
        parts.append(cells.reshape(-1, 3))
    return torch.cat(parts)


def vision_rope(positions: Tensor, c: VisionConfig) -> tuple[Tensor, Tensor]:
    """cos twice and (−sin, sin) for [t | row | column] angles, each [patches, 1, rotary] float32.

    Every axis has an even share of 2 · ((head / 3) // 2) channels; those left over pass unturned.
    """
    axis = 2 * ((c.hidden_size // c.num_attention_heads // 3) // 2)
    exponents = torch.arange(0, axis, 2, dtype=torch.float32, device=positions.device) / axis
    angles = (positions.float()[:, :, None] * (c.rope_theta**-exponents)).flatten(1).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _layer(
    x: Tensor, w: VisionLayerWeights, rope: tuple[Tensor, Tensor], lengths: list[int], c: VisionConfig
) -> Tensor:
    n = x.shape[0]
    qkv = linear(_norm(x, w.norm1, c), w.qkv.weight, w.qkv.bias).view(n, 3, c.num_attention_heads, -1)
    turned = _turn(qkv[:, :2].flatten(1, 2), *rope).view(n, 2, c.num_attention_heads, -1)
    attended = segment_attention(turned[:, 0], turned[:, 1], qkv[:, 2], lengths).reshape(n, -1)
    x = x + linear(attended, w.out.weight, w.out.bias)
    return x + _mlp(_norm(x, w.norm2, c), w.fc1, w.fc2)


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-split rotation in float32. x: [patches, heads, head_dim] → the same."""
    rotary = cos.shape[-1]
    y = x.to(torch.float32, copy=True)
    swapped = torch.cat((y[..., rotary // 2 : rotary], y[..., : rotary // 2]), dim=-1)
    y[..., :rotary].mul_(cos).addcmul_(swapped, sin)
    return y.to(x.dtype)


def _norm(x: Tensor, w: Linear, c: VisionConfig) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w.weight, w.bias, c.layer_norm_eps)


def _mlp(x: Tensor, first: Linear, second: Linear) -> Tensor:
    return linear(F.gelu(linear(x, first.weight, first.bias)), second.weight, second.bias)
