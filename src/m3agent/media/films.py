"""Films and animations → a stream of (seconds, upright RGB frame), in the order of display.

Containers go through OpenCV's FFmpeg, animated pictures through Pillow. Both decode frame by frame, so that a long film
needs the memory of the frames that are kept, not of all.
"""

from __future__ import annotations

import io
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np

from m3agent.errors import MissingDependency, VideoError
from m3agent.media.image import DECODERS
from m3agent.media.normalise import Colour, Pixels, picture_to_rgb
from m3agent.media.sniff import sniff

# What FFmpeg may be given. Its probing also knows playlists, which name other files and addresses; those stay out.
CONTAINERS = frozenset({"mp4", "matroska", "avi", "ogg", "flv", "mpeg", "mpegts", "asf", "y4m"})
ANIMATIONS = frozenset({"gif", "webp", "png", "avif"})

Frame = tuple[float, Pixels]

_ROUNDING = 0.002  # seconds: containers round frame times to their own clock, often a millisecond


def read_film(path: Path, name: str, max_pixels: int, warnings: list[str]) -> Generator[Frame]:
    """Frames of a container file, turned as its display matrix says. What goes wrong on the way is added to `warnings`.

    Times are index / rate where the file's own times agree with that, otherwise the file's own.
    Raises VideoError when the file cannot be opened or its frames are over `max_pixels`.
    """
    try:
        import cv2
    except ImportError:
        raise MissingDependency("opencv-python-headless", "video", "reading films") from None
    capture = cv2.VideoCapture(str(path.resolve()), cv2.CAP_FFMPEG)
    try:
        if not capture.isOpened():
            raise VideoError(f"{name}: the film cannot be opened: no picture track, damaged, or cut short")
        capture.set(cv2.CAP_PROP_ORIENTATION_AUTO, 1)
        width, height = int(capture.get(cv2.CAP_PROP_FRAME_WIDTH)), int(capture.get(cv2.CAP_PROP_FRAME_HEIGHT))
        if width * height > max_pixels:
            raise VideoError(f"{name}: frames of {width}x{height} are over the limit of {max_pixels} pixels")
        yield from _captured(capture, cv2, warnings)
    finally:
        capture.release()


def _captured(capture: Any, cv2: Any, warnings: list[str]) -> Generator[Frame]:
    rate = capture.get(cv2.CAP_PROP_FPS)
    rate = float(rate) if math.isfinite(rate) and rate > 0 else 0.0
    announced = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    index, decoded, time = 0, 0, -1.0
    while capture.grab():
        time = frame_time(index, rate, capture.get(cv2.CAP_PROP_POS_MSEC) / 1000, time)
        good, frame = capture.retrieve()
        if good and frame is not None:
            decoded += 1
            yield time, np.ascontiguousarray(frame[:, :, ::-1])  # OpenCV's order is BGR
        index += 1
    if decoded < announced < 1e9:
        warnings.append(f"{decoded} frames could be decoded, the file announces {int(announced)}")


def frame_time(index: int, rate: float, stamp: float, last: float) -> float:
    """Seconds of frame `index`: `stamp` is what the file says, `last` the time of the frame before (-1 for none)."""
    if rate and last < index / rate and abs(stamp - index / rate) <= _ROUNDING:
        return index / rate
    if math.isfinite(stamp) and stamp > last:
        return stamp
    return last + 1 / (rate or 25.0) if last >= 0 else 0.0  # no usable times: count on, at television's rate if need be


def read_animation(
    encoded: bytes, name: str, background: Colour, max_pixels: int, warnings: list[str]
) -> Generator[Frame]:
    """Frames of an animated picture, each fully composed; times are the sums of the durations before.

    A duration of 0 counts as 0.1 s, which is how browsers show it. Raises VideoError when not even the header is sound.
    """
    try:
        picture = DECODERS[sniff(encoded)](io.BytesIO(encoded), "")
        count = int(getattr(picture, "n_frames", 1))
    except Exception as error:  # the decoders raise nearly anything on damaged data
        raise VideoError(f"{name}: {sniff(encoded)} data that cannot be decoded: {error}") from error
    if picture.width * picture.height > max_pixels:
        raise VideoError(
            f"{name}: frames of {picture.width}x{picture.height} are over the limit of {max_pixels} pixels"
        )
    first = 1 if getattr(picture, "default_image", False) else 0  # an APNG's picture for viewers that cannot animate
    time = 0.0
    for index in range(first, count):
        try:
            picture.seek(index)
            frame = picture_to_rgb(picture, background)
        except Exception as error:
            warnings.append(f"{index - first} of {count - first} frames could be decoded, then: {error}")
            return
        yield time, frame
        time += (picture.info.get("duration") or 100) / 1000
