"""Any decoded picture → upright opaque 8-bit RGB. The one place where modes, alpha, depth and EXIF are dealt with.

A bare `convert("RGB")` is wrong in five ways that nobody sees until the model answers nonsense: it shows the colour
hidden under transparent pixels, drops EXIF orientation, clips 16-bit grey to white, ignores tRNS, and wraps floats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

Colour = tuple[int, int, int]
Pixels = NDArray[np.uint8]

# EXIF tag 0x0112 → what makes the stored picture upright (EXIF 2.32, section 4.6.4 A).
_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Pil.Transpose.FLIP_LEFT_RIGHT,
    3: Pil.Transpose.ROTATE_180,
    4: Pil.Transpose.FLIP_TOP_BOTTOM,
    5: Pil.Transpose.TRANSPOSE,
    6: Pil.Transpose.ROTATE_270,
    7: Pil.Transpose.TRANSVERSE,
    8: Pil.Transpose.ROTATE_90,
}


def picture_to_rgb(picture: Pil.Image, background: Colour) -> Pixels:
    """Upright RGB pixels, uint8 [h, w, 3], of a Pillow picture in any mode.

    Transparent parts are composited on `background`. 16-bit grey is scaled by its range. Modes whose range the format
    does not tell are read by their values: "I" as 8-bit if all are in 0..255, as 16-bit if in 0..65535; "F" as 0..1 or
    0..255; anything else is stretched from its minimum to its maximum.
    """
    picture.load()  # a TIFF turns itself upright here and then drops its orientation, so this comes first
    turn = _UPRIGHT.get(_orientation(picture))
    rgb = _flatten(picture, background)
    if turn is not None:
        rgb = rgb.transpose(turn)
    return np.asarray(rgb)


def array_to_rgb(array: NDArray[np.generic], background: Colour) -> Pixels:
    """uint8 [h, w, 3] of an array [h, w] or [h, w, 1|2|3|4] (grey, grey + alpha, RGB, RGBA).

    uint8 as it is, uint16 scaled from 0..65535, bool to black and white, floats must lie in 0..1. ValueError otherwise.
    """
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 2, 3, 4):
        raise ValueError(f"an array must be [height, width] or [height, width, 1..4], not {list(array.shape)}")
    if 0 in array.shape:
        raise ValueError(f"an array of shape {list(array.shape)} has no pixels")
    pixels = _array_to_bytes(array)
    if pixels.shape[2] in (2, 4):
        alpha = pixels[:, :, -1:].astype(np.uint32)
        ground = np.array(background, dtype=np.uint32)
        pixels = ((pixels[:, :, :-1] * alpha + ground * (255 - alpha) + 127) // 255).astype(np.uint8)
    return np.ascontiguousarray(np.broadcast_to(pixels, (*pixels.shape[:2], 3)))


def _array_to_bytes(array: NDArray[np.generic]) -> Pixels:
    if array.dtype == np.uint8:
        return array.astype(np.uint8)
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype == np.uint16:
        return _scale_16_bit(array)
    if np.issubdtype(array.dtype, np.floating):
        values = array.astype(np.float64)
        if not (np.isfinite(values).all() and values.min() >= 0 and values.max() <= 1):
            raise ValueError("an array of floats must lie in 0..1; scale it, or convert it to uint8")
        return np.rint(values * 255).astype(np.uint8)
    raise ValueError(f"an array must be uint8, uint16, bool or float in 0..1, not {array.dtype}")


def _orientation(picture: Pil.Image) -> int:
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF is common in the wild and Pillow raises nearly anything; the picture is still good
        return 1


def _flatten(picture: Pil.Image, background: Colour) -> Pil.Image:
    if picture.mode.startswith("I;16") or picture.mode in ("I", "F"):
        return _flatten_deep(picture, background)
    if picture.has_transparency_data:
        key = picture.info.get("transparency")
        if isinstance(key, tuple) and max(key) > 255:  # a 16-bit RGB file: its pixels are 8-bit here, its key is not
            picture = picture.copy()
            picture.info["transparency"] = tuple(part >> 8 for part in key)
        ground = Pil.new("RGBA", picture.size, (*background, 255))
        # La has no direct way to RGBA; PA and P keep their alpha only on the way to RGBA.
        over = picture.convert("LA").convert("RGBA") if picture.mode == "La" else picture.convert("RGBA")
        return Pil.alpha_composite(ground, over).convert("RGB")
    return picture.convert("RGB")


def _flatten_deep(picture: Pil.Image, background: Colour) -> Pil.Image:
    """Grey of more than 8 bits, with its optional transparent value."""
    values = np.asarray(picture)
    grey = _scale_16_bit(values) if picture.mode.startswith("I;16") else _scale_by_values(values)
    rgb = np.repeat(grey[:, :, None], 3, axis=2)
    key = picture.info.get("transparency")
    if isinstance(key, int):
        rgb[values == key] = background
    return Pil.fromarray(rgb)


def _scale_16_bit(values: NDArray[np.generic]) -> Pixels:
    return ((values.astype(np.uint32) + 128) // 257).astype(np.uint8)  # 65535 = 255 · 257


def _scale_by_values(values: NDArray[np.generic]) -> Pixels:
    finite = np.isfinite(values)
    if not finite.any():
        return np.zeros(values.shape, np.uint8)
    low, high = float(values[finite].min()), float(values[finite].max())
    tops = (1.0, 255.0) if np.issubdtype(values.dtype, np.floating) else (255.0, 65535.0)
    fitting = [top for top in tops if low >= 0 and high <= top]
    start, end = (0.0, fitting[0]) if fitting else (low, high)
    # holes of a depth map (NaN, infinities) become black; a flat picture has no range to stretch
    numbers = np.where(finite, values.astype(np.float64), start)
    return np.rint((numbers - start) / (end - start or 1.0) * 255).astype(np.uint8)
