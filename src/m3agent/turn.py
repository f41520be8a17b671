"""`TurnReader`: the tokens of one generated turn → events while they come, and the turn's message."""

from __future__ import annotations

from m3agent import chat
from m3agent.content import Message, Part, Text, Thinking, ToolCall
from m3agent.events import CallArguments, CallFinished, CallStarted, Event
from m3agent.history import History
from m3agent.tools.arguments import clip


class TurnReader:
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
