"""Patches against the released processors: their own code where it can run, their recorded results elsewhere."""

from __future__ import annotations

import ast
import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from m3agent.errors import ConfigError, ImageError, MediaError, VideoError
from m3agent.media import PixelSpec, image_patches, size_rule, video_patches
from m3agent.media.pixels import cut, normalise, resize, to_frames
from m3agent.model import VisionConfig
from tests.media.makers import film

DATA = Path(__file__).parent / "data"
PROCESSORS = json.loads((DATA / "processors.json").read_text())
VECTORS = json.loads((DATA / "pixels.json").read_text())
SPEC = PixelSpec()


def oracle_size_rule() -> Any:
    """transformers' own function, out of its module, which as a whole needs torchvision."""
    package = importlib.util.find_spec("transformers")
    assert package is not None
    assert package.origin is not None
    path = Path(package.origin).parent / "models/minimax_m3_vl/image_processing_minimax_m3_vl.py"
    tree = ast.parse(path.read_text())
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "smart_resize"]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(functions, []), str(path), "exec"), names)
    return names["smart_resize"]


ORACLE = oracle_size_rule()


@given(
    st.integers(1, 5000),
    st.integers(1, 5000),
    st.sampled_from([(3136, 451_584), (3136, 602_112), (50_176, 50_176), (784, 100_000)]),
)
def test_size_rule_is_transformers(height: int, width: int, bounds: tuple[int, int]) -> None:
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(MediaError, match="200 times"):
            size_rule(height, width, *bounds)
        return
    assert size_rule(height, width, *bounds) == ORACLE(height, width, 28, *bounds)


@given(st.integers(1, 20_000), st.floats(1, 200))
def test_sizes_are_multiples_within_the_bounds(short: int, aspect: float) -> None:
    long = min(int(short * aspect), 200 * short)
    height, width = size_rule(long, short, SPEC.image_min, SPEC.image_max)
    assert height % 28 == width % 28 == 0
    assert SPEC.image_min <= height * width
    # a side never falls under one cell, so only slivers may pass the upper bound
    assert height * width <= SPEC.image_max or width == 28


@pytest.mark.parametrize("case", VECTORS["sizes"], ids=lambda case: f"{case['width']}x{case['height']}")
def test_size_table(case: dict[str, Any]) -> None:
    height, width = case["height"], case["width"]
    assert list(size_rule(height, width, SPEC.image_min, SPEC.image_max)) == case["image_hw"]
    assert list(size_rule(height, width, SPEC.video_min, SPEC.video_max)) == case["video_hw"]


def test_aspect_ratio_over_200_is_refused() -> None:
    assert size_rule(20, 4000, SPEC.image_min, SPEC.image_max) == (28, 4004)
    with pytest.raises(ImageError, match=r"4001x20.*crop"):
        image_patches(np.zeros((20, 4001, 3), np.uint8), SPEC)
    with pytest.raises(VideoError, match="20x4001"):
        video_patches(np.zeros((1, 4001, 20, 3), np.uint8), None, SPEC)
    with pytest.raises(MediaError, match="no pixels"):
        size_rule(0, 5, 1, 2)


@pytest.mark.parametrize("case", PROCESSORS["images"], ids=lambda case: f"{case['width']}x{case['height']}")
def test_image_patches_are_the_released_processors(case: dict[str, Any]) -> None:
    patches = image_patches(film(1, case["width"], case["height"])[0], SPEC)
    assert patches.kind == "image"
    assert patches.timestamps is None
    assert patches.tokens == patches.tokens_per_frame
    check_patches(patches, case)


@pytest.mark.parametrize("case", PROCESSORS["videos"], ids=lambda case: f"{case['frames']}x{case['width']}")
def test_video_patches_are_the_released_processors(case: dict[str, Any]) -> None:
    times = [0.5 * index for index in range(case["frames"])]
    patches = video_patches(film(case["frames"], case["width"], case["height"]), times, SPEC)
    assert patches.kind == "video"
    assert patches.timestamps == times[::2]
    assert patches.tokens == patches.tokens_per_frame * len(times[::2])
    check_patches(patches, case)


def check_patches(patches: Any, case: dict[str, Any]) -> None:
    pixels = patches.pixels
    assert pixels.dtype == torch.float32
    assert pixels.shape == (case["rows"], 1176)
    assert patches.grids == [tuple(grid) for grid in case["grids"]]
    assert patches.tokens == case["rows"] // 4
    flat = pixels.reshape(-1)
    samples = [flat[(i * 7919 * 13) % len(flat)].item() for i in range(1, 25)]
    assert samples == pytest.approx(case["samples"], abs=2e-6)
    assert pixels.double().mean().item() == pytest.approx(case["mean"], abs=1e-6)
    assert pixels.double().std().item() == pytest.approx(case["std"], abs=1e-6)


@pytest.mark.parametrize("name", VECTORS["resize"]["cases"])
def test_resize_golden_numbers(name: str) -> None:
    case = VECTORS["resize"]["cases"][name]
    width, height = map(int, name.split("x"))
    y, x = np.mgrid[:height, :width]
    rgb = (np.stack([3 * x + y, x + 5 * y, x * y], -1) % 256).astype(np.uint8)
    resized = resize(to_frames(rgb[None]), tuple(case["resized_hw"]))
    assert resized.dtype == torch.uint8
    assert resized.sum().item() == case["uint8_sum"]
    pixels = image_patches(rgb, SPEC).pixels
    assert pixels[0, :4].tolist() == pytest.approx(case["row0_first4"], abs=1e-5)
    assert pixels[1, :4].tolist() == pytest.approx(case["row1_first4"], abs=1e-5)
    assert pixels[-1, -1].item() == pytest.approx(case["last"], abs=1e-5)
    assert pixels.std().item() == pytest.approx(case["std"], abs=2e-6)


