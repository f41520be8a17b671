"""Checkpoints: round trips in the released layout, and every refusal with its message."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from m3agent.errors import CheckpointError, ConfigError, MissingDependency
from m3agent.model import M3Config, M3Model, load_model, read_tensors, resolve, save_checkpoint
from m3agent.model.released import is_quantised_name, is_router_name
from tests.model.tiny import all_logits, plain, random_ids, random_tensors, tiny_config

CONFIG = tiny_config(topk_blocks=3)
TENSORS = random_tensors(CONFIG)
Q_PROJ = "language_model.model.layers.1.self_attn.q_proj.weight"
GATE = "language_model.model.layers.1.block_sparse_moe.gate.weight"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint in float32, in one shard."""
    save_checkpoint(tmp_path, CONFIG, TENSORS, dtype=torch.float32)
    return tmp_path


def edit(folder: Path, change: dict[str, Tensor | None]) -> Path:
    """Rewrite the one shard with tensors replaced, added, or (None) removed; the index follows."""
    path = folder / "model-00001-of-00001.safetensors"
    tensors = {**load_file(path), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(kept, path.name)}))
    return path


def test_float32_round_trip(folder: Path) -> None:
    model = load_model(folder)
    assert model.dtype is torch.float32
    ids = random_ids(50)
    assert all_logits(model, ids).equal(all_logits(M3Model(CONFIG, TENSORS), ids))
    read = read_tensors(folder)
    assert read.keys() == TENSORS.keys()
    assert all(read[name].equal(tensor) for name, tensor in TENSORS.items())


def test_bfloat16_round_trip_keeps_the_router_in_float32(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS)
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    for name, tensor in TENSORS.items():
        kind = torch.float32 if is_router_name(name) else torch.bfloat16
        assert stored[name].equal(tensor.to(kind)), name
        assert stored[name].dtype is kind
    model = load_model(tmp_path, dtype=torch.bfloat16)
    assert model.weights.embed.dtype is torch.bfloat16
    moe = model.weights.layers[1].mlp
    assert moe.router.equal(TENSORS[GATE])  # type: ignore[union-attr]


def test_mxfp8_round_trip(tmp_path: Path) -> None:
    tensors = random_tensors(config := tiny_config(hidden_size=64, topk_blocks=3))
    save_checkpoint(tmp_path, config, tensors, quantize="mxfp8")
    stored = load_file(tmp_path / "model-00001-of-00001.safetensors")
    quantised = {name for name in tensors if is_quantised_name(name)}
    assert quantised
    for name in tensors:
        assert (stored[name].dtype is torch.float8_e4m3fn) == (name in quantised), name
        assert (name + "_scale_inv" in stored) == (name in quantised)
    assert stored[Q_PROJ + "_scale_inv"].shape == (96, 2)
    assert stored[Q_PROJ + "_scale_inv"].dtype is torch.uint8
    raw = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert raw["quant_method"] == "mxfp8"
    assert "language_model.model.layers.3.block_sparse_moe.gate" in raw["ignored_layers"]

    read = read_tensors(tmp_path)
    assert read.keys() == tensors.keys()
    for name in quantised:
        assert (read[name] - tensors[name]).abs().max() <= tensors[name].abs().max() / 16
    ids = random_ids(50)
    assert all_logits(load_model(tmp_path, dtype=torch.float32), ids).equal(all_logits(M3Model(config, read), ids))
    save_checkpoint(tmp_path / "again", config, read, quantize="mxfp8")
    again = read_tensors(tmp_path / "again")  # rounding twice changes nothing
    assert all(again[name].equal(read[name]) for name in quantised)


@pytest.mark.parametrize(
    ("stored", "held"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float16), (torch.float16, torch.float16)],
)
def test_default_dtype_on_the_cpu_loses_nothing(stored: torch.dtype, held: torch.dtype, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, dtype=stored)
    model = load_model(tmp_path)
    assert plain(model.weights.head).dtype is held
    assert model.dtype is torch.float32
    assert plain(model.weights.head).float().equal(TENSORS["language_model.lm_head.weight"].to(stored).float())


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS | {Q_PROJ: torch.full((96, 48), 1e5)})
    refused(tmp_path, f"tensor '{Q_PROJ}' has numbers beyond float16; load it with dtype=torch.float32")
    load_model(tmp_path, dtype=torch.float32)


def test_shards_and_index(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, max_shard_bytes=60_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 5
    assert all(path.stat().st_size < 80_000 for path in files)
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    assert index["metadata"]["total_size"] == sum(x.nbytes for f in files for x in load_file(f).values())
    assert not list(tmp_path.glob("*.part"))
    assert read_tensors(tmp_path).keys() == TENSORS.keys()


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, CONFIG, TENSORS, max_shard_bytes=100_000)
    calls: list[tuple[int, int, str]] = []
    load_model(tmp_path, progress=lambda done, total, name: calls.append((done, total, name)))
    assert [done for done, _, _ in calls] == sorted(done for done, _, _ in calls)
    assert len({name for _, _, name in calls}) == len(TENSORS)
    assert {total for _, total, _ in calls} == {calls[-1][0]}


def test_fingerprint_tells_weights_apart(folder: Path) -> None:
    first = load_model(folder).fingerprint
    assert first == load_model(folder).fingerprint == M3Model(CONFIG, TENSORS).fingerprint
    assert M3Model(CONFIG, TENSORS | {GATE: TENSORS[GATE] * 2}).fingerprint != first
    assert M3Model(tiny_config(topk_blocks=4), TENSORS).fingerprint != first
    assert load_model(folder, dtype=torch.float16).fingerprint != first


