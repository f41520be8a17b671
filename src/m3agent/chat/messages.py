"""The plain messages that the renderer reads. A message says what is thinking and what is text; nothing is guessed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from m3agent.errors import ConversationError

if TYPE_CHECKING:
    from m3agent.media.pixels import Patches

Role = Literal["root", "system", "developer", "user", "assistant", "tool"]
Thinking = Literal["adaptive", "enabled", "disabled"]
HEAD_ROLES = ("root", "system", "developer")
ROLES = (*HEAD_ROLES, "user", "assistant", "tool")
THINKING_MODES = ("adaptive", "enabled", "disabled")


@dataclass(frozen=True)
class MediaPart:
    """A picture or a film at its place among the texts of a message."""

    patches: Patches


@dataclass(frozen=True)
class ChatCall:
    """One tool call; `arguments` are JSON values by parameter name."""

    name: str
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class ChatMessage:
    """One message. `thinking` and `calls` belong to the assistant; a tool message is one result, in call order.

    `root` replaces the model's identity, `system` and `developer` are both the developer's instructions.
    """

    role: Role
    parts: Sequence[str | MediaPart] = ()
    thinking: str | None = None
    calls: Sequence[ChatCall] = ()


def check_message(message: ChatMessage) -> None:
    """Raises ConversationError for what the format cannot express inside one message."""
    if message.role not in ROLES:
        raise ConversationError(f"unknown role {message.role!r}: use one of {', '.join(ROLES)}")
    if isinstance(message.parts, str):
        raise ConversationError("the parts of a message are a list of texts and media, not one string")
    for part in message.parts:
        if not isinstance(part, str | MediaPart):
            raise ConversationError(f"a message part must be text, an image or a video, not {type(part).__name__}")
        if isinstance(part, MediaPart) and message.role not in ("user", "tool"):
            raise ConversationError(f"pictures and films belong to user and tool messages, not to {message.role!r}")
    if message.role != "assistant" and (message.thinking is not None or message.calls):
        raise ConversationError(f"only assistant messages think or call tools, not {message.role!r}")


def split_head(messages: Sequence[ChatMessage]) -> tuple[str, str, Sequence[ChatMessage]]:
    """(identity, instructions, the rest); "" where the conversation gives none.

    A root message comes first, one system or developer message next. Later ones would vanish in the released
    template without a word, so they raise ConversationError; so does a tool result without a call before it.
    """
    for message in messages:
        check_message(message)
    identity = instructions = ""
    rest = messages
    if rest and rest[0].role == "root":
        identity, rest = plain_text(rest[0]), rest[1:]
    if rest and rest[0].role in ("system", "developer"):
        instructions, rest = plain_text(rest[0]), rest[1:]
    called = False
    for message in rest:
        if message.role in HEAD_ROLES:
            raise ConversationError(
                f"a {message.role!r} message can only open the conversation: put later instructions into a user message"
            )
        if message.role == "assistant":
            called = bool(message.calls)
        elif message.role == "tool" and not called:
            raise ConversationError("a tool result needs an assistant message with a call before it")
    return identity, instructions, rest


def plain_text(message: ChatMessage) -> str:
    """The texts of a message that holds no media, joined with nothing between."""
    return "".join(part for part in message.parts if isinstance(part, str))
