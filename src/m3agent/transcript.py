"""Messages of a session as messages of the chat format: what the model is shown of each."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

from m3agent.chat import ChatCall, ChatMessage, MediaPart
from m3agent.content import Message, Summary, Text, ToolChange, ToolResult
from m3agent.errors import ConversationError, MediaError
from m3agent.media import Image, Video

if TYPE_CHECKING:
    from m3agent.media.pixels import PixelSpec


def chat_messages(messages: Iterable[Message], spec: PixelSpec | None) -> list[ChatMessage]:
    """Pictures decoded and cut into patches. Raises MediaError."""
    found: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            found += [result_message(result, spec) for result in message.results]
        elif message.role == "assistant":
            # A call too damaged to have a name still has a result, which must not lose its place.
            calls = [ChatCall(call.name or "unreadable", call.arguments) for call in message.calls]
            found.append(ChatMessage("assistant", [message.text], message.thinking or None, calls))
        else:
            found.append(ChatMessage("user", _chat_parts(message.parts, spec)))
    return found


def result_message(result: ToolResult, spec: PixelSpec | None) -> ChatMessage:
    """One result of a call."""
    return ChatMessage("tool", _chat_parts(result.parts, spec))


def _chat_parts(parts: Iterable[Any], spec: PixelSpec | None) -> list[str | MediaPart]:
    found: list[str | MediaPart] = []
    for part in parts:
        if isinstance(part, Image | Video):
            found.append(_media_part(part, spec))
        elif isinstance(part, Text | ToolChange | Summary):
            found.append(part.text)
    return found


def _media_part(media: Image | Video, spec: PixelSpec | None) -> MediaPart:
    if spec is None:
        raise MediaError("this model has no vision tower: it reads text alone")
    from m3agent.media.pixels import image_patches, video_patches  # imports torch, so not before a model is open

    media.load()
    if isinstance(media, Image):
        return MediaPart(image_patches(media.rgb, spec))
    return MediaPart(video_patches(media.frames, media.timestamps, spec))


def complete(messages: Items[Message]) -> list[Message]:
    """Messages to start from, checked. Calls at their end may lack results: they are pending."""
    checked = [message for message in messages if message.role != "tool" or message.parts]
    called: list[str] = []
    for index, message in enumerate(checked):
        answered = [result.call_id for result in message.results]
        last = index == len(checked) - 1
        if answered != ([call for call in called if call in answered] if last and message.role == "tool" else called):
            raise ConversationError(f"the calls {called} need results in this order, the messages have {answered}")
        called = [call.id for call in message.calls]
        if len(set(called)) < len(called):
            raise ConversationError(f"the calls of one turn need ids that differ, not {called}")
    return checked


def said_by_user(message: Message) -> bool:
    """Whether a user's message holds anything of the user's, and not just news of tools or a summary."""
    kinds = (ToolChange, Summary)
    return message.role == "user" and (not message.parts or not all(isinstance(part, kinds) for part in message.parts))


def full_result(messages: Items[Message], call_id: str) -> str:
    """A result's text, whole where the model was shown a part of it. Raises KeyError for an unknown call."""
    for message in reversed(messages):
        for part in message.parts:
            if isinstance(part, ToolResult) and part.call_id == call_id:
                return part.text if part.whole is None else part.whole
            if isinstance(part, Summary) and call_id in part.results:
                return part.results[call_id]
    raise KeyError(call_id)


def calls_so_far(messages: Items[Message]) -> int:
    """From which number on the ids of further calls differ from all that there were."""
    ids = [call.id for message in messages for call in message.calls]
    ids += [id_ for message in messages for part in message.parts if isinstance(part, Summary) for id_ in part.results]
    numbers = [int(id_[5:]) for id_ in ids if id_.startswith("call_") and id_[5:].isdecimal()]
    return max([len(ids), *numbers])
