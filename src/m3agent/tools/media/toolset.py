"""The tools: what each answers. Coordinates are pixels of the original picture, upright, (0, 0) at its top left."""

from __future__ import annotations

import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from typing import Annotated, Any

from PIL import Image as Pil
from pydantic import Field

from m3agent.errors import MediaError, ToolError
from m3agent.media import Image, sniff
from m3agent.media.films import CONTAINERS
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool
from m3agent.tools.media.difference import difference
from m3agent.tools.media.film import sample
from m3agent.tools.workspace.beneath import Root, explained
from m3agent.tools.workspace.save import read_content
from m3agent.tools.workspace.shown import printable

MAX_ENLARGED = 4_000_000  # pixels of an enlarged picture
MAX_FRAMES = 32  # of one call
_MAX_REGIONS = 20

Box = Annotated[
    tuple[int, int, int, int], Field(description="left, top, right, bottom in pixels; right and bottom are outside it")
]
Shown = list[str | Image]


def media(root: str | os.PathLike[str]) -> list[Tool[..., Any]]:
    """Tools to look at the pictures and films beneath the folder `root`, and none outside it.

    look, crop, zoom, sample_video and compare. Films need the extra `m3agent[video]`. Raises ToolDefinitionError as
    `workspace` does.
    """
    looker = Looker(Root(root))
    return [
        tool(looker.look),
        tool(looker.crop),
        tool(looker.zoom),
        tool(looker.sample_video),
        tool(looker.compare),
    ]


