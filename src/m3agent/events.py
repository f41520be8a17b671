"""What a stream yields, in the order in which it happens.

A turn gives any number of `ThinkingDelta`, `TextDelta` and call events, then one `TurnFinished`; the results of its
calls follow as `ToolResultEvent`, in call order, when all of them are there. The last event of a run is `Done`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from m3agent.chat.parse_events import TextDelta, ThinkingDelta
from m3agent.content import Message, ToolCall, ToolResult

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage

Stop = Literal["end", "turns", "tokens"]
"""Why a run ended: the model was done, or a limit was reached: `max_turns` or `max_tokens`."""


@dataclass(frozen=True)
class CallStarted:
    """The model began a call of the tool `name`."""

    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A raw piece of the call's value at `path`, to show progress. The arguments come with `CallFinished`."""

    call_id: str
    path: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class CallFinished:
    """The call is complete, or damaged (`call.damaged` says why; then there may have been no `CallStarted`)."""

    call: ToolCall


@dataclass(frozen=True)
class TurnFinished:
    """The model's turn is over; its calls run next. `usage` is this turn's."""

    turn: int
    message: Message
    usage: Usage


@dataclass(frozen=True)
class ToolResultEvent:
    """The result of the call `result.call_id`, as the model will see it."""

    result: ToolResult


@dataclass(frozen=True)
class Reply:
    """What a run came to.

    `text` and `thinking` are those of the last turn, `messages` all that the run added to the session, the user's
    included, `usage` the sum over its turns. With `stop` other than "end" a limit was reached and the session can go
    on: `run()` without a message lets the model continue from the results that it has not seen yet.
    """

    text: str
    thinking: str
    messages: tuple[Message, ...]
    usage: Usage
    stop: Stop


@dataclass(frozen=True)
class Done:
    """The run is over."""

    reply: Reply


Event = TextDelta | ThinkingDelta | CallStarted | CallArguments | CallFinished | TurnFinished | ToolResultEvent | Done