def test_patch_order_of_a_picture() -> None:
    case = VECTORS["image"]
    values = torch.arange(3 * 56 * 84, dtype=torch.float32).reshape(1, 3, 56, 84)
    rows = cut(values.expand(2, -1, -1, -1), SPEC)
    for row, expected in case["rows"].items():
        assert rows[int(row), case["columns"]].tolist() == expected


def test_patch_order_of_a_film() -> None:
    case = VECTORS["video"]
    values = torch.arange(5 * 3 * 28 * 56, dtype=torch.float32).reshape(5, 3, 28, 56)
    rows = cut(torch.cat([values, values[-1:]]), SPEC)
    for row, expected in case["rows"].items():
        assert rows[int(row), case["columns"]].tolist() == expected


def test_film_grids_are_cut_at_the_segment_limit() -> None:
    spec = PixelSpec(segment_max_frames=2, video_min=1)
    patches = video_patches(film(5, 56, 28), None, spec)
    assert patches.grids == [tuple(grid) for grid in VECTORS["video"]["video_grid_thw"]]
    assert patches.timestamps is None


def test_an_odd_last_frame_fills_its_temporal_patch() -> None:
    frames = film(3, 56, 56)
    longer = video_patches(np.concatenate([frames, frames[-1:]]), None, SPEC)
    assert torch.equal(video_patches(frames, None, SPEC).pixels, longer.pixels)


def test_normalise_is_the_usual_two_steps() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16).expand(1, 3, 16, 16).contiguous()
    mean, std = torch.tensor(SPEC.mean).double(), torch.tensor(SPEC.std).double()
    expected = (values.double() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    torch.testing.assert_close(normalise(values, SPEC).double(), expected, atol=1e-6, rtol=0)


def test_digest_names_pixels_and_grids() -> None:
    picture = film(1, 60, 40)[0]
    other = picture.copy()
    other[0, 0] ^= 128
    same, changed = image_patches(picture.copy(), SPEC), image_patches(other, SPEC)
    assert image_patches(picture, SPEC).digest == same.digest != changed.digest
    # the same pixels as a film are not the same input: the placeholder token differs
    assert video_patches(picture[None], None, SPEC).digest != same.digest


def test_film_needs_frames_and_matching_times() -> None:
    with pytest.raises(VideoError, match="at least one frame"):
        video_patches(np.zeros((0, 28, 28, 3), np.uint8), None, SPEC)
    with pytest.raises(VideoError, match="3 frames with 2 timestamps"):
        video_patches(film(3, 28, 28), [0.0, 1.0], SPEC)


def write(folder: Path, **files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


TOWER = VisionConfig(1280, 32, 16, 5120, 3, 14, 2, 2, 1e-5, 10_000.0, 4)  # the released one


def test_spec_of_an_empty_folder_is_the_released_one(tmp_path: Path) -> None:
    assert PixelSpec.from_folder(tmp_path, TOWER) == SPEC
    assert (SPEC.factor, SPEC.row) == (28, 1176)


def test_spec_ignores_the_released_size_and_cuts_as_the_tower_does(tmp_path: Path) -> None:
    tower = replace(TOWER, patch_size=4, spatial_merge_size=3, temporal_patch_size=1, segment_max_frames=2)
    released = {"size": [672, 672], "max_image_resolution": 1008, "patch_size": 16, "merge_size": 4}
    spec = PixelSpec.from_folder(write(tmp_path, preprocessor_config=released), tower)
    assert spec == PixelSpec(patch=4, merge=3, temporal=1, segment_max_frames=2)
    assert (spec.factor, spec.row) == (12, 48)
    patches = image_patches(
        film(1, 100, 100)[0], PixelSpec(patch=4, merge=3, temporal=1, image_min=1, image_max=10_000)
    )
    assert patches.grids == [(1, 24, 24)]
    assert patches.tokens == 64
    assert patches.pixels.shape == (576, 48)


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_pixels": 50_176, "max_pixels": 50_176},
        {"size": {"min_pixels": 50_176, "max_pixels": 50_176}},
        {"size": {"shortest_edge": 50_176, "longest_edge": 50_176}},
    ],
)
def test_spec_bounds_of_pictures(tmp_path: Path, bounds: dict[str, Any]) -> None:
    spec = PixelSpec.from_folder(
        write(tmp_path, preprocessor_config=bounds, video_preprocessor_config={"fps": 1}), TOWER
    )
    assert spec == PixelSpec(image_min=50_176, image_max=50_176)
    assert image_patches(film(1, 640, 640)[0], spec).grids == [(1, 16, 16)]


def test_spec_bounds_of_films(tmp_path: Path) -> None:
    spec = PixelSpec.from_folder(write(tmp_path, preprocessor_config={"max_pixels": 90_000}), TOWER)
    assert spec == PixelSpec(image_max=90_000, video_max=90_000)
    spec = PixelSpec.from_folder(write(tmp_path, video_preprocessor_config={"max_pixels": 100_000}), TOWER)
    assert spec == PixelSpec(image_max=90_000, video_max=100_000)


def test_spec_says_what_is_wrong(tmp_path: Path) -> None:
    for content in (
        {"max_pixels": "many"},
        {"max_pixels": 0},
        {"min_pixels": 10**7},
        {"image_std": [1, 1]},
        {"image_std": [1, 1, math.nan]},
        {"image_mean": [0, 0, math.inf]},
    ):
        with pytest.raises(ConfigError):
            PixelSpec.from_folder(write(tmp_path, preprocessor_config=content), TOWER)
