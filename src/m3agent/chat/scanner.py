"""The text of a turn that is not read yet: finds markers in it, and holds back what may be the beginning of one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Literal

from m3agent.chat import markers
from m3agent.chat.elements import MAX_TAG

# A namespace *token* is this one character in the buffer. Decoded text holds no lone surrogate.
_NS_TOKEN = "\ud800"
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIRST_CHARACTERS = f"]<{_NS_TOKEN}"


@dataclass(frozen=True, slots=True)
class Piece:
    """kind: "text"; "tag" (text = what stands between < and >); "bare" (a namespace marker without a tag); "cut" (the
    turn ends inside a marker or tag; text = what there is of the tag's inside)."""

    kind: Literal["text", "tag", "bare", "cut"]
    text: str
    raw: str


def _spelled(text: str) -> str:
    """The text as it reads: namespace tokens by their spelling."""
    return text.replace(_NS_TOKEN, markers.NS)


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


class Scanner:
    """Linear in the text: what is done is never looked at again, and what is held back is at most one tag.

    tokens: the namespace marker is the token alone, and its spelling is text; otherwise it is the spelling.
    """

    def __init__(self, *, tokens: bool) -> None:
        self.marker = _NS_TOKEN if tokens else markers.NS  # as it stands in the buffer
        self.final = False  # no more text comes, so nothing is held back
        self._buffer = ""
        self._at = 0  # what stands before it is done

    def add(self, text: str) -> None:
        """Ordinary text."""
        self._append(_SURROGATE.sub("\ufffd", text))

    def add_token(self, text: str) -> None:
        """One control token, by its spelling."""
        self._append(_NS_TOKEN if text == markers.NS else text)

    @property
    def held(self) -> int:
        """Characters that are not done."""
        return len(self._buffer) - self._at

    def starts_with(self, marker: str) -> bool | None:
        """Whether the text begins with `marker`, which is skipped then; None if more text must say."""
        begin = self._buffer[self._at : self._at + len(marker)]
        if begin == marker:
            self._at += len(marker)
            return True
        return None if marker.startswith(begin) and not self.final else False

    def until(self, marks: tuple[str, ...]) -> tuple[str, str | None]:
        """(text, the one of `marks` after it or None if there is none yet); both are done with."""
        found = _any_of(marks).search(self._buffer, self._at)
        end = found.start() if found else len(self._buffer) if self.final else self._safe(marks)
        text = self._buffer[self._at : end]
        self._at = found.end() if found else end
        return _spelled(text), found[0] if found else None

    def next(self) -> Piece | None:
        """What comes next inside a block, or None if that cannot be said yet."""
        buffer, at = self._buffer, self._at
        found = buffer.find(self.marker, at)
        if found != at:
            end = found if found >= 0 else self._safe((self.marker,))
            if end > at:
                return self._take("text", buffer[at:end], end)
            return self._take("cut", "", len(buffer)) if self.final and at < len(buffer) else None
        after = found + len(self.marker)
        if len(buffer) == after:
            return self._take("cut", "", after) if self.final else None
        if buffer[after] != "<":
            return self._take("bare", "", after)
        end = buffer.find(">", after, after + MAX_TAG)
        if end >= 0:
            return self._take("tag", buffer[after + 1 : end], end + 1)
        if len(buffer) >= after + MAX_TAG:
            return self._take("bare", "", after)
        return self._take("cut", buffer[after + 1 :], len(buffer)) if self.final else None

    def _append(self, text: str) -> None:
        self._buffer = self._buffer[self._at :] + text
        self._at = 0

    def _take(self, kind: Literal["text", "tag", "bare", "cut"], text: str, end: int) -> Piece:
        raw = _spelled(self._buffer[self._at : end])
        self._at = end
        return Piece(kind, _spelled(text), raw)

    def _safe(self, starts: tuple[str, ...]) -> int:
        """Up to where the buffer cannot be the beginning of one of `starts` that the next piece completes."""
        buffer = self._buffer
        longest = max(map(len, starts), default=1)
        for at in range(max(self._at, len(buffer) - longest + 1), len(buffer)):
            if buffer[at] in _FIRST_CHARACTERS and any(start.startswith(buffer[at:]) for start in starts):
                return at
        return len(buffer)
