"""What a tool returned → text, pictures and films, in the order in which the model will see them."""

from __future__ import annotations

import json
import secrets
from typing import Annotated, Any, Literal, cast, get_args, get_origin

import numpy as np
from PIL import Image as Pil
from pydantic import TypeAdapter
from pydantic.errors import PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.media import Image, Video
from m3agent.tools.signature import type_name

ResultPart = str | Image | Video

_ANY: TypeAdapter[Any] = TypeAdapter(Any)


def result_parts(value: Any) -> list[ResultPart]:
    """Text stays as it is, pictures (also Pillow's) and films stay pixels, anything else becomes JSON.

    A list that holds text and pictures gives its items in order. A picture inside other data stands at its place in
    their JSON. Raises ToolError for an object that is none of these.
    """
    if isinstance(value, str):
        return [value]
    if (media := _media(value)) is not None:
        return [media]
    if isinstance(value, list | tuple):
        items = list(cast("list[Any]", value))
        if any(_media(item) is not None for item in items):
            return [part for item in items for part in result_parts(item)]
    return _json_parts(value)


def _media(value: object) -> Image | Video | None:
    if isinstance(value, Image | Video):
        return value
    return Image(value) if isinstance(value, Pil.Image) else None


def _json_parts(value: Any) -> list[ResultPart]:
    found: list[Image | Video] = []
    # Unguessable, so that text returned beside a picture cannot pass for the picture's place.
    mark = secrets.token_hex(16)

    def unknown(item: Any) -> Any:
        if isinstance(item, np.generic):
            return cast(Any, item.item())
        media = _media(item)
        if media is None:
            raise ToolError(f"the tool returned a {type(item).__name__}, which is neither text, JSON nor a picture")
        found.append(media)
        return f"{mark}{len(found) - 1}{mark}"

    try:
        # First to Python data: models would otherwise write their pictures as base64 text.
        plain = _ANY.dump_python(value)
        text = json.dumps(to_jsonable_python(plain, fallback=unknown, bytes_mode="base64"), ensure_ascii=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        raise ToolError(f"what the tool returned has no JSON form: {error}") from error
    pieces = text.split(mark)  # text, index, text, index, …, text
    parts: list[ResultPart] = [pieces[0].removesuffix('"') if found else pieces[0]]
    for media, after in zip(found, pieces[2::2], strict=True):
        parts += [media, after.removeprefix('"').removesuffix('"')]
    return parts


def check_return(tool: str, hint: Any) -> None:
    """Refuse a declared return type that is neither text, JSON, nor pictures. Raises ToolDefinitionError."""
    for leaf in _leaves(hint):
        if leaf is Pil.Image:
            continue
        try:
            TypeAdapter(leaf)
        except PydanticUndefinedAnnotation:
            continue  # names that exist for type checkers alone: what comes is seen when it comes
        except PydanticUserError as error:
            raise ToolDefinitionError(
                f"tool {tool!r} returns {type_name(leaf)}, which is neither text, JSON nor a picture: return str, "
                f"numbers, list, dict, a dataclass, m3agent.Image or m3agent.Video ({str(error).splitlines()[0]})"
            ) from error


def _leaves(hint: Any) -> list[Any]:
    """The types inside unions and containers; a Literal and anything without parts is its own leaf."""
    parts = get_args(hint)
    if not parts or get_origin(hint) is Literal:
        return [hint]
    if get_origin(hint) is Annotated:
        parts = parts[:1]
    return [leaf for part in parts if part is not Ellipsis for leaf in _leaves(part)]