def test_mtp_tensors_are_passed_over(folder: Path) -> None:
    edit(folder, {"mtp.layers.0.enorm.weight": torch.zeros(3), "language_model.mtp.eh_proj.weight": torch.zeros(2, 2)})
    assert load_model(folder).fingerprint == M3Model(CONFIG, TENSORS).fingerprint


def test_single_file_without_index(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    load_model(folder)


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    for word in words:
        assert word in str(caught.value)


def test_missing_tensor(folder: Path) -> None:
    edit(folder, {Q_PROJ: None})
    refused(folder, f"tensor '{Q_PROJ}' is missing", "[96, 48]")


def test_misshapen_tensor(folder: Path) -> None:
    path = edit(folder, {Q_PROJ: torch.zeros(48, 96)})
    refused(folder, str(path), f"tensor '{Q_PROJ}' has shape [48, 96]", "the config asks for [96, 48]")


def test_extra_tensor(folder: Path) -> None:
    path = edit(folder, {"language_model.model.layers.9.input_layernorm.weight": torch.zeros(48)})
    refused(
        folder, str(path), "'language_model.model.layers.9.input_layernorm.weight' ([48]) is not part of this model"
    )


def test_tensor_of_another_type(folder: Path) -> None:
    edit(folder, {Q_PROJ: torch.zeros(96, 48, dtype=torch.int32)})
    refused(folder, f"tensor '{Q_PROJ}' is I32")


def test_eight_bits_without_scales(folder: Path) -> None:
    weight = "language_model.model.layers.0.mlp.down_proj.weight"  # [48, 96]
    edit(folder, {weight: torch.zeros(48, 96).to(torch.float8_e4m3fn)})
    refused(folder, f"tensor '{weight}_scale_inv' is missing", "[48, 3]")
    edit(folder, {weight + "_scale_inv": torch.zeros(48, 1, dtype=torch.uint8)})
    refused(folder, f"tensor '{weight}_scale_inv' is U8 [48, 1]", "needs U8 [48, 3]")
    edit(folder, {weight + "_scale_inv": torch.full((48, 3), 127, dtype=torch.uint8)})
    load_model(folder)


def test_scales_without_eight_bits(folder: Path) -> None:
    edit(folder, {Q_PROJ + "_scale_inv": torch.zeros(96, 1, dtype=torch.uint8)})
    refused(folder, f"'{Q_PROJ}_scale_inv' ([96, 1]) is not part of this model")


@pytest.mark.parametrize("keep", [0, 5, 2000, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused(folder, str(path), "not a whole safetensors file")


def test_missing_shard(folder: Path) -> None:
    path = folder / "model-00001-of-00001.safetensors"
    path.unlink()
    refused(folder, str(path), "no such file", INDEX)


def test_tensor_that_only_the_index_knows(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00001.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "'ghost.weight' is missing, though model.safetensors.index.json says it is here")


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"a": "../elsewhere.safetensors"}}', '{"weight_map": 3}'])
def test_damaged_index(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    refused(folder, str(folder / INDEX))


def test_pickles_are_never_read(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "model-00001-of-00001.safetensors").unlink()
    refused(folder, "model.safetensors: no such file", "no model.safetensors.index.json")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    refused(folder, "pytorch_model.bin is a pickle and is never read")


def test_config_is_read_first(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"]["hidden_act"] = "relu"
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"text_config\.hidden_act"):
        load_model(folder)


def test_saving_checks_names_and_shapes(tmp_path: Path) -> None:
    missing = {name: tensor for name, tensor in TENSORS.items() if name != GATE}
    for tensors, message in (
        (missing, f"'{GATE}' is missing"),
        (TENSORS | {GATE: torch.zeros(3)}, r"has shape \[3\]; the config asks for \[8, 48\]"),
        (TENSORS | {"more": torch.zeros(3)}, "'more' is not part of this model"),
    ):
        with pytest.raises(CheckpointError, match=message):
            save_checkpoint(tmp_path, CONFIG, tensors)
    with pytest.raises(CheckpointError, match="48; MXFP8 needs a multiple of 32"):
        save_checkpoint(tmp_path, CONFIG, TENSORS, quantize="mxfp8")
    assert not list(tmp_path.iterdir())


def test_model_from_tensors_checks_them_too() -> None:
    with pytest.raises(CheckpointError, match="'more' is not part of this model"):
        M3Model(CONFIG, TENSORS | {"more": torch.zeros(3)})
    with pytest.raises(CheckpointError, match="is missing"):
        M3Model(CONFIG, {name: x for name, x in TENSORS.items() if name != GATE})


def test_resolve(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve(folder) == folder
    assert resolve(str(folder)) == folder
    for name in ("nowhere", "a/b/c", "./nowhere", str(folder / "config.json")):
        with pytest.raises(CheckpointError, match="no such folder"):
            resolve(name)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match=r"pip install 'm3agent\[hub\]'"):
        resolve("someone/model")


def test_resolve_through_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, allow_patterns: str(folder))
    assert M3Config.load(resolve("someone/model")) == CONFIG

    def offline(name: str, allow_patterns: list[str]) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"someone/model: neither a folder here .*no network"):
        resolve("someone/model")
