"""Weights with numbers that are not finite are refused at load, by the tensor's name, wherever they stand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from m3agent.errors import CheckpointError
from m3agent.model import load_model, read_tensors, save_checkpoint
from m3agent.model.released import is_quantised_name
from tests.model.tiny import random_tensors, tiny_config

CONFIG = tiny_config(hidden_size=64, topk_blocks=3)
TENSORS = random_tensors(CONFIG)
SHARD = "model-00001-of-00001.safetensors"
QUANTISED = "language_model.model.layers.2.self_attn.o_proj.weight"


def damage(folder: Path, name: str, value: float) -> None:
    """One number somewhere in the middle of a tensor."""
    tensors = load_file(folder / SHARD)
    flat = tensors[name].view(torch.uint8 if tensors[name].element_size() == 1 else tensors[name].dtype).view(-1)
    flat[flat.numel() // 2] = value
    save_file(tensors, folder / SHARD)


def refused(folder: Path, name: str) -> None:
    for load in (load_model, read_tensors):
        with pytest.raises(CheckpointError) as caught:
            load(folder)
        assert f"tensor {name!r}" in str(caught.value)
        assert str(folder / SHARD) in str(caught.value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_that_is_not_finite(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, dtype=dtype)
    for name in ("vision_tower.vision_model.pre_layrnorm.bias", "language_model.model.embed_tokens.weight"):
        damage(tmp_path, name, value)
        refused(tmp_path, name)


def test_every_tensor_is_looked_at(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, dtype=torch.float32)
    whole = (tmp_path / SHARD).read_bytes()
    for name in list(TENSORS)[::7]:
        damage(tmp_path, name, math.nan)
        with pytest.raises(CheckpointError, match=f"tensor '{name}'"):
            load_model(tmp_path)
        (tmp_path / SHARD).write_bytes(whole)
    load_model(tmp_path)


def test_eight_bits_that_are_no_number(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, quantize="mxfp8")
    assert is_quantised_name(QUANTISED)
    assert "quantization_config" in json.loads((tmp_path / "config.json").read_text())
    whole = (tmp_path / SHARD).read_bytes()
    damage(tmp_path, QUANTISED, 0x7F)  # e4m3fn's NaN
    refused(tmp_path, QUANTISED)
    (tmp_path / SHARD).write_bytes(whole)
    damage(tmp_path, QUANTISED + "_scale_inv", 255)
    refused(tmp_path, QUANTISED + "_scale_inv")
    (tmp_path / SHARD).write_bytes(whole)
    damage(tmp_path, QUANTISED + "_scale_inv", 254)  # 2^127, times more than 2
    refused(tmp_path, QUANTISED)
