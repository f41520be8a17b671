"""What turns code into a picture: the `Renderer` protocol, and any Python function as one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import PIL.Image

from m3agent.errors import M3Error, RenderError
from m3agent.media.image import Image

CODE_LIMIT = 200_000  # characters
SIDE_LIMIT = 4096  # pixels


@dataclass(frozen=True)
class Rendering:
    """Several pictures of one code, each with a short label such as "390x844", and what there is to say about them."""

    images: tuple[Image, ...]
    notes: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()

    def load(self) -> Rendering:
        """Decode all pictures."""
        for image in self.images:
            image.load()
        return self


def together(drawn: Sequence[Rendering]) -> Rendering:
    """The pictures of all. A note that does not hold for each of them begins with the labels it holds for."""
    notes: list[str] = []
    for note in dict.fromkeys(note for one in drawn for note in one.notes):
        labels = [label for one in drawn if note in one.notes for label in one.labels]
        everywhere = all(note in one.notes for one in drawn)
        notes.append(note if everywhere else f"{', '.join(labels)}: {note}")
    images = tuple(image for one in drawn for image in one.images)
    return Rendering(images, tuple(notes), tuple(label for one in drawn for label in one.labels))


class Renderer(Protocol):
    """Code in, picture out, or several with notes. `render` is called in a worker thread, never on the event loop.

    A renderer that also has `async def render_async(code)` is awaited instead, and can be cancelled.

    Raises (in `render`):
        RenderError: the code has no picture; the message is short and is shown to the model.
    """

    @property
    def language(self) -> str:
        """The language of the code as the model is told it: "SVG", "Python", …"""
        ...

    def render(self, code: str) -> Image | Rendering: ...


@dataclass(frozen=True)
class FunctionRenderer:
    """A plain function as a `Renderer`. Whatever `Exception` it raises becomes a `RenderError` with the reason.

    The function runs in this process: it has to confine what it executes itself.
    """

    function: Callable[[str], Image | PIL.Image.Image | np.ndarray]
    language: str = "Python"

    def render(self, code: str) -> Image:
        check_code(code)
        try:
            picture = self.function(code)
            image = picture if isinstance(picture, Image) else Image(picture)
            height, width = image.rgb.shape[:2]
        except M3Error as error:
            raise error if isinstance(error, RenderError) else RenderError(short(str(error))) from error
        except Exception as error:
            raise RenderError(short(f"{type(error).__name__}: {error}")) from error
        if max(height, width) > SIDE_LIMIT:
            raise RenderError(f"the picture is {width}x{height}; at most {SIDE_LIMIT} pixels a side")
        return image


def as_renderer(render: Renderer | Callable[[str], Image | PIL.Image.Image | np.ndarray]) -> Renderer:
    """A renderer stays as it is; a bare function becomes a `FunctionRenderer` for Python code."""
    if hasattr(render, "render") and hasattr(render, "language"):
        return cast("Renderer", render)
    if callable(render):
        return FunctionRenderer(render)
    raise TypeError(f"render is a Renderer or a function from code to a picture, not {type(render).__name__}")


def drawing(rendered: Image | Rendering) -> Rendering:
    """What a renderer returned, decoded, as a `Rendering`."""
    rendering = rendered if isinstance(rendered, Rendering) else Rendering((rendered,))
    if not rendering.images:
        raise RenderError("the renderer drew nothing")
    if rendering.labels and len(rendering.labels) != len(rendering.images):
        raise ValueError(f"{len(rendering.images)} pictures have {len(rendering.labels)} labels")
    return rendering.load()


def check_code(code: str) -> None:
    """Raises RenderError for empty code and for code over `CODE_LIMIT`."""
    if not code.strip():
        raise RenderError("the code is empty")
    if len(code) > CODE_LIMIT:
        raise RenderError(f"the code has {len(code)} characters; at most {CODE_LIMIT} are rendered")


def short(reason: str, limit: int = 200) -> str:
    """The first line of a reason, cut: the model pays for every token of it."""
    line = reason.strip().partition("\n")[0]
    return line if len(line) <= limit else line[: limit - 1] + "…"


def on_canvas(image: Image | PIL.Image.Image, size: tuple[int, int]) -> Image:
    """The whole picture (opaque, RGB), scaled to fit, in the middle of a white canvas of (width, height) pixels."""
    picture = image if isinstance(image, PIL.Image.Image) else PIL.Image.fromarray(image.rgb)
    scale = min(size[0] / picture.width, size[1] / picture.height)
    fitted = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    if fitted != picture.size:
        picture = picture.resize(fitted, PIL.Image.Resampling.LANCZOS)
    canvas = PIL.Image.new("RGB", size, "white")
    canvas.paste(picture, ((size[0] - fitted[0]) // 2, (size[1] - fitted[1]) // 2))
    return Image(canvas)
