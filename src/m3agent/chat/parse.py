"""The incremental reader of a generated turn: text, thinking and typed tool calls while tokens arrive.

The result depends on the text alone, never on how it was cut into pieces. A call that was not closed, or whose
inside is damaged, is reported as CallDamaged and never as CallFinished; complete calls beside it still finish.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from m3agent.chat import markers
from m3agent.chat.elements import INVOKE_TAG, MAX_DEPTH, MAX_TAG, Element, read_arguments
from m3agent.chat.messages import Thinking

MAX_EXCERPT = 800


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ThinkingDelta:
    text: str


@dataclass(frozen=True)
class CallStarted:
    """The opening tag of a call is complete. `index` counts the calls of a turn, damaged ones included."""

    index: int
    name: str


@dataclass(frozen=True)
class CallProgress:
    """A piece of a value's text as it is written; `path` are the names of the elements around it. White space that
    turns out to be layout is among it: only CallFinished is the truth."""

    index: int
    path: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class CallFinished:
    index: int
    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class CallDamaged:
    """A call that must not run. `reason` is for the model; `excerpt` is its text, at most MAX_EXCERPT characters."""

    index: int
    name: str | None
    reason: str
    excerpt: str


ParseEvent = TextDelta | ThinkingDelta | CallStarted | CallProgress | CallFinished | CallDamaged

# In token mode a namespace *token* is this one character in the buffer. Decoded text holds no lone surrogate.
_NS_TOKEN = "\ud800"
_SURROGATE = re.compile("[\ud800-\udfff]")
_ANY_NS = re.compile(f"{_NS_TOKEN}|{re.escape(markers.NS)}")
_ONLY_TOKEN = re.compile(_NS_TOKEN)
_FIRST_CHARACTERS = f"]<{_NS_TOKEN}"
_TURN_CONTROLS = (markers.DOCUMENT, markers.ROLE, markers.END)
_BLOCK = re.compile(f"(?:{_NS_TOKEN}|{re.escape(markers.NS)}){markers.TOOL_CALL}")
_BLOCK_OR_THINK = re.compile(f"{_BLOCK.pattern}|{markers.THINK}")
_BLOCK_STARTS = (_NS_TOKEN + markers.TOOL_CALL, markers.NS + markers.TOOL_CALL)
_INVOKE = re.compile(r"""invoke name=(?:"([^"]+)"|'([^']+)'|([^\s"']+))\s*""")


@dataclass
class _Call:
    index: int
    name: str | None
    marked: bool
    raw: list[str]
    elements: list[Element]
    open: list[Element]
    damage: str | None


