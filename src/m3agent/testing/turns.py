"""What a scripted model says in one turn, as tokens; and what it was shown, read back from tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from m3agent.chat import ChatCall, Tokenizer, encode, markers
from m3agent.chat.elements import write_calls
from m3agent.chat.segments import SegmentWriter


@dataclass(frozen=True)
class Turn:
    """One turn of the model: what it thinks, says and calls, in this order. ended: False leaves out the end token, as
    when a limit cuts the turn.
    """

    text: str = ""
    thinking: str = ""
    calls: tuple[ChatCall, ...] = ()
    ended: bool = True

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """The tokens, as the chat format writes them; the text cannot turn into control tokens."""
        out = SegmentWriter()
        if self.thinking:
            out.control(markers.THINK)
            out.text(self.thinking)
            out.control(markers.THINK_END)
        out.text(self.text)
        write_calls(self.calls, out)
        if self.ended:
            out.control(markers.END)
        return encode(out.done(), tokenizer).ids


@dataclass(frozen=True)
class Raw:
    """A turn written out; markers in it are control tokens."""

    text: str

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        spelled = sorted(map(re.escape, tokenizer.control), key=len, reverse=True)
        pieces = re.split(f"({'|'.join(spelled)})", self.text)
        return [
            token
            for piece in pieces
            for token in ([tokenizer.control[piece]] if piece in tokenizer.control else tokenizer.encode(piece))
        ]


Reply = str | Turn | Raw | ChatCall | Sequence[ChatCall]
"""Text, a call or several side by side, or a whole turn."""


def call(tool: str, /, **arguments: Any) -> ChatCall:
    """A call of `tool` with these JSON values."""
    return ChatCall(tool, arguments)


def raw(text: str) -> Raw:
    """A turn exactly as written, for what a model should not write: damaged calls, markers in wrong places. The
    spelling of a control token in it is that token; end it with `[e~[` unless a limit is to cut it.
    """
    return Raw(text)


def turn_of(reply: Reply) -> Turn | Raw:
    if isinstance(reply, str):
        return Turn(reply)
    if isinstance(reply, ChatCall):
        return Turn(calls=(reply,))
    return reply if isinstance(reply, Turn | Raw) else Turn(calls=tuple(reply))


@dataclass(frozen=True)
class Shown:
    """A message as the model is shown it: role is "system", "developer", "user", "ai" or "tool"."""

    role: str
    text: str


def shown(ids: Sequence[int], tokenizer: Tokenizer) -> list[Shown]:
    """The messages of a prompt, read from its tokens; the opening of the model's own turn at its end is left out."""
    return [Shown(role, text) for role, text, closed in _blocks(ids, tokenizer) if closed]


def _blocks(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, str, bool]]:
    begin, end = tokenizer.control_id(markers.ROLE), tokenizer.control_id(markers.END)
    starts = [place for place, token in enumerate(ids) if token == begin]
    for start, after in zip(starts, [*starts, len(ids)][1:], strict=True):
        body = list(ids[start + 1 : after])
        closed = end in body
        role, _, text = tokenizer.decode(body[: body.index(end)] if closed else body).partition("\n")
        yield role, text, closed
