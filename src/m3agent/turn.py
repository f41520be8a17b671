"""`OpenTurn`: one turn of the model while it is generated: tokens → events, and at its end the turn's message."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from m3agent import chat, tracing
from m3agent.content import Message, Part, Text, Thinking, ToolCall
from m3agent.events import CallArguments, CallFinished, CallStarted, Event
from m3agent.history import History
from m3agent.tools.arguments import clip

if TYPE_CHECKING:
    from m3agent.backend import TokenStream
    from m3agent.runtime import Guide, Sampling, Usage


class OpenTurn:
    """Its prompt is in the log. What ends it, ends it once: `end` gives what there is, whole or not."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._reader = _Reader(history)
        self._exit = AsyncExitStack()
        self._tokens: TokenStream | None = None
        self._span: tracing.Span = None

    async def generate(self, sampling: Sampling, guide: Guide | None, priority: int, run: tracing.Span) -> None:
        tokens = self._history.generate(sampling, guide, priority)
        self._span = tracing.start_turn(run, self._history.runtime.name, tokens.sampling)
        self._tokens = await self._exit.enter_async_context(tokens)

    async def next(self) -> list[Event] | None:
        """The events of one more token, None after the last."""
        assert self._tokens is not None
        async for token in self._tokens:
            return self._reader.push(token.id)
        return None

    async def halt(self) -> None:
        """Stop the model; it takes one step of it."""
        await self._exit.aclose()

    @property
    def finish(self) -> str | None:
        """Why the model stopped: "stop", or "length" where a limit did it; None where it did not."""
        return None if self._tokens is None else self._tokens.finish

    def end(self, trace_content: bool, failure: str) -> tuple[list[Event], Message, Usage]:
        """The last events, and the message, which is in the history now. Waits for nothing; a token stream that was not
        halted ends itself. failure: for its span, why the model did not stop by itself, if it did not.
        """
        from m3agent.runtime.usage import Usage  # imports torch, so not before a runtime is open

        events, message = self._reader.finish(), self._reader.message()
        self._history.end_turn(message)
        usage = Usage() if self._tokens is None else self._tokens.usage
        tracing.end_turn(self._span, usage, self.finish, message, trace_content, failure)
        return events, message, usage


class _Reader:
    """Tokens → events, and what they say together."""

    def __init__(self, history: History) -> None:
        self._detokenizer = chat.Detokenizer(history.runtime.tokenizer)
        self._parser = chat.ReplyParser(history.tools.definitions, history.thinking, tokens=True)
        self._first_call = history.calls + 1
        self._thinking: list[str] = []
        self._text: list[str] = []
        self._calls: list[ToolCall] = []

    def push(self, token: int) -> list[Event]:
        """The events that this token completes."""
        return self._feed(self._detokenizer.push(token))

    def finish(self) -> list[Event]:
        """The turn is over; a call that is still open is damaged."""
        events = self._feed(self._detokenizer.finish())
        return events + [self._event(event) for event in self._parser.finish()]

    def message(self) -> Message:
        """The turn so far: thinking, text, calls."""
        parts: list[Part] = []
        if self._thinking:
            parts.append(Thinking(text="".join(self._thinking)))
        if self._text:
            parts.append(Text(text="".join(self._text)))
        return Message(role="assistant", parts=(*parts, *self._calls))

    def _feed(self, pieces: list[tuple[str, bool]]) -> list[Event]:
        return [self._event(event) for text, control in pieces for event in self._parser.feed(text, control)]

    def _event(self, event: chat.ParseEvent) -> Event:
        match event:
            case chat.TextDelta(text):
                self._text.append(text)
                return event
            case chat.ThinkingDelta(text):
                self._thinking.append(text)
                return event
            case chat.CallStarted(index, name):
                return CallStarted(self._id(index), name)
            case chat.CallProgress(index, path, text):
                return CallArguments(self._id(index), path, text)
            case chat.CallFinished(index, name, arguments):
                call = ToolCall(id=self._id(index), name=name, arguments=arguments)
            case chat.CallDamaged(index, name, reason, excerpt):
                problem = clip(f"The call was damaged and did not run: {reason}. It began: {excerpt}")
                call = ToolCall(id=self._id(index), name=name or "", damaged=problem)
        self._calls.append(call)
        return CallFinished(call)

    def _id(self, index: int) -> str:
        return f"call_{self._first_call + index}"
