"""Small pictures and films for the tests, some of which no library would write."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil

Pixels = NDArray[np.uint8]


def film(frames: int, width: int, height: int) -> Pixels:
    """The test film of data/processors.json, uint8 [frames, height, width, 3]; steep, so that a wrong resize shows."""
    f, y, x = np.mgrid[:frames, :height, :width]
    red, green, blue = 7 * x * x + 3 * y * y + 11 * f, x * y + 5 * x + 29 * f, x * x + y * y * y + x * f
    return (np.stack([red, green, blue], -1) % 256).astype(np.uint8)


def encode(picture: Pil.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def encode_film(frames: list[Pil.Image], kind: str, durations: list[int], **options: object) -> bytes:
    return encode(frames[0], kind, save_all=True, append_images=frames[1:], duration=durations, **options)


def y4m(levels: list[int], width: int, height: int, rate: str) -> bytes:
    """An uncompressed 4:4:4 film of grey frames: a format that allows odd sizes."""
    head = f"YUV4MPEG2 W{width} H{height} F{rate} Ip A1:1 C444\n".encode()
    size = width * height
    return head + b"".join(b"FRAME\n" + bytes([level]) * size + b"\x80" * (2 * size) for level in levels)


def _chunk(tag: bytes, data: bytes) -> bytes:
    return tag + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def avi(frames: list[Pixels], rate: int, announce: int | None = None) -> bytes:
    """A Motion JPEG film whose header claims `announce` frames."""
    height, width = frames[0].shape[:2] if frames else (17, 33)
    count = len(frames) if announce is None else announce
    main = struct.pack("<14I", 1_000_000 // rate, 0, 0, 0x10, count, 0, 1, 0, width, height, 0, 0, 0, 0)
    stream = b"vidsMJPG" + struct.pack(
        "<IHHIIIIIIII4H", 0, 0, 0, 0, 1, rate, 0, count, 0, 2**32 - 1, 0, 0, 0, width, height
    )
    bitmap = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0)
    tracks = _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", bitmap))
    movie, index = b"movi", b""
    for frame in frames:
        jpeg = encode(Pil.fromarray(frame), "JPEG", quality=95, subsampling=0)
        index += b"00dc" + struct.pack("<III", 0x10, len(movie), len(jpeg))
        movie += _chunk(b"00dc", jpeg)
    body = _chunk(b"LIST", b"hdrl" + _chunk(b"avih", main) + tracks) + _chunk(b"LIST", movie) + _chunk(b"idx1", index)
    return _chunk(b"RIFF", b"AVI " + body)


def mp4(frames: list[Pixels], rate: float, folder: Path) -> bytes:
    """A film as cameras write it (MPEG-4 video; sides even, or OpenCV cuts a line off)."""
    path = folder / "made.mp4"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, frames[0].shape[1::-1])
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[:, :, ::-1]))
    writer.release()
    return path.read_bytes()


def turn_mp4(encoded: bytes, degrees: int) -> bytes:
    """The film with a display matrix that turns it clockwise (ISO 14496-12, track header box)."""
    box = encoded.index(b"tkhd")
    place = box + 4 + 4 + (32 if encoded[box + 4] == 1 else 20) + 16
    one = 0x10000
    a, b, c, d = {0: (one, 0, 0, one), 90: (0, one, -one, 0), 180: (-one, 0, 0, -one), 270: (0, -one, one, 0)}[degrees]
    assert encoded[place : place + 4] == struct.pack(">i", one)
    return encoded[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + encoded[place + 36 :]
