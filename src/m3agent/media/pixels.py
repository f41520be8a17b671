"""Pixels → patches: MiniMax-M3's size rule, resize, normalisation and patch order, for pictures and for films.

The rule is the one of the Qwen2-VL family (factor 28 = patch 14 × merge 2); the values are those of the released image
and video processors. `size` in the released preprocessor_config.json is not used by any of them and is not read here.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from m3agent.errors import ConfigError, ImageError, MediaError, VideoError
from m3agent.json_file import read_object

if TYPE_CHECKING:
    from m3agent.model import VisionConfig

MAX_ASPECT = 200


@dataclass(frozen=True)
class PixelSpec:
    """How a checkpoint wants its pixels. Areas are in pixels after resizing; those of films count one frame."""

    patch: int = 14
    merge: int = 2
    temporal: int = 2  # frames per temporal patch
    image_min: int = 4 * 28 * 28
    image_max: int = 451_584  # 672², 576 tokens
    video_min: int = 4 * 28 * 28
    video_max: int = 768 * 28 * 28
    segment_max_frames: int = 4  # temporal patches per vision grid
    mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of this."""
        return self.patch * self.merge

    @property
    def row(self) -> int:
        """Values in one patch row: channels · frames · patch · patch."""
        return 3 * self.temporal * self.patch * self.patch

    @classmethod
    def from_folder(cls, folder: str | Path, vision: VisionConfig) -> PixelSpec:
        """Read preprocessor_config.json and video_preprocessor_config.json of a checkpoint with this vision tower.

        The tower alone says how patches are cut; where the files repeat that, they are not read. A missing file or
        entry means the released value. `min_pixels` and `max_pixels` count at the top level or inside
        a `size` object, also as `shortest_edge` and `longest_edge`; a `size` list is not used. Those for films are read
        from video_preprocessor_config.json or, if that file is missing, the top level of preprocessor_config.json.
        Raises CheckpointError for a file that is no JSON object, ConfigError for an entry that cannot be meant.
        """
        folder = Path(folder)
        pictures = read_object(folder / "preprocessor_config.json") or {}
        films = read_object(folder / "video_preprocessor_config.json") or {
            name: pictures[name] for name in ("min_pixels", "max_pixels") if name in pictures
        }
        found: dict[str, Any] = {
            "patch": vision.patch_size,
            "merge": vision.spatial_merge_size,
            "temporal": vision.temporal_patch_size,
            "segment_max_frames": vision.segment_max_frames,
            "image_min": _bound(pictures, "min_pixels", "shortest_edge"),
            "image_max": _bound(pictures, "max_pixels", "longest_edge"),
            "video_min": _bound(films, "min_pixels", "shortest_edge"),
            "video_max": _bound(films, "max_pixels", "longest_edge"),
            "mean": _triple(pictures, "image_mean"),
            "std": _triple(pictures, "image_std"),
        }
        spec = replace(cls(), **{name: value for name, value in found.items() if value is not None})
        _check(spec)
        return spec


@dataclass
class Patches:
    """A picture or film ready for the vision tower."""

    pixels: Tensor  # float32 [patches, 3 · temporal · patch · patch]
    grids: list[tuple[int, int, int]]  # (temporal, high, wide) in patches; a film has one for each segment
    digest: str  # of `kind`, `grids` and `pixels`: equal input to the vision tower
    kind: Literal["image", "video"]
    timestamps: list[float] | None  # seconds, one per temporal patch; films only
    tokens: int  # in the text, placeholders only
    tokens_per_frame: int  # per temporal patch


def size_rule(height: int, width: int, low: int, high: int, factor: int = 28) -> tuple[int, int]:
    """(height, width) in multiples of `factor`, area within [low, high] where that can be, aspect ratio nearly kept.

    Rounds half to even. Raises MediaError when a side is empty or more than 200 times the other (200 itself passes).
    """
    if min(height, width) < 1:
        raise MediaError(f"a picture of {width}x{height} has no pixels")
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise MediaError(f"{width}x{height}: the longer side is over {MAX_ASPECT} times the shorter one; crop it")
    rounded = round(height / factor) * factor, round(width / factor) * factor
    area = rounded[0] * rounded[1]
    if area > high:
        # both from the original sides: shrinking the rounded ones would drift from the trained sizes
        shrink = math.sqrt(height * width / high)
        return (
            max(factor, math.floor(height / shrink / factor) * factor),
            max(factor, math.floor(width / shrink / factor) * factor),
        )
    if area < low:
        grow = math.sqrt(low / (height * width))
        return math.ceil(height * grow / factor) * factor, math.ceil(width * grow / factor) * factor
    return rounded


def image_patches(rgb: NDArray[np.uint8], spec: PixelSpec) -> Patches:
    """Patches of one picture: rgb uint8 [h, w, 3]. One temporal patch, which holds the picture twice.

    Raises ImageError for an aspect ratio over 200.
    """
    try:
        size = size_rule(rgb.shape[0], rgb.shape[1], spec.image_min, spec.image_max, spec.factor)
    except MediaError as error:
        raise ImageError(str(error)) from None
    frame = normalise(resize(to_frames(rgb[None]), size), spec)  # [1, 3, H, W]
    return _patches("image", frame.expand(spec.temporal, -1, -1, -1), None, spec)


