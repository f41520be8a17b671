"""Messages and their parts: what was said in a session, as plain data that goes to JSON and back.

A `Message` is immutable. Pictures and films stand among the parts as `Image` and `Video`; in JSON they are objects
with their file's bytes in base64. What the model computes on are the session's tokens, not these messages.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from PIL import Image as Pil
from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Tag, TypeAdapter, ValidationError

from m3agent.errors import ConversationError
from m3agent.media import Image, Video

_SURROGATE = re.compile("[\ud800-\udfff]")
# File names that are no UTF-8 arrive from Python with lone surrogates. No encoding can hold them, JSON cannot either;
# the model is shown U+FFFD in their place, so the message says the same.
_Encodable = Annotated[str, AfterValidator(lambda text: _SURROGATE.sub("\ufffd", text))]


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Text(_Plain):
    """Ordinary text. It can never turn into control tokens, whatever it spells."""

    type: Literal["text"] = "text"
    text: _Encodable


class Thinking(_Plain):
    """What the model thought before its answer."""

    type: Literal["thinking"] = "thinking"
    text: str


class ToolCall(_Plain):
    """A call that the model made. `damaged` says why it could not be read; such a call is never run."""

    type: Literal["call"] = "call"
    id: str
    name: str
    arguments: dict[str, Any] = {}
    damaged: str | None = None


def _kind(part: Any) -> str | None:
    if isinstance(part, Image):
        return "image"
    if isinstance(part, Video):
        return "video"
    if isinstance(part, Mapping):
        return cast("Mapping[str, Any]", part).get("type")
    return getattr(part, "type", None)


MediaOrText = Annotated[
    Annotated[Text, Tag("text")] | Annotated[Image, Tag("image")] | Annotated[Video, Tag("video")],
    Discriminator(_kind),
]


class ToolResult(_Plain):
    """The answer to the call `call_id`. `error` marks a text that says why there is no result. `whole` is the text as
    the tool gave it, where `parts`, which the model is shown, have less of it.
    """

    type: Literal["result"] = "result"
    call_id: str
    parts: tuple[MediaOrText, ...]
    error: bool = False
    whole: _Encodable | None = None

    @property
    def text(self) -> str:
        return _join(self.parts)


class ToolChange(_Plain):
    """Tools that came or went in the middle of a session. `added` are their definitions."""

    type: Literal["tools"] = "tools"
    added: tuple[dict[str, Any], ...] = ()
    removed: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """How the model is told, before the rest of the user's message."""
        lines: list[str] = []
        if self.added:
            definitions = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.added)
            lines.append(f"From now on there are these tools, too:\n<tools>\n{definitions}\n</tools>\n\n")
        if self.removed:
            lines.append(f"From now on there is no tool {', '.join(self.removed)} any more.\n\n")
        return "".join(lines)


class Summary(_Plain):
    """What stands in place of the model's old turns, after a compaction. `results` are the whole texts of those turns'
    results, by call; the model is not shown them.
    """

    type: Literal["summary"] = "summary"
    text: str
    results: dict[str, _Encodable] = {}


Part = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Thinking, Tag("thinking")]
    | Annotated[ToolCall, Tag("call")]
    | Annotated[ToolResult, Tag("result")]
    | Annotated[ToolChange, Tag("tools")]
    | Annotated[Summary, Tag("summary")]
    | Annotated[Image, Tag("image")]
    | Annotated[Video, Tag("video")],
    Discriminator(_kind),
]

_KINDS_OF = {
    "user": ("tools", "summary", "text", "image", "video"),
    "assistant": ("thinking", "text", "call"),
    "tool": ("result",),
}


class Message(_Plain):
    """One message: of the user, of the assistant (thinking, text, calls), or the results of one turn's calls in call
    order.

    head_tools: in the first message of a session that has begun, the definitions of the tools at the front of the
    prompt, which no later message changes.
    """

    role: Literal["user", "assistant", "tool"]
    parts: tuple[Part, ...]
    head_tools: tuple[dict[str, Any], ...] | None = None

    def model_post_init(self, context: Any, /) -> None:
        kinds: list[str | None] = [_kind(part) for part in self.parts]
        for kind in kinds:
            if kind not in _KINDS_OF[self.role]:
                raise ValueError(f"a {self.role} message cannot hold a part of type {kind!r}")

    @property
    def text(self) -> str:
        """The text parts, a summary's too, joined with nothing between."""
        return _join(self.parts)

    @property
    def thinking(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thinking))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]

    @property
    def results(self) -> list[ToolResult]:
        return [part for part in self.parts if isinstance(part, ToolResult)]


Content = str | Text | Image | Video | Pil.Image
"""What may be said to a session: text, pictures (also Pillow's) and films."""


def content_parts(parts: Iterable[Content]) -> tuple[Text | Image | Video, ...]:
    """The parts of a user message. Raises ConversationError for anything that is not text, a picture or a film."""
    found: list[Text | Image | Video] = []
    for part in parts:
        if isinstance(part, str):
            found.append(Text(text=part))
        elif isinstance(part, Pil.Image):
            found.append(Image(part))
        elif isinstance(part, Text | Image | Video):  # pyright: ignore[reportUnnecessaryIsInstance]
            found.append(part)
        else:
            raise ConversationError(
                f"a message is made of str, m3agent.Image and m3agent.Video, not {type(part).__name__}"
            )
    return tuple(found)


_MESSAGES: TypeAdapter[list[Message]] = TypeAdapter(list[Message])


def dump_messages(messages: Sequence[Message]) -> str:
    """Messages as JSON text that `load_messages` reads."""
    return _MESSAGES.dump_json(list(messages)).decode()


def load_messages(data: str | bytes) -> list[Message]:
    """The messages of `dump_messages`, pictures decoded. Raises ConversationError when the data are not such
    messages.
    """
    try:
        return _MESSAGES.validate_json(data)
    except ValidationError as error:
        raise ConversationError(f"these are no messages of a session: {error}") from error


def _join(parts: Iterable[Any]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text | Summary))
