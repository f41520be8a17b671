"""The incremental reader of a generated turn: text, thinking and typed tool calls while tokens arrive.

The result depends on the text alone, never on how it was cut into pieces. A call that was not closed, or whose
inside is damaged, is reported as CallDamaged and never as CallFinished; complete calls beside it still finish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from m3agent.chat import markers
from m3agent.chat.elements import INVOKE_TAG, MAX_DEPTH, Element, read_arguments
from m3agent.chat.messages import Thinking
from m3agent.chat.parse_events import (
    MAX_EXCERPT,
    CallDamaged,
    CallFinished,
    CallProgress,
    CallStarted,
    ParseEvent,
    TextDelta,
    ThinkingDelta,
)
from m3agent.chat.scanner import Piece, Scanner

_TURN_CONTROLS = (markers.DOCUMENT, markers.ROLE, markers.END)
_INVOKE = re.compile(r"""invoke name=(?:"([^"]+)"|'([^']+)'|([^\s"']+))\s*""")


@dataclass
class _Call:
    index: int
    name: str | None
    raw: list[str]
    damage: str | None
    elements: list[Element] = field(default_factory=list[Element])
    open: list[Element] = field(default_factory=list[Element])


class ReplyParser:
    """Feed it the pieces of one generated turn, then call `finish`. `tools` are function objects, for the types.

    Plain text has markers by their spelling alone. With `tokens=True` the caller says of each piece whether it came
    from a control token, and only a real namespace token makes a tag: the same characters in ordinary tokens are text,
    so a model that quotes a file with calls in it calls nothing, and a value may hold the format itself. (The markers
    of thinking count either way, since they run nothing.) Control tokens that end or begin messages are skipped then.
    Cost is linear in the text.
    """

    def __init__(
        self, tools: Iterable[Mapping[str, Any]] = (), thinking: Thinking = "adaptive", *, tokens: bool = False
    ) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {tool["name"]: tool.get("parameters") or {} for tool in tools}
        self._tokens = tokens
        self._scanner = Scanner(tokens=tokens)
        self._block_start = self._scanner.marker + markers.TOOL_CALL
        self._events: list[ParseEvent] = []
        self._enabled = thinking == "enabled"
        self._thought = False
        self._calls = 0
        self._call: _Call | None = None
        self._stray: list[str] = []  # what a block holds that is no call
        self._block_has_call = False
        self._state: Callable[[], bool] = self._start  # each state takes from the scanner; False: it needs more text

    def feed(self, text: str, control: bool = False) -> list[ParseEvent]:
        """The events that this piece completes. `control` counts in token mode only: the piece is one control token."""
        if not (self._tokens and control):
            self._scanner.add(text)
        elif text not in _TURN_CONTROLS:
            self._scanner.add_token(text)
        return self._run()

    def finish(self) -> list[ParseEvent]:
        """The turn is over: what was held back, and damage for a call that is still open."""
        self._scanner.final = True
        events = self._run()
        if self._call is not None:
            self._damage(self._call, "the reply ended before the call was closed")
            self._end_call(self._call)
        elif self._state == self._block:
            self._end_block()
        events += self._events
        self._events = []
        return events

    def _run(self) -> list[ParseEvent]:
        while self._state():
            pass
        events, self._events = self._events, []
        return events

    # Outside of calls -------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """A marker that only repeats what the prompt ended with is dropped, if it is the very first text."""
        repeated = self._scanner.starts_with(markers.THINK if self._enabled else markers.THINK_END)
        self._state = self._start if repeated is None else self._thinking if self._enabled else self._content
        return repeated is not None

    def _thinking(self) -> bool:
        text, end = self._scanner.until((markers.THINK_END,))
        if text:
            self._events.append(ThinkingDelta(text))
        if end:
            self._thought, self._state = True, self._content
        return end is not None

    def _content(self) -> bool:
        """Only the first pair of think markers is thinking; later ones stay visible."""
        starts = (self._block_start,) if self._thought else (self._block_start, markers.THINK)
        text, marker = self._scanner.until(starts)
        if text:
            self._events.append(TextDelta(text))
        if marker == markers.THINK:
            self._state = self._thinking
        elif marker:
            self._begin_block()
        return marker is not None

    def _after(self) -> bool:
        """After a block: text is dropped; another block, or a call on its own, is read."""
        piece = self._scanner.next()
        if piece is None:
            return False
        if piece.kind == "tag" and piece.text == "tool_call":
            self._begin_block()
        elif piece.kind == "tag" and INVOKE_TAG.match(piece.text):
            self._begin_block()
            self._begin_call(piece)
        return True

    # Inside a block, between calls ------------------------------------------------------------------------------

    def _begin_block(self) -> None:
        self._stray, self._block_has_call, self._state = [], False, self._block

    def _block(self) -> bool:
        piece = self._scanner.next()
        if piece is None:
            return False
        if piece.kind == "tag" and INVOKE_TAG.match(piece.text):
            self._begin_call(piece)
        elif piece.kind == "tag" and piece.text == "/tool_call":
            self._end_block()
        elif piece.kind != "cut":
            self._stray.append(piece.raw)
        elif not "/tool_call".startswith(piece.text):  # not the block's own closer, whose calls are whole
            self._open_call(None, piece, "the reply ended inside the opening tag of a call")
        return True

    def _end_block(self) -> None:
        """Stray text beside calls is dropped; a block with nothing else in it was meant to be a call."""
        stray = "".join(self._stray)
        if stray.strip() and not self._block_has_call:
            piece = Piece("text", stray, stray)
            self._end_call(self._open_call(None, piece, "the tool_call block holds no invoke element"))
        self._state = self._after

    def _begin_call(self, piece: Piece) -> None:
        match = _INVOKE.fullmatch(piece.text)
        if match is None:
            self._open_call(None, piece, f"the opening tag <{piece.text:.100}> has no readable name")
        else:
            self._open_call(next(filter(None, match.groups())), piece, None)

    def _open_call(self, name: str | None, piece: Piece, damage: str | None) -> _Call:
        self._call = _Call(self._calls, name, [piece.raw], damage)
        self._calls += 1
        self._block_has_call = True
        self._state = self._inside
        if name is not None:
            self._events.append(CallStarted(self._call.index, name))
        return self._call

    # Inside a call ----------------------------------------------------------------------------------------------

    def _inside(self) -> bool:
        call = self._call
        assert call is not None
        top = call.open[-1] if call.open else None
        piece = self._scanner.next()
        if piece is None:
            return False
        call.raw.append(piece.raw)
        if piece.kind == "text":
            self._value_text(call, top, piece.text)
        elif piece.kind == "bare":
            self._damage(call, "the namespace marker stands before something that is no tag")
        elif piece.kind == "tag" and top and piece.text == f"/{top.name}":
            call.open.pop()
        elif piece.kind == "tag" and piece.text in ("/invoke", "/tool_call"):
            self._close_call(call, top, piece.text)
        elif piece.kind == "tag" and call.damage is None:
            self._open_element(call, top, piece)
        return True

    def _value_text(self, call: _Call, top: Element | None, text: str) -> None:
        if top is not None:
            top.texts.append(text)
            if not top.children:
                self._events.append(CallProgress(call.index, top.path, text))
        elif text.strip():
            self._damage(call, "there is text between the parameters")

    def _open_element(self, call: _Call, top: Element | None, piece: Piece) -> None:
        tag = piece.text
        if INVOKE_TAG.match(tag) or (tag == "tool_call" and top is None):
            self._damage(call, "the next call begins before this one was closed")
        elif tag.startswith("/"):
            opened = f"<{top.name:.100}> is open" if top else "nothing is open"
            self._damage(call, f"<{tag:.100}> closes nothing: {opened}")
        elif not tag.strip():
            self._damage(call, "an element has no name")
        elif len(call.open) >= MAX_DEPTH:
            self._damage(call, f"elements are nested deeper than {MAX_DEPTH}")
        else:
            element = Element(tag, (*top.path, tag) if top else (tag,))
            (top.children if top else call.elements).append(element)
            call.open.append(element)

    def _close_call(self, call: _Call, top: Element | None, tag: str) -> None:
        if top is not None:
            self._damage(call, f"<{top.name:.100}> was not closed before <{tag}>")
        elif tag != "/invoke":
            self._damage(call, "the call was not closed before the end of the block")
        self._end_call(call)
        self._state = self._block
        if tag == "/tool_call":
            self._end_block()

    def _damage(self, call: _Call, reason: str) -> None:
        """The first reason counts. What follows is skipped up to the call's closing tag."""
        call.damage = call.damage or reason
        call.open.clear()

    def _end_call(self, call: _Call) -> None:
        if call.damage is not None or call.name is None:
            excerpt = _excerpt("".join(call.raw))
            self._events.append(CallDamaged(call.index, call.name, call.damage or "", excerpt))
        else:
            arguments = read_arguments(call.elements, self._schemas.get(call.name, {}))
            self._events.append(CallFinished(call.index, call.name, arguments))
        self._call = None


def _excerpt(text: str) -> str:
    if len(text) <= MAX_EXCERPT:
        return text
    return f"{text[: MAX_EXCERPT - 205]} ... {text[-200:]}"