class ReplyParser:
    """Feed it the pieces of one generated turn, then call `finish`. `tools` are function objects, for the types.

    Markers are matched as text, since a model may spell one in ordinary tokens. With `tokens=True` the caller says
    of each piece whether it came from a control token, and a value that was opened by a real namespace token can
    only be left by a real one: the same characters in ordinary tokens are part of the value. Control tokens that
    end or begin messages are skipped then. Cost is linear in the text.
    """

    def __init__(
        self, tools: Iterable[Mapping[str, Any]] = (), thinking: Thinking = "adaptive", *, tokens: bool = False
    ) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {tool["name"]: tool.get("parameters") or {} for tool in tools}
        self._tokens = tokens
        self._buffer = ""
        self._at = 0  # what stands before it in the buffer is done
        self._final = False
        self._events: list[ParseEvent] = []
        # A marker that only repeats what the prompt ended with is dropped, if it is the very first text.
        self._repeated = markers.THINK if thinking == "enabled" else markers.THINK_END
        self._after_repeated = self._thinking if thinking == "enabled" else self._content
        self._thought = False
        self._calls = 0
        self._call: _Call | None = None
        self._stray: list[str] = []  # what a block holds that is no call
        self._block_has_call = False
        self._state: Callable[[], bool] = self._start  # each state consumes from the buffer; False: it needs more

    def feed(self, text: str, control: bool = False) -> list[ParseEvent]:
        """The events that this piece completes. `control` counts in token mode only: the piece is one control token."""
        if self._tokens and control:
            if text in _TURN_CONTROLS:
                return []
            text = _NS_TOKEN if text == markers.NS else text
        else:
            text = _SURROGATE.sub("\ufffd", text)
        self._buffer = self._buffer[self._at :] + text
        self._at = 0
        return self._run()

    def finish(self) -> list[ParseEvent]:
        """The turn is over: what was held back, and damage for a call that is still open."""
        self._final = True
        events = self._run()
        if self._call is not None:
            self._damage("the reply ended before the call was closed")
            self._end_call()
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
        if self._repeated.startswith(self._buffer) and len(self._buffer) < len(self._repeated) and not self._final:
            return False
        if self._buffer.startswith(self._repeated):
            self._at = len(self._repeated)
        self._state = self._after_repeated
        return True

    def _thinking(self) -> bool:
        end = self._buffer.find(markers.THINK_END, self._at)
        self._emit(ThinkingDelta, end if end >= 0 else self._releasable((markers.THINK_END,)))
        if end < 0:
            return False
        self._at = end + len(markers.THINK_END)
        self._thought, self._state = True, self._content
        return True

    def _content(self) -> bool:
        """Only the first pair of think markers is thinking; later ones stay visible."""
        found = (_BLOCK if self._thought else _BLOCK_OR_THINK).search(self._buffer, self._at)
        starts = _BLOCK_STARTS if self._thought else (*_BLOCK_STARTS, markers.THINK)
        self._emit(TextDelta, found.start() if found else self._releasable(starts))
        if found is None:
            return False
        self._at = found.end()
        if found[0] == markers.THINK:
            self._state = self._thinking
        else:
            self._begin_block()
        return True

    def _releasable(self, starts: tuple[str, ...]) -> int:
        return len(self._buffer) if self._final else self._safe(starts)

    def _after(self) -> bool:
        """After a block: text is dropped; another block, or a call on its own, is read."""
        token = self._next_tag(_ANY_NS)
        if token is None:
            return False
        kind, text, marked, raw = token
        if kind == "tag" and text == "tool_call":
            self._begin_block()
        elif kind == "tag" and INVOKE_TAG.match(text):
            self._begin_block()
            self._begin_call(text, marked, raw)
        return True

    # Inside a block ---------------------------------------------------------------------------------------------

    def _begin_block(self) -> None:
        self._stray, self._block_has_call, self._state = [], False, self._block

    def _block(self) -> bool:
        token = self._next_tag(_ANY_NS)
        if token is None:
            return False
        kind, text, marked, raw = token
        if kind == "tag" and INVOKE_TAG.match(text):
            self._begin_call(text, marked, raw)
        elif kind == "tag" and text == "/tool_call":
            self._end_block()
        elif kind == "cut" and "/tool_call".startswith(text):
            pass  # the block's closer was cut off; its calls are whole
        elif kind == "cut":
            self._open_call(None, marked, raw, "the reply ended inside the opening tag of a call")
        else:
            self._stray.append(raw)
        return True

    def _end_block(self) -> None:
        """Stray text beside calls is dropped; a block with nothing else in it was meant to be a call."""
        stray = "".join(self._stray)
        if stray.strip() and not self._block_has_call:
            self._open_call(None, False, stray, "the tool_call block holds no invoke element")
            self._end_call()
        self._state = self._after

    def _begin_call(self, tag: str, marked: bool, raw: str) -> None:
        match = _INVOKE.fullmatch(tag)
        if match is None:
            self._open_call(None, marked, raw, f"the opening tag <{tag:.100}> has no readable name")
        else:
            self._open_call(next(filter(None, match.groups())), marked, raw, None)

    def _open_call(self, name: str | None, marked: bool, raw: str, damage: str | None) -> None:
        self._call = _Call(self._calls, name, marked, [raw], [], [], damage)
        self._calls += 1
        self._block_has_call = True
        self._state = self._inside
        if name is not None:
            self._events.append(CallStarted(self._call.index, name))

    def _inside(self) -> bool:
        call = self._call
        assert call is not None
        top = call.open[-1] if call.open else None
        # Damaged or not, what a real token opened is left by a real token only.
        real = top.marked if top else call.marked and call.damage is not None
        token = self._next_tag(_ONLY_TOKEN if real else _ANY_NS)
        if token is None:
            return False
        kind, text, marked, raw = token
        call.raw.append(raw)
        if kind == "text":
            self._value_text(call, top, text)
        elif kind == "tag" and top and text == f"/{top.name}":
            call.open.pop()
        elif kind == "tag" and text in ("/invoke", "/tool_call"):
            self._close_call(call, top, text)
        elif kind == "tag":
            self._open_element(call, top, text, marked)
        elif kind == "bare":
            self._damage("the namespace marker stands before something that is no tag")
        return True

    def _value_text(self, call: _Call, top: Element | None, text: str) -> None:
        if top is not None:
            top.texts.append(text)
            if not top.children and call.damage is None:
                self._events.append(CallProgress(call.index, top.path, text))
        elif text.strip():
            self._damage("there is text between the parameters")

    def _open_element(self, call: _Call, top: Element | None, tag: str, marked: bool) -> None:
        if call.damage is not None:
            return
        if INVOKE_TAG.match(tag) or (tag == "tool_call" and top is None):
            self._damage("the next call begins before this one was closed")
        elif tag.startswith("/"):
            self._damage(
                f"<{tag:.100}> closes nothing: " + (f"<{top.name:.100}> is open" if top else "nothing is open")
            )
        elif not tag.strip():
            self._damage("an element has no name")
        elif len(call.open) >= MAX_DEPTH:
            self._damage(f"elements are nested deeper than {MAX_DEPTH}")
        else:
            element = Element(tag, (*top.path, tag) if top else (tag,), marked)
            (top.children if top else call.elements).append(element)
            call.open.append(element)

    def _close_call(self, call: _Call, top: Element | None, tag: str) -> None:
        if top is not None:
            self._damage(f"<{top.name:.100}> was not closed before <{tag}>")
        elif tag != "/invoke":
            self._damage("the call was not closed before the end of the block")
        self._end_call()
        self._state = self._block
        if tag == "/tool_call":
            self._end_block()

    def _damage(self, reason: str) -> None:
        """The first reason counts. What follows is skipped up to the call's closing tag."""
        call = self._call
        assert call is not None
        if call.damage is None:
            call.damage = reason
        call.open.clear()

    def _end_call(self) -> None:
        call = self._call
        assert call is not None
        if call.damage is not None or call.name is None:
            excerpt = _excerpt("".join(call.raw).replace(_NS_TOKEN, markers.NS))
            self._events.append(CallDamaged(call.index, call.name, call.damage or "", excerpt))
        else:
            arguments = read_arguments(call.elements, self._schemas.get(call.name, {}))
            self._events.append(CallFinished(call.index, call.name, arguments))
        self._call = None

    # The buffer -------------------------------------------------------------------------------------------------

    def _next_tag(self, ns: re.Pattern[str]) -> tuple[str, str, bool, str] | None:
        """(kind, text, by a real token, raw) of what comes next, or None if that cannot be said yet.

        Kinds: "text"; "tag" (text = what stands between < and >); "bare" (a namespace marker without a tag);
        "cut" (the reply ends inside a marker or tag; text = what there is of the tag's inside).
        """
        buffer, at = self._buffer, self._at
        found = ns.search(buffer, at)
        if found is None or found.start() > at:
            end = found.start() if found else self._safe((markers.NS,) if ns is _ANY_NS else ())
            if end > at:
                return self._take("text", buffer[at:end], False, end)
            return self._take("cut", "", False, len(buffer)) if self._final and at < len(buffer) else None
        marked = found[0] == _NS_TOKEN
        after = found.end()
        if len(buffer) == after:
            return self._take("cut", "", marked, after) if self._final else None
        if buffer[after] != "<":
            return self._take("bare", "", marked, after)
        end = buffer.find(">", after, after + MAX_TAG)
        if end >= 0:
            return self._take("tag", buffer[after + 1 : end], marked, end + 1)
        if len(buffer) >= after + MAX_TAG:
            return self._take("bare", "", marked, after)
        return self._take("cut", buffer[after + 1 :], marked, len(buffer)) if self._final else None

    def _take(self, kind: str, text: str, marked: bool, end: int) -> tuple[str, str, bool, str]:
        raw = self._buffer[self._at : end]
        self._at = end
        return kind, text.replace(_NS_TOKEN, markers.NS), marked, raw

    def _emit(self, kind: type[TextDelta] | type[ThinkingDelta], end: int) -> None:
        if end > self._at:
            self._events.append(kind(self._buffer[self._at : end].replace(_NS_TOKEN, markers.NS)))
            self._at = end

    def _safe(self, starts: tuple[str, ...]) -> int:
        """Up to where the buffer cannot be the beginning of one of `starts` that the next piece completes."""
        buffer = self._buffer
        longest = max(map(len, starts), default=1)
        for at in range(max(self._at, len(buffer) - longest + 1), len(buffer)):
            if buffer[at] in _FIRST_CHARACTERS and any(start.startswith(buffer[at:]) for start in starts):
                return at
        return len(buffer)


def _excerpt(text: str) -> str:
    if len(text) <= MAX_EXCERPT:
        return text
    return f"{text[: MAX_EXCERPT - 205]} ... {text[-200:]}"
