"""Writing a checkpoint in the released layout: shards of bounded size, an index, config.json last."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from m3agent.errors import CheckpointError
from m3agent.model.config import M3Config
from m3agent.model.mxfp8 import quantize_mxfp8
from m3agent.model.released import is_quantised_name, is_router_name, released_config, released_tensors

INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"  # behind the weight's name; despite the name it multiplies


def save_checkpoint(
    folder: str | Path,
    config: M3Config,
    tensors: Mapping[str, Tensor],
    *,
    quantize: Literal["mxfp8"] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Write config.json and the weights (released names, see `released_tensors`) into the folder.

    Weights become `dtype`, or MXFP8 with scales where the release has them so; the router stays float32. Every file
    is written under a temporary name and renamed. Raises CheckpointError for a missing, extra or misshapen tensor.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _check(tensors, released_tensors(config))
    shards: list[dict[str, Tensor]] = [{}]
    room = max_shard_bytes
    for name, tensor in _stored(tensors, quantize, dtype):
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        partial = folder / (name + ".part")
        save_file(shard, partial, metadata={"format": "pt"})
        os.replace(partial, folder / name)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for shard in shards for tensor in shard.values())},
        "weight_map": {key: name for name, shard in zip(names, shards, strict=True) for key in shard},
    }
    _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", _config(config, quantize, dtype))


def _check(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        if name not in tensors:
            raise CheckpointError(f"tensor {name!r} is missing; the config asks for {list(shape)}")
        if tuple(tensors[name].shape) != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(tensors[name].shape)}; the config asks for {list(shape)}"
            )
    for name in tensors:
        if name not in expected:
            raise CheckpointError(f"tensor {name!r} is not part of this model")


def _stored(tensors: Mapping[str, Tensor], quantize: str | None, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        tensor = tensor.detach().cpu()
        if is_router_name(name):
            yield name, tensor.float().contiguous()
        elif quantize == "mxfp8" and is_quantised_name(name):
            try:
                values, scales = quantize_mxfp8(tensor)
            except ValueError as error:
                raise CheckpointError(f"tensor {name!r}: {error}") from error
            yield name, values.contiguous()
            yield name + SCALE, scales.contiguous()
        else:
            yield name, tensor.to(dtype).contiguous()


def _config(config: M3Config, quantize: str | None, dtype: torch.dtype) -> dict[str, Any]:
    result = released_config(config) | {"torch_dtype": str(dtype).removeprefix("torch.")}
    if quantize == "mxfp8":
        gates = sorted(
            f"language_model.model.layers.{layer}.block_sparse_moe.gate"
            for layer, moe in enumerate(config.text.moe_layers)
            if moe
        )
        result["quantization_config"] = {
            "quant_method": "mxfp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [1, 32],
            "ignored_layers": [
                "lm_head",
                "model.embed_tokens",
                "vision_tower",
                "multi_modal_projector",
                "patch_merge_mlp",
                *gates,
            ],
        }
    return result


def _write_json(path: Path, value: dict[str, Any]) -> None:
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)
