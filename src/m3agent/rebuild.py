"""The token log of messages that were compacted, from the log that they had before.

Messages that stay keep their tokens, whatever these are; the others are rendered. The log is cut where it first
changes; all before it keeps its pages.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from m3agent import chat
from m3agent.content import Message
from m3agent.errors import ConversationError
from m3agent.history import History
from m3agent.token_log import TokenLog, rendered_starts, whole
from m3agent.transcript import chat_messages

if TYPE_CHECKING:
    from m3agent.backend import Sequence
    from m3agent.media.pixels import Patches


@dataclass(frozen=True)
class Rebuilt:
    """A new log: its tokens, the first `kept` of which are the old log's, its pictures behind them by the token where
    they begin, and where its messages begin.
    """

    tokens: list[int]
    kept: int
    media: list[tuple[int, Patches]]
    starts: list[int]

    def sequence(self, old: Sequence, length: int | None = None) -> Sequence:
        """The first `length` tokens of it, on the pages of the old log. Raises RuntimeClosed, SessionBusy."""
        end = len(self.tokens) if length is None else length
        found = old.fork(min(self.kept, end))
        media = [(place - self.kept, patches) for place, patches in self.media if place < end]
        found.append(self.tokens[self.kept : end], media)
        return found


@dataclass(frozen=True)
class _Blocks:
    """A log, cut where its messages begin: the head, then one block for each message."""

    head: list[int]
    messages: list[list[int]]


def rebuild(history: History, log: TokenLog, before: Items[Message], after: Items[Message]) -> Rebuilt:
    """The log of `after` for that of `before`. Runs in a thread, and changes nothing. Raises MediaError,
    ConversationError.
    """
    runtime, old_tokens = history.runtime, log.tokens
    shown = [*history.head(), *chat_messages(after, runtime.pixels)]
    segments = runtime.chat_format.render(shown, history.tools.head, history.thinking, False)
    prompt = chat.encode(segments, runtime.tokenizer)
    starts = rendered_starts(prompt.ids, runtime.tokenizer, len(after))
    if starts is None:
        raise ConversationError("this checkpoint's chat template does not mark its messages: it cannot be compacted")
    old = _split(old_tokens, log.starts[: len(before)])
    # The newline after the last end token comes with the next prompt.
    new = _split(prompt.ids[: whole(prompt.ids, runtime.tokenizer, len(prompt.ids))], starts)
    same = {id(message): block for message, block in zip(before, old.messages, strict=True)}
    blocks = [same.get(id(message), block) for message, block in zip(after, new.messages, strict=True)]
    tokens = [*old.head, *(token for block in blocks for token in block)]
    places = list(accumulate((len(block) for block in blocks), initial=len(old.head)))
    changed = next((i for i, (a, b) in enumerate(zip(old_tokens, tokens, strict=False)) if a != b), len(tokens))
    changed = min(changed, len(old_tokens))
    # From the beginning of a message on, so that no picture is cut.
    kept = changed if changed == len(tokens) else max(place for place in places if place <= changed)
    media = [(place + _shift(new, places, place), patches) for place, patches in prompt.media]
    return Rebuilt(tokens, kept, [(place, patches) for place, patches in media if place >= kept], places[:-1])


def _split(ids: list[int], starts: list[int]) -> _Blocks:
    return _Blocks(ids[: starts[0]], [ids[a:b] for a, b in pairwise([*starts, len(ids)])])


def _shift(rendered: _Blocks, places: Items[int], place: int) -> int:
    """How far a picture at `place` of the rendered log stands from there in the new log."""
    there = len(rendered.head)
    for block, here in zip(rendered.messages, places, strict=False):
        if place < there + len(block):
            return here - there
        there += len(block)
    raise AssertionError("a picture stands outside all messages")
