"""Pixels: pictures and films, decoded whole and within limits, and the patches that the vision tower reads.

`Image` and `Video` hold what the user sees (upright, composed, RGB); `pixels` resizes, normalises, cuts into patches.
Nothing here knows the model; only `pixels` imports torch, so its names are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from m3agent.media.image import Image
from m3agent.media.sniff import sniff
from m3agent.media.video import Video

if TYPE_CHECKING:
    from m3agent.media.pixels import Patches, PixelSpec, image_patches, size_rule, video_patches

__all__ = ["Image", "Patches", "PixelSpec", "Video", "image_patches", "size_rule", "sniff", "video_patches"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from m3agent.media import pixels

        return getattr(pixels, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
