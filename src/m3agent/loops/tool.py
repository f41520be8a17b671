"""The one tool that a drawing model needs: `render(code)`, which answers with the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from m3agent.loops.render import Renderer
from m3agent.media.image import Image
from m3agent.tools import Tool, tool


def render_tool(renderer: Renderer) -> Tool[..., Any]:
    """For an agent that draws in a conversation of its own; `refine` declares the same tool by itself."""

    def render(code: str) -> Image:
        return renderer.render(code)

    return declare(render, renderer.language)


def declare(render: Callable[..., Any], language: str) -> Tool[..., Any]:
    """`render` as the tool that the model is shown. m3-nano was trained on exactly this definition."""
    return tool(render, name="render", description=f"Render {language} code and look at the picture.")