class Looker:
    """The tools; they change nothing and hold nothing between calls."""

    def __init__(self, root: Root) -> None:
        self._root = root

    def look(self, path: str) -> Shown:
        """Look at a picture: its size, its format and the picture."""
        picture = self._picture(path)
        frames = f", the first of {picture.frames} frames (sample_video shows others)" if picture.frames > 1 else ""
        return [f"{printable(path)}: {_size(picture)} pixels, {picture.format}{frames}\n", picture]

    def crop(self, path: str, box: Box) -> Shown:
        """Cut a part out of a picture, at its original size."""
        picture = self._picture(path)
        left, top, right, bottom = _inside(path, picture, box)
        part = Image(picture.rgb[top:bottom, left:right])
        note = f"Its pixel (x, y) is ({left} + x, {top} + y) in the original."
        return [f"{_part(path, picture, (left, top, right, bottom))}. {note}\n", part]

    def zoom(self, path: str, box: Box, scale: Annotated[float, Field(gt=0)] = 4.0) -> Shown:
        """Enlarge a part of a picture, to see its details; a scale below 1 makes it smaller.

        Args:
            scale: how many times larger
        """
        picture = self._picture(path)
        left, top, right, bottom = _inside(path, picture, box)
        width, height = max(1, round((right - left) * scale)), max(1, round((bottom - top) * scale))
        largest = (MAX_ENLARGED / ((right - left) * (bottom - top))) ** 0.5
        if scale > largest:
            raise ToolError(
                f"{width} x {height} pixels are over the limit of {MAX_ENLARGED}. For this box the scale may be at "
                f"most {int(largest * 100) / 100:g}; or take a smaller box."
            )
        part = Pil.fromarray(picture.rgb[top:bottom, left:right])
        # Pixels that are enlarged keep their edges: what is looked for is what is there.
        resampling = Pil.Resampling.NEAREST if scale >= 8 else Pil.Resampling.LANCZOS
        enlarged = Image(part.resize((width, height), resampling))
        note = f"Its pixel (x, y) is ({left} + x/{scale:g}, {top} + y/{scale:g}) in the original."
        where = _part(path, picture, (left, top, right, bottom))
        return [f"{where}, {scale:g} times larger: {width} x {height}. {note}\n", enlarged]

    def sample_video(
        self,
        path: str,
        context: Context,
        times: list[float] | None = None,
        count: Annotated[int, Field(ge=1, le=MAX_FRAMES)] = 8,
    ) -> Shown:
        """See frames of a film or an animation, each with its time.

        Args:
            times: seconds from the start; without them, `count` frames from the first to the last
            count: how many frames, evenly spread
        """
        if times is not None and not 1 <= len(times) <= MAX_FRAMES:
            raise ToolError(f"Give 1 to {MAX_FRAMES} times, not {len(times)}.")
        with _media_errors(path), self._opened(path) as descriptor:
            found = sample(descriptor, path, times, count, lambda: context.cancelled)
        height, width = found.frames[0][1].shape[:2]
        warnings = "".join(f" ({warning})" for warning in found.warnings)
        shown: Shown = [
            f"{printable(path)}: {len(found.times)} frames of {width} x {height} pixels, the last one at "
            f"{found.times[-1]:.2f} s{warnings}\n"
        ]
        for time, frame in found.frames:
            shown += [f"{time:.2f} s:\n", Image(frame)]
        return shown

    def compare(self, path_a: str, path_b: str, tolerance: Annotated[int, Field(ge=0, le=254)] = 0) -> Shown | str:
        """Compare two pictures of one size: how many pixels differ, where, and a picture of B with them in red.

        Args:
            tolerance: a pixel differs when one of its channels differs by more than this, of 255
        """
        first, second = self._picture(path_a), self._picture(path_b)
        if first.rgb.shape != second.rgb.shape:
            raise ToolError(
                f"The sizes differ: {path_a!r} is {_size(first)}, {path_b!r} is {_size(second)} pixels. Only pictures "
                "of one size can be compared."
            )
        found = difference(first.rgb, second.rgb, tolerance)
        if not found.regions:
            exactly = "" if found.largest else ", to the last bit"
            return f"The pictures are equal{exactly}: no pixel of {_size(first)} differs by more than {tolerance}."
        share = f"{found.share:.4%}" if found.share >= 0.000001 else "less than 0.0001%"
        lines = [
            f"{share} of {_size(first)} pixels differ by more than {tolerance} of 255; the largest difference of a "
            f"channel is {found.largest}, the mean over all {found.mean:.3f}.",
            f"{len(found.regions)} region{'s' if len(found.regions) > 1 else ''} as left, top, right, bottom "
            "(right and bottom are outside), the one with most differing pixels first:",
        ]
        for region in found.regions[:_MAX_REGIONS]:
            box = f"{region.left}, {region.top}, {region.right}, {region.bottom}"
            lines.append(f"{box}: {region.pixels} pixels differ")
        if len(found.regions) > _MAX_REGIONS:
            lines.append(f"… and {len(found.regions) - _MAX_REGIONS} smaller ones")
        return ["\n".join(lines) + "\nB, faded, with differing pixels in red:\n", Image(found.marked)]

    def _picture(self, path: str) -> Image:
        with _media_errors(path), self._opened(path) as descriptor:
            data = read_content(descriptor, path).data
            if sniff(data) in CONTAINERS:
                raise ToolError(f"{path!r} is a film. Use sample_video.")
            picture = Image(data)
            picture.name = path
            return picture.load()

    @contextmanager
    def _opened(self, path: str) -> Generator[int]:
        with explained(path):
            descriptor = self._root.open(path, os.O_RDONLY)
            try:
                mode = os.fstat(descriptor).st_mode
                if not stat.S_ISREG(mode):
                    what = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
                    raise ToolError(f"{path!r} is {what}. Give the path of a picture or film.")
                yield descriptor
            finally:
                os.close(descriptor)


@contextmanager
def _media_errors(path: str) -> Generator[None]:
    try:
        yield
    except MediaError as error:
        raise ToolError(str(error).replace(path, repr(path), 1)) from None


def _inside(path: str, picture: Image, box: Box) -> tuple[int, int, int, int]:
    """The part of the box that is inside the picture. Raises ToolError when nothing is."""
    left, top = max(0, box[0]), max(0, box[1])
    right, bottom = min(picture.width, box[2]), min(picture.height, box[3])
    if left >= right or top >= bottom:
        raise ToolError(
            f"The box {', '.join(map(str, box))} (left, top, right, bottom) holds no pixel of {path!r}, which is "
            f"{_size(picture)} pixels."
        )
    return left, top, right, bottom


def _part(path: str, picture: Image, box: tuple[int, int, int, int]) -> str:
    left, top, right, bottom = box
    return f"{printable(path)} ({_size(picture)}), left {left}, top {top}, right {right}, bottom {bottom}"


def _size(picture: Image) -> str:
    return f"{picture.width} x {picture.height}"
