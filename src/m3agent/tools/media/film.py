"""Frames of a film by time or by count. The film is decoded twice, so that only the chosen frames are ever held."""

from __future__ import annotations

import bisect
import os
import shutil
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from m3agent.errors import ToolError, VideoError
from m3agent.media import sniff
from m3agent.media.films import ANIMATIONS, CONTAINERS, Frame, read_animation, read_film
from m3agent.media.image import MAX_PIXELS

MAX_BYTES = 1024**3


@dataclass(frozen=True)
class Sample:
    frames: list[Frame]  # (seconds, pixels [height, width, 3]), in the order of time
    times: list[float]  # of all frames of the film
    warnings: list[str]


def sample(
    descriptor: int, name: str, times: Sequence[float] | None, count: int, cancelled: Callable[[], bool]
) -> Sample:
    """The frames that are shown at `times` (seconds), or `count` frames from the first to the last, evenly spread.

    Raises VideoError for what is no film, ToolError for times outside it.
    """
    with _opened(descriptor, name) as read:
        warnings: list[str] = []
        known = [time for time, _ in _until(read(warnings), cancelled)]
        if not known:
            raise VideoError(f"{name}: no frame could be decoded: {'; '.join(warnings) or 'it announces none'}")
        chosen = _evenly(len(known), count) if times is None else _shown_at(known, times)
        frames: list[Frame] = []
        for index, frame in enumerate(_until(read([]), cancelled)):
            frames += [frame] * chosen.count(index)
            if index >= chosen[-1]:
                break
        return Sample(frames, known, warnings)


def _evenly(total: int, count: int) -> list[int]:
    if count == 1:
        return [0]
    return sorted({round(step * (total - 1) / (count - 1)) for step in range(count)})


def _shown_at(known: list[float], times: Sequence[float]) -> list[int]:
    """The index of the frame on the screen at each time."""
    last = known[-1] + (known[-1] / (len(known) - 1) if len(known) > 1 else 1.0)  # shown as long as the others
    for time in times:
        if not 0 <= time <= last:
            raise ToolError(f"There is no frame at {time:g} s: the film runs from 0 to {last:.2f} s.")
    return sorted(max(0, bisect.bisect_right(known, time + 1e-4) - 1) for time in times)


def _until(frames: Iterator[Frame], cancelled: Callable[[], bool]) -> Iterator[Frame]:
    for frame in frames:
        if cancelled():
            raise ToolError("The call was cancelled.")
        yield frame


@contextmanager
def _opened(descriptor: int, name: str) -> Generator[Callable[[list[str]], Iterator[Frame]]]:
    """A function that reads the film from its start; it adds what goes wrong to the list it is given."""
    size = os.fstat(descriptor).st_size
    if size > MAX_BYTES:
        raise VideoError(f"{name}: {size} bytes is over the limit of {MAX_BYTES}")
    with open(descriptor, "rb", closefd=False) as source:
        kind = sniff(source.read(1024))
        source.seek(0)
        if kind in ANIMATIONS:
            encoded = source.read()
            yield lambda warnings: read_animation(encoded, name, (255, 255, 255), MAX_PIXELS, warnings)
        elif kind in CONTAINERS:
            with tempfile.TemporaryDirectory(prefix="m3agent-") as folder:
                path = Path(folder, "film")  # FFmpeg wants a path; the file's own may lead elsewhere by now
                with path.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                yield lambda warnings: read_film(path, name, MAX_PIXELS, warnings)
        else:
            raise VideoError(f"{name}: not a film ({kind}, {size} bytes)")
