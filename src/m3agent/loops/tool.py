"""The one tool that a drawing model needs: `render(code)`, which answers with the picture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from m3agent.media.image import Image
from m3agent.render.renderer import Renderer, Rendering, drawing
from m3agent.tools import Tool, tool


def render_tool(renderer: Renderer) -> Tool[..., Any]:
    """For an agent that draws in a conversation of its own; `refine` declares the same tool by itself."""
    render_async = getattr(renderer, "render_async", None)

    def render(code: str) -> Any:
        return shown(drawing(renderer.render(code)))

    async def render_and_wait(code: str) -> Any:
        assert render_async is not None
        return shown(drawing(await render_async(code)))

    return declare(render if render_async is None else render_and_wait, renderer.language)


def shown(rendering: Rendering, *, pictures: bool = True) -> list[str | Image] | Image | str:
    """What the model is given: one picture alone as it is, several with their labels, and the notes at the end."""
    if not pictures:
        return "\n".join(["rendered", *rendering.notes])
    if not rendering.labels and not rendering.notes and len(rendering.images) == 1:
        return rendering.images[0]
    labels = rendering.labels or ("",) * len(rendering.images)
    parts: list[str | Image] = []
    for label, image in zip(labels, rendering.images, strict=True):
        parts += [f"{label}:\n", image] if label else [image]
    notes = "".join(f"\n- {note}" for note in rendering.notes)
    return [*parts, f"\nNotes:{notes}"] if notes else parts


def declare(render: Callable[..., Any], language: str) -> Tool[..., Any]:
    """`render` as the tool that the model is shown. m3-nano was trained on exactly this definition."""
    return tool(render, name="render", description=f"Render {language} code and look at the picture.")
