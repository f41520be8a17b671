"""The render toolset: code to pictures, for an agent that draws or builds pages in a conversation of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import anyio.to_thread
from pydantic import Field

from m3agent.media import Image
from m3agent.render import HtmlRenderer, SvgRenderer
from m3agent.render.renderer import SIDE_LIMIT
from m3agent.tools.define import Tool, tool


def render(
    *,
    size: tuple[int, int] = (512, 512),
    viewport: tuple[int, int] = (1280, 800),
    allow: Iterable[str] = (),
    seconds: float = 20.0,
) -> list[Tool[..., Any]]:
    """Two tools, `render_svg(code)` and `render_html(code, width, height)`, that answer with the picture.

    Args:
        size: of an SVG's picture.
        viewport: of a page where the model names none.
        allow: hosts that a page may reach, as for `HtmlRenderer`. An SVG reaches nothing.
        seconds: for one page.

    Raises MissingDependency without resvg-py or playwright, RenderError without a Chromium, ValueError for a size or
    host that is none.
    """
    svg, html = SvgRenderer(size), HtmlRenderer([viewport], allow=allow, seconds=seconds)

    async def render_svg(code: str) -> Image:
        """Render SVG code and look at the picture."""
        return await anyio.to_thread.run_sync(svg.render, code)

    async def render_html(
        code: Annotated[str, Field(description="a whole page; CSS and JavaScript stand in it")],
        width: Annotated[int, Field(ge=1, le=SIDE_LIMIT, description="of the viewport, in pixels")] = viewport[0],
        height: Annotated[int, Field(ge=1, le=SIDE_LIMIT)] = viewport[1],
    ) -> list[str | Image]:
        """Render a page in a browser and look at the picture; says what went wrong in the page."""
        drawn = await html.render_async(code, [(width, height)])
        notes = "".join(f"\n- {note}" for note in drawn.notes)
        return [*drawn.images, *([f"\nNotes:{notes}"] if notes else [])]

    return [tool(render_svg), tool(render_html)]