def video_patches(frames: NDArray[np.uint8], timestamps: Sequence[float] | None, spec: PixelSpec) -> Patches:
    """Patches of a film: frames uint8 [f, h, w, 3] and their times in seconds [f], or None for a film without times.

    The last frame is repeated to fill the last temporal patch. A temporal patch has the time of its first frame.
    Raises VideoError for no frames, an aspect ratio over 200, or times that do not match the frames.
    """
    if len(frames) == 0:
        raise VideoError("a film needs at least one frame")
    if timestamps is not None and len(timestamps) != len(frames):
        raise VideoError(f"{len(frames)} frames with {len(timestamps)} timestamps")
    try:
        size = size_rule(frames.shape[1], frames.shape[2], spec.video_min, spec.video_max, spec.factor)
    except MediaError as error:
        raise VideoError(str(error)) from None
    # frame by frame: the resize's working memory is then that of one frame, not of the film
    values = torch.cat([normalise(resize(to_frames(frame[None]), size), spec) for frame in frames])  # [f, 3, H, W]
    if missing := -len(values) % spec.temporal:
        values = torch.cat([values, values[-1:].expand(missing, -1, -1, -1)])
    times = None if timestamps is None else [float(time) for time in timestamps[:: spec.temporal]]
    return _patches("video", values, times, spec)


def to_frames(rgb: NDArray[np.uint8]) -> Tensor:
    """uint8 [f, h, w, 3] → uint8 [f, 3, h, w], copied (torch cannot hold a read-only array)."""
    return torch.tensor(rgb, dtype=torch.uint8).permute(0, 3, 1, 2).contiguous()


def resize(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """Bicubic with antialias on uint8 [f, 3, h, w] → uint8 [f, 3, *size].

    On bytes, because the released processors do so: resizing floats and rounding afterwards changes a quarter of the
    values. Runs on the CPU, where the kernel's fixed-point arithmetic is the trained one.
    """
    if tuple(frames.shape[-2:]) == size:
        return frames
    return torch.nn.functional.interpolate(frames, size, mode="bicubic", antialias=True, align_corners=False)


def normalise(frames: Tensor, spec: PixelSpec) -> Tensor:
    """uint8 [f, 3, h, w] → float32: (x − 255·mean) / (255·std), which is x/255 normalised, in one step."""
    mean = (torch.tensor(spec.mean) * 255).view(1, 3, 1, 1)
    std = (torch.tensor(spec.std) * 255).view(1, 3, 1, 1)
    return frames.to(torch.float32).sub_(mean).div_(std)


def cut(frames: Tensor, spec: PixelSpec) -> Tensor:
    """[f, 3, H, W] → rows [f/temporal · H/patch · W/patch, 3 · temporal · patch · patch].

    Rows run over (time, cell row, cell column, row in cell, column in cell), where a cell is the merge × merge patches
    that become one token; a row's values run over (channel, time, y, x).
    """
    count, channels, height, width = frames.shape
    patch, merge, temporal = spec.patch, spec.merge, spec.temporal
    high, wide = height // spec.factor, width // spec.factor
    cells = frames.reshape(count // temporal, temporal, channels, high, merge, patch, wide, merge, patch)
    return cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, spec.row)


def _patches(
    kind: Literal["image", "video"], frames: Tensor, timestamps: list[float] | None, spec: PixelSpec
) -> Patches:
    pixels = cut(frames, spec)
    count = frames.shape[0] // spec.temporal
    high, wide = frames.shape[2] // spec.patch, frames.shape[3] // spec.patch
    starts = range(0, count, spec.segment_max_frames)
    grids = [(min(spec.segment_max_frames, count - start), high, wide) for start in starts]
    per_frame = high * wide // spec.merge**2
    digest = hashlib.blake2b(f"{kind} {grids} {pixels.shape[1]}:".encode(), digest_size=16)
    digest.update(pixels.numpy().data)
    return Patches(pixels, grids, digest.hexdigest(), kind, timestamps, count * per_frame, per_frame)


def _bound(config: Mapping[str, Any], name: str, edge: str) -> Any:
    size = config.get("size")
    inside = size if isinstance(size, Mapping) else {}
    return config.get(name, inside.get(name, inside.get(edge)))


def _triple(config: Mapping[str, Any], name: str) -> tuple[float, ...] | None:
    value = config.get(name)
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 3 and all(isinstance(part, int | float) for part in value)):
        raise ConfigError(name, f"must be three numbers, not {value!r}")
    return tuple(float(part) for part in value)


def _check(spec: PixelSpec) -> None:
    for name in ("image_min", "image_max", "video_min", "video_max"):
        value = getattr(spec, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(name, f"must be a positive whole number, not {value!r}")
    for low, high in (("image_min", "image_max"), ("video_min", "video_max")):
        if getattr(spec, low) > getattr(spec, high):
            raise ConfigError(high, f"is smaller than {low}")
    if not all(0 < value < math.inf for value in spec.std):
        raise ConfigError("image_std", f"must be positive numbers, not {spec.std}")
    if not all(map(math.isfinite, spec.mean)):
        raise ConfigError("image_mean", f"must be finite numbers, not {spec.mean}")
