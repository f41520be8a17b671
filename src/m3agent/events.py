"""What a stream yields, in the order in which it happens.

A turn gives any number of `ThinkingDelta`, `TextDelta` and call events, then one `TurnFinished`. While its calls run,
`ToolProgress` and `ToolFinished` come as things happen; when all are over, their results follow as `ToolResultEvent`,
in call order. Calls that nobody has decided about end the run with `ApprovalNeeded`. The last event is `Done`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal

from typing_extensions import TypeVar

from m3agent.chat.parse_events import TextDelta, ThinkingDelta
from m3agent.content import Message, ToolCall, ToolResult
from m3agent.errors import NoOutput

Out = TypeVar("Out", default=None)

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage

Stop = Literal["end", "turns", "tokens", "seconds", "cost", "approval"]
"""Why a run ended: the model was done, a limit was reached (`max_turns`, `max_tokens`, `max_seconds`, `max_cost`), or
calls wait for approval."""


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
class ToolProgress:
    """What a tool reported while its call runs."""

    call_id: str
    value: Any


@dataclass(frozen=True)
class ToolFinished:
    """A call is over, while others may still run. `seconds` is the time that it ran, 0 for one that did not.

    The result is the tool's own; should the context be too short for it, the model is told so: see `ToolResultEvent`.
    """

    result: ToolResult
    seconds: float


@dataclass(frozen=True)
class ApprovalNeeded:
    """These calls wait: `session.run(approve={call.id: True})` goes on, and so does a message, which refuses them."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Compacted:
    """The session made room: its log had `before` tokens and has `after`. `results` old results are notes now, and
    `turns` old turns of the model a summary of its own, which took `usage`. `session.full_result` still has the
    results.
    """

    before: int
    after: int
    results: int
    turns: int
    usage: Usage


@dataclass(frozen=True)
class ToolResultEvent:
    """The result of the call `result.call_id`, as the model will see it."""

    result: ToolResult


@dataclass(frozen=True)
class Reply(Generic[Out]):
    """What a run came to.

    `text` and `thinking` are those of the last turn, `messages` all that the run added to the session, the user's
    included, `usage` the sum over its turns and calls, `cost` their price where the agent has one. With `stop` other
    than "end" the session can go on: `run()` without a message lets the model continue from the results that it has
    not seen yet, `run(approve=…)` decides about the calls of `session.pending`.
    """

    text: str
    thinking: str
    messages: tuple[Message, ...]
    usage: Usage
    stop: Stop
    cost: float | None = None
    value: Out | NoOutput | None = field(default=None, repr=False)

    @property
    def output(self) -> Out:
        """The answer in the type that the run was given as `output=`; None without one.

        Raises NoOutput when the run came to none, because a limit or an approval ended it before.
        """
        if isinstance(self.value, NoOutput):
            raise self.value
        return self.value  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class Done:
    """The run is over."""

    reply: Reply[Any]


Event = (
    TextDelta
    | ThinkingDelta
    | CallStarted
    | CallArguments
    | CallFinished
    | TurnFinished
    | ToolProgress
    | ToolFinished
    | ToolResultEvent
    | ApprovalNeeded
    | Compacted
    | Done
)
