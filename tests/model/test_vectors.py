"""The checked test vectors: numbers made outside this package, in float64 and with transformers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from m3agent.model import KVPages, M3Config, M3Model, Span, text
from m3agent.model import m3 as m3_module
from m3agent.model.mxfp8 import dequantize_mxfp8, quantize_mxfp8
from m3agent.model.vision import vision_tower
from tests.model.tiny import fill, greedy, rows_at

VECTORS = json.loads((Path(__file__).parent / "data" / "m3_vectors.json").read_text())
CASES = {case["name"]: case for case in VECTORS["cases"]}
TOLERANCE = 5e-5


def build(name: str) -> tuple[dict[str, Any], M3Model]:
    case = CASES[name]
    config = M3Config.from_dict(case["config"])
    if name != "moe_vision":
        config = replace(config, vision=None)
    return case, M3Model(config, {key: fill(**value) for key, value in case["tensors"].items()})


def media_of(case: dict[str, Any], model: M3Model, ids: Tensor) -> list[tuple[int, Tensor]]:
    media: list[tuple[int, Tensor]] = []
    for pixels, grids, token in (
        ("pixel_values", "image_grid_thw", model.config.image_token_id),
        ("pixel_values_videos", "video_grid_thw", model.config.video_token_id),
    ):
        if pixels in case:
            rows = model.encode_media(fill(**case[pixels]), [tuple(grid) for grid in case[grids]])
            media += rows_at(ids, token, rows)
    return media


def test_fill_is_the_one_described() -> None:
    assert fill([4], 1, 1.0).tolist() == pytest.approx(VECTORS["recipe"]["check_values"]["c=1 amp=1 first 4"], abs=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_logits_and_residuals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = build(name)
    expected = case["expected"]
    residuals: list[Tensor] = []

    def recorded(*args: Any) -> Tensor:
        residuals.append(text.decoder_layer(*args))
        return residuals[-1]

    monkeypatch.setattr(m3_module, "decoder_layer", recorded)
    ids = torch.tensor(case["input_ids"])
    pages = KVPages.allocate(model.config, 9)
    logits = model.forward([Span(ids, 0, torch.arange(1, 9), media_of(case, model, ids))], pages, "all")[0]

    for position, key in ((-1, "last_first16"), (0, "first_first8"), (len(ids) // 2, "mid_first8")):
        numbers = torch.tensor(expected[f"logits_{key}_independent_float64"])
        assert (logits[position, : len(numbers)] - numbers).abs().max() < TOLERANCE, key
    assert logits.argmax(-1).tolist() == expected["argmax_all_positions"]
    assert logits.double().sum() == pytest.approx(expected["sum_all_logits_independent_float64"], abs=0.02)
    assert logits.double().square().sum() == pytest.approx(expected["sumsq_all_logits_independent_float64"], rel=1e-6)
    for layer, numbers in enumerate(expected["layer_output_last_token_first8_independent_float64"]):
        assert (residuals[layer][-1, :8] - torch.tensor(numbers)).abs().max() < TOLERANCE, f"layer {layer}"


@pytest.mark.parametrize("name", ["sparse_block8_top3", "moe_vision"])
def test_selected_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = build(name)
    chosen: list[tuple[int, Tensor]] = []
    real = text.select_blocks

    def recorded(scores: Tensor, start: int, *args: Any) -> Tensor:
        chosen.append((start, real(scores, start, *args)))
        return chosen[-1][1]

    monkeypatch.setattr(text, "select_blocks", recorded)
    ids = torch.tensor(case["input_ids"])
    pages = KVPages.allocate(model.config, 8)
    model.forward([Span(ids, 0, torch.arange(8), media_of(case, model, ids))], pages)

    expected = case["expected"]["selected_blocks_by_layer_head_query"]
    assert len(chosen) == len(expected) == 2
    for (start, blocks), heads in zip(chosen, expected.values(), strict=True):
        assert start == 3 * 8  # before that three blocks hold everything and no selection is made
        for head, queries in enumerate(heads):
            assert blocks[:, head].tolist() == queries[start:]


def test_chosen_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    case, model = build("moe_vision")
    routes: list[tuple[Tensor, Tensor]] = []
    real = text.route

    def recorded(*args: Any) -> tuple[Tensor, Tensor]:
        routes.append(tuple(x.clone() for x in real(*args)))
        return routes[-1]

    monkeypatch.setattr(text, "route", recorded)
    ids = torch.tensor(case["input_ids"])
    model.forward([Span(ids, 0, torch.arange(8), media_of(case, model, ids))], KVPages.allocate(model.config, 8))

    expected = case["expected"]
    for (chosen, weights), layer in zip(routes, ("1", "2"), strict=True):
        assert chosen.sort(-1).values.tolist() == expected["chosen_experts_sorted_by_layer_token"][layer]
        last = expected["route_last_token"][layer]
        found = dict(zip(chosen[-1].tolist(), weights[-1].tolist(), strict=True))
        for expert, weight in zip(last["experts"], last["weights"], strict=True):
            assert found[expert] == pytest.approx(weight, abs=1e-6)


def test_greedy_continuation() -> None:
    case, model = build("sparse_block8_top3")
    expected = case["expected"]["greedy_continuation"]["next_14_tokens"]
    assert greedy(model, torch.tensor(case["input_ids"][:21]), 14) == expected


def test_vision_features() -> None:
    case, model = build("moe_vision")
    expected = case["expected"]
    assert model.weights.vision is not None
    assert model.config.vision is not None
    for kind, pixels, row, hidden_key in (
        ("image", "pixel_values", 0, "vision_hidden_image_row0_first6"),
        ("video", "pixel_values_videos", -1, "vision_hidden_video_last_row_first6"),
    ):
        patches, grids = fill(**case[pixels]), [tuple(grid) for grid in case[f"{kind}_grid_thw"]]
        hidden = vision_tower(patches, grids, model.weights.vision, model.config.vision)
        assert (hidden[row, :6] - torch.tensor(expected[hidden_key])).abs().max() < TOLERANCE
        rows = model.encode_media(patches, grids)
        numbers = torch.tensor(expected[f"{kind}_features_rows_first6"])
        assert (rows[: len(numbers), :6] - numbers).abs().max() < TOLERANCE


def test_mxfp8_bytes() -> None:
    expected = VECTORS["mxfp8"]
    weight = fill([4, 96], 77, 1.0).double()
    weight[1, :32] *= 1e-3
    weight[2, 32:64] *= 300
    weight[3, 64:96] = 0
    weight[0, 5] = 0.75
    values, scales = quantize_mxfp8(weight.float())
    assert scales.tolist() == expected["scale_uint8"]
    assert values.view(torch.uint8).tolist() == expected["value_bytes"]
    restored = dequantize_mxfp8(values, scales)
    assert restored[:, :8].tolist() == expected["dequantised_first8_of_each_row"]
    assert restored.double().sum().item() == pytest.approx(expected["sum_dequantised"], rel=1e-12)
