"""`Image`: one still picture as the model will see it, decoded whole before it may enter a conversation."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    GifImagePlugin,
    ImageColor,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)
from PIL import Image as Pil
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from m3agent.errors import ImageError, MediaError
from m3agent.media.files import read_file
from m3agent.media.normalise import Colour, Pixels, array_to_rgb, picture_to_rgb
from m3agent.media.plain import field_schema, from_base64, read_limit, to_base64
from m3agent.media.sniff import sniff

MAX_PIXELS = 64_000_000
MAX_FILE_BYTES = 256 * 1024 * 1024

# One decoder per sniffed format, called directly: `PIL.Image.open` would also try formats that run other programs
# (EPS), and checks sizes against a limit of its own before telling what the size is.
DECODERS: dict[str, Callable[[io.BytesIO, str], Pil.Image]] = {
    "avif": AvifImagePlugin.AvifImageFile,
    "bmp": BmpImagePlugin.BmpImageFile,
    "gif": GifImagePlugin.GifImageFile,
    "jpeg": JpegImagePlugin.jpeg_factory,
    "png": PngImagePlugin.PngImageFile,
    "ppm": PpmImagePlugin.PpmImageFile,
    "tiff": TiffImagePlugin.TiffImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
}
_HINTS = {
    "empty": "the data are empty",
    "html": "this is a web page, not a picture; was an error page saved?",
    "heif": "HEIF is not read here; convert it to PNG or JPEG",
    "pdf": "a PDF has to be rendered to pictures first",
    "svg": "an SVG has to be rendered to a picture first (m3agent.loops.SvgRenderer)",
    "mp4": "this is a film: use m3agent.Video",
    "matroska": "this is a film: use m3agent.Video",
    "avi": "this is a film: use m3agent.Video",
}


@dataclass(frozen=True)
class _Decoded:
    rgb: Pixels
    format: str
    frames: int
    encoded: bytes | None  # None when the source was pixels
    digest: str


class Image:
    """A still picture: upright, opaque, 8-bit RGB.

    Args:
        source: a path, the encoded bytes of a picture (PNG, JPEG, GIF, WebP, BMP, TIFF, AVIF, PPM; told by content, not
            by name), a Pillow picture, or an array [h, w] or [h, w, 1..4] (uint8, uint16, bool, or float in 0..1).
        background: what shows through transparent parts: a colour name, "#rrggbb", or (r, g, b).
        max_pixels: the limit on width · height, checked before the pixels are decoded.

    Pixels from Pillow or an array are copied at once. A path or bytes are decoded on `load()` or at the first look at
    the pixels; `load` does all of it, so that a picture that passed it cannot fail later.

    EXIF orientation is applied, so width and height are those of the upright picture. Of an animation the first frame
    is taken, fully composed, and `frames` says how many there are; `m3agent.Video` reads all of them. Two images are
    equal when their pixels are.

    Raises ImageError (on load, or at once for pixels): not readable, cut short, not a picture, over the limits.
    """

    __slots__ = ("_decoded", "_source", "background", "max_pixels", "name")

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes | Pil.Image | NDArray[Any],
        *,
        background: str | Colour = "white",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.background = parse_colour(background, ImageError)
        self.max_pixels = max_pixels
        self._decoded: _Decoded | None = None
        self._source: Path | bytes = b""
        match source:
            case bytes() | bytearray() | memoryview():
                self.name = "<bytes>"
                self._source = bytes(source)
            case str() | os.PathLike():
                self.name = os.fspath(source)
                if not self.name:
                    raise ImageError("the path of the picture is empty")
                self._source = Path(source)
            case Pil.Image():
                self.name = "<PIL image>"
                self._decoded = self._take_pixels(source)
            case np.ndarray():
                self.name = "<array>"
                self._decoded = self._take_pixels(source)
            case _:
                raise ImageError(
                    "an Image is made from a path, encoded bytes, a Pillow image or a numpy array, "
                    f"not {type(source).__name__}"
                )

    def load(self) -> Image:
        """Decode everything now (reads the file, blocks; call it in a thread). Returns the image itself."""
        self._data()
        return self

    @property
    def rgb(self) -> Pixels:
        """The pixels, uint8 [height, width, 3], read-only."""
        return self._data().rgb

    @property
    def width(self) -> int:
        return self.rgb.shape[1]

    @property
    def height(self) -> int:
        return self.rgb.shape[0]

    @property
    def frames(self) -> int:
        """How many frames the file has; this image is the first of them. 1 for pixels (Pillow's current frame)."""
        return self._data().frames

    @property
    def format(self) -> str:
        """The sniffed format of the source ("png", "jpeg", …), or "pixels"."""
        return self._data().format

    @property
    def digest(self) -> str:
        """32 hexadecimal digits (BLAKE2b) of size and pixels; equal pictures have equal digests, whatever the file."""
        return self._data().digest

    def to_png(self) -> bytes:
        """The pixels as a PNG file."""
        buffer = io.BytesIO()
        Pil.fromarray(self.rgb).save(buffer, "PNG")
        return buffer.getvalue()

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads: the original file in base64 where there was one, otherwise a PNG."""
        decoded = self._data()
        return {
            "type": "image",
            "name": os.path.basename(self.name),
            "max_pixels": self.max_pixels,
            "background": "#{:02x}{:02x}{:02x}".format(*self.background),
            "data": to_base64(decoded.encoded or self.to_png()),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Image:
        """The image of `to_json`, decoded. Raises ImageError."""
        if not isinstance(data.get("data"), str):
            raise ImageError('image data need the entry "data": a picture file in base64')
        encoded = from_base64(data["data"], ImageError)
        limit = read_limit(data, "max_pixels", MAX_PIXELS, ImageError)
        image = cls(encoded, background=data.get("background", "white"), max_pixels=limit)
        image.name = str(data.get("name", image.name))
        return image.load()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """An Image can be a field of a pydantic model; in JSON it is the object of `to_json`."""
        return field_schema(cls)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Image) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        if self._decoded is None:
            return f"Image({self.name!r}, not decoded yet)"
        frames = f", first of {self.frames} frames" if self.frames > 1 else ""
        return f"Image({self.width}x{self.height}, {self.format}{frames}, {self.digest[:4]}…)"

    def _data(self) -> _Decoded:
        if self._decoded is None:
            self._decoded = self._decode()  # two threads at once do it twice, with the same result
        return self._decoded

    def _take_pixels(self, source: Pil.Image | NDArray[Any]) -> _Decoded:
        try:
            if isinstance(source, np.ndarray):
                height, width = source.shape[:2] if source.ndim >= 2 else (1, source.size)
                self._check_size(width, height, "pixels")
                return _finish(array_to_rgb(source, self.background), "pixels", 1, None)
            self._check_size(source.width, source.height, "pixels")
            return _finish(picture_to_rgb(source, self.background), "pixels", 1, None)
        except ImageError:
            raise
        except Exception as error:  # a Pillow picture may still be undecoded, and damaged
            raise ImageError(f"{self.name}: {error}") from error

    def _decode(self) -> _Decoded:
        source = self._source
        encoded = source if isinstance(source, bytes) else read_file(source, MAX_FILE_BYTES, ImageError)
        kind = sniff(encoded)
        if kind not in DECODERS:
            raise ImageError(
                f"{self.name}: not a picture ({kind}, {len(encoded)} bytes): {_HINTS.get(kind, 'unknown format')}"
            )
        try:
            picture = DECODERS[kind](io.BytesIO(encoded), "")
            self._check_size(*picture.size, kind)
            # counted first: it may walk through the file, and leaves the picture at its first frame
            frames = _frame_count(picture)
            return _finish(picture_to_rgb(picture, self.background), kind, frames, encoded)
        except ImageError:
            raise
        except Exception as error:  # the decoders raise nearly anything on damaged data
            raise ImageError(
                f"{self.name}: {kind} data that cannot be decoded, damaged or cut short at byte {len(encoded)}: {error}"
            ) from error

    def _check_size(self, width: int, height: int, kind: str) -> None:
        if width * height > self.max_pixels:
            raise ImageError(
                f"{self.name}: {kind} of {width}x{height} = {width * height} pixels is over the limit of "
                f"{self.max_pixels}; shrink it, or pass max_pixels"
            )


def parse_colour(colour: str | Colour, error: type[MediaError]) -> Colour:
    """(r, g, b) of a colour name, "#rrggbb" or a triple; raises `error` for anything else."""
    try:
        parts = ImageColor.getrgb(colour) if isinstance(colour, str) else tuple(int(part) for part in colour)
    except (TypeError, ValueError):
        parts = ()
    if len(parts) != 3 or not all(0 <= part <= 255 for part in parts):
        raise error(f'background {colour!r} is not an opaque colour: use a name, "#rrggbb" or (r, g, b) in 0..255')
    return parts[0], parts[1], parts[2]


def _frame_count(picture: Pil.Image) -> int:
    if picture.format == "MPO":  # a photograph with its preview or depth map, not an animation
        return 1
    return getattr(picture, "n_frames", 1)


def _finish(rgb: Pixels, kind: str, frames: int, encoded: bytes | None) -> _Decoded:
    rgb = np.ascontiguousarray(rgb)
    rgb.flags.writeable = False
    digest = hashlib.blake2b(f"{rgb.shape[1]}x{rgb.shape[0]}:".encode(), digest_size=16)
    digest.update(rgb.data)
    return _Decoded(rgb, kind, frames, encoded, digest.hexdigest())
