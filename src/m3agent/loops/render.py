"""What turns code into a picture: the `Renderer` protocol, and any Python function as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np
import PIL.Image

from m3agent.errors import M3Error, RenderError
from m3agent.media.image import Image

CODE_LIMIT = 200_000  # characters
SIDE_LIMIT = 4096  # pixels


class Renderer(Protocol):
    """Code in, picture out. `render` is called in a worker thread, never on the event loop.

    Raises (in `render`):
        RenderError: the code has no picture; the message is short and is shown to the model.
    """

    @property
    def language(self) -> str:
        """The language of the code as the model is told it: "SVG", "Python", …"""
        ...

    def render(self, code: str) -> Image: ...


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
