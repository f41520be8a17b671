"""What the reader of a generated turn tells: text, thinking, and calls that finish or are damaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MAX_EXCERPT = 800


@dataclass(frozen=True)
class TextDelta:
    """A piece of the answer. Never empty, never half a character."""

    text: str


@dataclass(frozen=True)
class ThinkingDelta:
    """A piece of the model's thinking."""

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
