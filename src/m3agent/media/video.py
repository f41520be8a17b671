"""`Video`: a film as the model will see it: sampled frames and their times, decoded whole."""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image as Pil
from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema

from m3agent.errors import ImageError, VideoError
from m3agent.media.files import read_file
from m3agent.media.films import ANIMATIONS, CONTAINERS, Frame, read_animation, read_film
from m3agent.media.image import MAX_PIXELS, Image, parse_colour
from m3agent.media.normalise import Colour, Pixels
from m3agent.media.plain import field_schema, from_base64, read_limit, to_base64
from m3agent.media.sniff import sniff

MAX_FRAMES = 768  # the released video processor's max_frames
MAX_FILM_PIXELS = 512_000_000  # kept frames · height · width: 1.5 GB of pixels
MAX_FILE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class _Decoded:
    frames: Pixels  # [frames, height, width, 3]
    timestamps: list[float] | None
    warnings: tuple[str, ...]
    format: str
    encoded: bytes | None
    digest: str


class Video:
    """A film: sampled upright RGB frames with their times.

    Args:
        source: a path or the bytes of a film (MP4, MOV, Matroska, WebM, AVI, … ; told by content) or of an animated
            GIF, WebP, PNG or AVIF; or a sequence of frames of one size (arrays, Pillow pictures or `Image`s).
        fps: how many frames of each second are kept; None keeps all. Frame 0 is kept, then each first frame at
            least 1/fps after the one kept before, and the very last frame.
        frame_rate: frames a second of a *sequence*. Without it the frames have no times, and all are kept.
        background: what shows through transparent parts of animations and frames.
        max_frames: the limit on kept frames.

    Films are turned as their display matrix says, and odd sizes stay exact. A path or bytes are decoded on `load()` or
    at the first look; a sequence is read at once. Fewer frames than announced is no error: see `warnings`.

    Raises VideoError: not a film, nothing decodable, over the limits. Films need the extra `m3agent[video]` (OpenCV).
    """

    __slots__ = ("_decoded", "_source", "background", "fps", "max_frames", "name")

    def __init__(
        self,
        source: str | os.PathLike[str] | bytes | Sequence[NDArray[Any] | Pil.Image | Image],
        *,
        fps: float | None = 1.0,
        frame_rate: float | None = None,
        background: str | Colour = "white",
        max_frames: int = MAX_FRAMES,
    ) -> None:
        for label, rate in (("fps", fps), ("frame_rate", frame_rate)):
            if rate is not None and not (isinstance(rate, int | float) and math.isfinite(rate) and rate > 0):
                raise VideoError(f"{label} must be a positive number of frames a second, not {rate!r}")
        self.fps = fps
        self.background = parse_colour(background, VideoError)
        self.max_frames = max_frames
        self._decoded: _Decoded | None = None
        self._source: Path | bytes = b""
        if isinstance(source, bytes | bytearray | memoryview):
            self.name = "<bytes>"
            self._source = bytes(source)
        elif isinstance(source, str | os.PathLike):
            self.name = os.fspath(source)
            if not self.name:
                raise VideoError("the path of the film is empty")
            self._source = Path(source)
        elif isinstance(source, Sequence | np.ndarray):
            self.name = "<frames>"
            self._decoded = self._take_frames(source, frame_rate)
        else:
            raise VideoError(f"a Video is made from a path, bytes or a sequence of frames, not {type(source).__name__}")
        if self._decoded is None and frame_rate is not None:
            raise VideoError("frame_rate is for a sequence of frames; a film knows its own")

    def load(self) -> Video:
        """Decode everything now (blocks; call it in a thread). Returns the film itself."""
        self._data()
        return self

    @property
    def frames(self) -> Pixels:
        """The kept frames, uint8 [frames, height, width, 3], read-only."""
        return self._data().frames

    @property
    def timestamps(self) -> list[float] | None:
        """Seconds from the start, one per kept frame; None for a sequence without a frame rate."""
        times = self._data().timestamps
        return None if times is None else list(times)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was wrong with the file though frames could be read, such as fewer frames than it announces."""
        return self._data().warnings

    @property
    def width(self) -> int:
        return self.frames.shape[2]

    @property
    def height(self) -> int:
        return self.frames.shape[1]

    @property
    def format(self) -> str:
        """The sniffed format of the source ("mp4", "gif", …), or "frames"."""
        return self._data().format

    @property
    def digest(self) -> str:
        """32 hexadecimal digits (BLAKE2b) of size, pixels and times."""
        return self._data().digest

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads: the original file in base64, or each frame of a sequence as a PNG."""
        decoded = self._data()
        data: dict[str, Any] = {"type": "video", "name": os.path.basename(self.name), "max_frames": self.max_frames}
        if decoded.encoded is None:
            pictures = [to_base64(Image(frame).to_png()) for frame in decoded.frames]
            return {**data, "frames": pictures, "timestamps": decoded.timestamps}
        background = "#{:02x}{:02x}{:02x}".format(*self.background)
        return {**data, "fps": self.fps, "background": background, "data": to_base64(decoded.encoded)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Video:
        """The film of `to_json`, decoded. Raises VideoError."""
        limit = read_limit(data, "max_frames", MAX_FRAMES, VideoError)
        if isinstance(data.get("data"), str):
            encoded = from_base64(data["data"], VideoError)
            background = data.get("background", "white")
            film = cls(encoded, fps=data.get("fps", 1.0), background=background, max_frames=limit)
        elif isinstance(data.get("frames"), list):
            film = cls([Image(from_base64(text, VideoError)) for text in data["frames"]], max_frames=limit)
            film._decoded = _with_times(film._data(), data.get("timestamps"))
        else:
            raise VideoError('video data need the entry "data" (a film in base64) or "frames" (a list of pictures)')
        film.name = str(data.get("name", film.name))
        return film.load()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """A Video can be a field of a pydantic model; in JSON it is the object of `to_json`."""
        return field_schema(cls)

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Video) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        if self._decoded is None:
            return f"Video({self.name!r}, not decoded yet)"
        return f"Video({len(self.frames)} frames of {self.width}x{self.height}, {self.format}, {self.digest[:4]}…)"

    def _data(self) -> _Decoded:
        if self._decoded is None:
            self._decoded = self._decode()  # two threads at once do it twice, with the same result
        return self._decoded

    def _decode(self) -> _Decoded:
        source = self._source
        encoded = source if isinstance(source, bytes) else read_file(source, MAX_FILE_BYTES, VideoError)
        kind = sniff(encoded)
        warnings: list[str] = []
        if kind in ANIMATIONS:
            with closing(read_animation(encoded, self.name, self.background, MAX_PIXELS, warnings)) as frames:
                kept = self._keep(frames, warnings)
        elif kind in CONTAINERS:
            # from the bytes that were checked and will be saved, not from a path whose file may change meanwhile
            with tempfile.TemporaryDirectory(prefix="m3agent-") as folder:
                path = Path(folder, "film")
                path.write_bytes(encoded)
                with closing(read_film(path, self.name, MAX_PIXELS, warnings)) as frames:
                    kept = self._keep(frames, warnings)
        else:
            hint = "a still picture: use m3agent.Image" if kind in ("jpeg", "bmp", "tiff", "ppm") else "not a film"
            raise VideoError(f"{self.name}: {hint} ({kind}, {len(encoded)} bytes)")
        return _finish([frame for _, frame in kept], [time for time, _ in kept], tuple(warnings), kind, encoded)

    def _take_frames(self, source: Iterable[Any], frame_rate: float | None) -> _Decoded:
        def pictures() -> Iterator[Frame]:
            for index, frame in enumerate(source):
                try:
                    picture = frame if isinstance(frame, Image) else Image(frame, background=self.background)
                    yield index / (frame_rate or 1.0), picture.rgb
                except ImageError as error:
                    raise VideoError(f"frame {index}: {error}") from error

        kept = self._keep(pictures(), [], every=frame_rate is None)
        times = None if frame_rate is None else [time for time, _ in kept]
        return _finish([frame for _, frame in kept], times, (), "frames", None)

    def _keep(self, frames: Iterable[Frame], warnings: list[str], every: bool = False) -> list[Frame]:
        """The frames that the sampling rule keeps, within the limits, all of one size."""
        kept: list[Frame] = []
        for time, frame in sample(frames, None if every else self.fps):
            if kept and frame.shape != kept[0][1].shape:
                sizes = f"{kept[0][1].shape[1]}x{kept[0][1].shape[0]} to {frame.shape[1]}x{frame.shape[0]}"
                raise VideoError(f"{self.name}: the size of the frames changes from {sizes} at {time:.1f} s")
            kept.append((time, frame))
            self._check_limits(len(kept), frame)
        if not kept:
            reason = "; ".join(warnings) or "it announces none"
            raise VideoError(f"{self.name}: no frame could be decoded: {reason}")
        return kept

    def _check_limits(self, count: int, frame: Pixels) -> None:
        height, width = frame.shape[:2]
        if count > self.max_frames:
            raise VideoError(f"{self.name}: over the limit of {self.max_frames} frames; keep fewer a second with fps=…")
        if count * height * width > MAX_FILM_PIXELS:
            raise VideoError(
                f"{self.name}: {count} frames of {width}x{height} are over the limit of {MAX_FILM_PIXELS} pixels; "
                "keep fewer a second with fps=…, or shrink the film"
            )


