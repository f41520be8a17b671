"""Results in both directions: MCP content → parts for the model, and a tool's parts → MCP content."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from typing import Any, cast

import numpy as np
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
)

from m3agent.errors import MediaError, MissingDependency
from m3agent.media import Image, Video, sniff
from m3agent.media.films import ANIMATIONS, CONTAINERS
from m3agent.media.image import DECODERS
from m3agent.tools.results import ResultPart

MAX_FRAMES = 32  # of a film that is sent


def received(result: CallToolResult) -> list[ResultPart]:
    """The parts of a server's result, pictures decoded (blocks). What a model cannot be shown is described in text."""
    parts = [part for block in result.content for part in _parts(block)]
    structured = result.structured_content
    if structured is not None and not any(_says(part, structured) for part in parts):
        parts.append(json.dumps(structured, ensure_ascii=False))
    return _separated(parts)


def sent(parts: Iterable[ResultPart]) -> list[ContentBlock]:
    """MCP content of a result. A picture is a PNG; a film is frames of it, each with its time: MCP knows no films."""
    content: list[ContentBlock] = []
    for part in parts:
        if isinstance(part, str):
            content.append(TextContent(text=part))
        elif isinstance(part, Image):
            content.append(_picture(part))
        else:
            content += _frames(part)
    return content


def _frames(film: Video) -> list[ContentBlock]:
    count, times = len(film.frames), film.timestamps
    content: list[ContentBlock] = []
    for index in sorted({round(index) for index in np.linspace(0, count - 1, min(count, MAX_FRAMES))}):
        when = f" at {times[index]:.2f} s" if times else ""
        content += [TextContent(text=f"Frame {index + 1} of {count}{when}:"), _picture(Image(film.frames[index]))]
    return content


def _picture(image: Image) -> ImageContent:
    return ImageContent(data=base64.b64encode(image.to_png()).decode(), mime_type="image/png")


def _parts(block: ContentBlock) -> list[ResultPart]:
    match block:
        case TextContent():
            return [block.text]
        case ImageContent():
            return [_media(block.data, block.mime_type, "picture")]
        case AudioContent():
            return [
                f"[sound ({block.mime_type}, {len(block.data) * 3 // 4} bytes): only text and pictures can be shown]"
            ]
        case ResourceLink():
            shown = {"resource": block.uri, "name": block.name, "description": block.description}
            return [json.dumps({key: value for key, value in shown.items() if value}, ensure_ascii=False)]
        case EmbeddedResource(resource=BlobResourceContents() as blob):
            return [f"[resource {blob.uri}]", _media(blob.blob, blob.mime_type or "unknown type", "resource")]
        case EmbeddedResource():
            return [f"[resource {block.resource.uri}]\n{cast(Any, block.resource).text}"]


def _media(data: str, mime_type: str, what: str) -> ResultPart:
    """The picture or film, or a text that says why it cannot be shown. A damaged one must not fail the whole result."""
    try:
        encoded = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{what} ({mime_type}) that cannot be shown: its base64 is damaged]"
    kind = sniff(encoded)
    try:
        if kind in DECODERS and not (what == "resource" and kind in ANIMATIONS and mime_type.startswith("video/")):
            return Image(encoded).load()
        if kind in CONTAINERS or kind in ANIMATIONS:
            return Video(encoded).load()
    except (MediaError, MissingDependency) as error:
        return f"[{what} ({mime_type}) that cannot be shown: {error}]"
    return f"[{what} ({mime_type}, {kind}, {len(encoded)} bytes) that cannot be shown]"


def _says(part: ResultPart, structured: Any) -> bool:
    """Servers should give structured results as text too; some wrap a bare value as {"result": value} for it."""
    if not isinstance(part, str):
        return False
    values = [structured]
    if isinstance(structured, dict) and list(cast("dict[str, Any]", structured)) == ["result"]:
        values.append(cast("dict[str, Any]", structured)["result"])
    try:
        return part in values or json.loads(part) in values
    except ValueError:
        return False


def _separated(parts: list[ResultPart]) -> list[ResultPart]:
    """Blocks are separate things, but text parts are joined without a break when they are shown."""
    apart: list[ResultPart] = []
    for part in parts:
        if isinstance(part, str) and apart and isinstance(apart[-1], str):
            apart[-1] = f"{apart[-1].removesuffix(chr(10))}\n{part}"
        else:
            apart.append(part)
    return apart or ["(no content)"]