def sample(frames: Iterable[Frame], fps: float | None) -> Iterator[Frame]:
    """The first frame, then each first one at least 1/fps (less 0.1 ms) after the one kept before, and the last one.

    The released model was trained with the last frame kept. `fps` None keeps all.
    """
    due = -math.inf
    latest: Frame | None = None
    for time, frame in frames:
        if fps is None or time >= due:
            yield time, frame
            due = time + (1 / fps if fps else 0) - 1e-4
            latest = None
        else:
            latest = time, frame
    if latest is not None:
        yield latest


def _finish(
    frames: Sequence[Pixels], times: list[float] | None, warnings: tuple[str, ...], kind: str, encoded: bytes | None
) -> _Decoded:
    stack = np.stack(frames)
    stack.flags.writeable = False
    return _Decoded(stack, times, warnings, kind, encoded, _digest(stack, times))


def _with_times(decoded: _Decoded, times: Any) -> _Decoded:
    if times is None:
        return decoded
    if not (isinstance(times, list) and len(times) == len(decoded.frames)):
        raise VideoError('video data need as many "timestamps" as "frames"')
    try:
        seconds = [float(time) for time in times]
    except (TypeError, ValueError):
        raise VideoError('"timestamps" must be numbers') from None
    return _Decoded(decoded.frames, seconds, (), "frames", None, _digest(decoded.frames, seconds))


def _digest(frames: Pixels, times: list[float] | None) -> str:
    digest = hashlib.blake2b(f"{frames.shape}:{times}:".encode(), digest_size=16)
    digest.update(frames.data)
    return digest.hexdigest()
