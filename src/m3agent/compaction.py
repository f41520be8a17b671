"""Compaction: a session whose context runs short goes on with less of its past, and says so.

First the results of old calls give way to short notes (the whole texts stay with the session), then, should that not be
enough, the model's own old turns to a summary that it writes itself. What users said, and the last turns, stay as they
are. The token log is cut where it first changes; all before it keeps its pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from m3agent import chat
from m3agent.chat import ChatMessage, markers
from m3agent.content import Message, Text, ToolResult
from m3agent.errors import ConversationError
from m3agent.transcript import chat_messages

if TYPE_CHECKING:
    from m3agent.media.pixels import Patches

SHORT = 300  # characters; a result that is not longer stays
SUMMARY = 1024  # tokens at most, and an eighth of the context
_ASK = (
    "The conversation is getting too long. Write down, for yourself, what matters of your work so far: what was found "
    "and decided, what was changed, what is left to do. Names, numbers and paths exactly. Nothing else."
)
_SUMMARY = "Your own work so far, as you wrote it down when there had to be room:\n"
_LEFT_OUT = "Your earlier turns were left out here, to make room."


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """When a session makes room, and what it keeps.

    at: the share of the context from which on it does, before the model's next turn. keep_turns: the last turns of the
    model that stay as they are, results included. summarise: whether old turns may give way to a summary.
    """

    at: float = 0.8
    keep_turns: int = 4
    summarise: bool = True

    def __post_init__(self) -> None:
        if not 0.1 <= self.at <= 1:
            raise ValueError(f"at is {self.at}; it has to be a share of the context between 0.1 and 1")
        if self.keep_turns < 0:
            raise ValueError(f"keep_turns is {self.keep_turns}; it has to be 0 or more")


@dataclass(frozen=True)
class Blocks:
    """A token log, cut where its messages begin: those of the head, then one for each message."""

    head: list[int]
    messages: list[list[int]]


def split(ids: Sequence[int], begin: int, messages: int) -> Blocks:
    """begin: the token before each message's role. Raises ConversationError where the log has fewer messages."""
    starts = [place for place, token in enumerate(ids) if token == begin]
    if len(starts) < messages:
        raise ConversationError("this checkpoint's chat template does not mark its messages: it cannot be compacted")
    first = len(starts) - messages
    cuts = [*starts[first:], len(ids)]
    body = [list(ids[a:b]) for a, b in pairwise(cuts)]
    return Blocks(list(ids[: cuts[0]]), body)


def without_old_results(messages: Sequence[Message], recent: int) -> tuple[list[Message], dict[str, str]]:
    """Messages whose long results before index `recent` are notes, and the texts that these had, by call."""
    found: list[Message] = []
    whole: dict[str, str] = {}
    for place, message in enumerate(messages):
        if message.role != "tool" or place >= recent:
            found.append(message)
            continue
        results = [_noted(result) for result in message.results]
        for before, after in zip(message.results, results, strict=True):
            if after is not before:
                whole[before.call_id] = before.text
        same = all(after is before for before, after in zip(message.results, results, strict=True))
        found.append(message if same else message.model_copy(update={"parts": tuple(results)}))
    return found, whole


def _noted(result: ToolResult) -> ToolResult:
    pictures = len(result.parts) - sum(isinstance(part, Text) for part in result.parts)
    if len(result.text) <= SHORT and not pictures:
        return result
    shown = f" and {pictures} pictures" if pictures else ""
    begin = " ".join(result.text[:80].split())
    note = f"[left out: {len(result.text)} characters{shown}, call {result.call_id}, beginning: {begin}]"
    return result.model_copy(update={"parts": (Text(text=note),)})


def without_old_turns(messages: Sequence[Message], recent: int, summary: str) -> list[Message]:
    """What users said before index `recent`, the summary in place of the model's turns there, and the rest."""
    said = [message for message in messages[:recent] if message.role == "user"]
    note = Message(role="user", parts=(Text(text=_SUMMARY + summary if summary else _LEFT_OUT),))
    return [*said, note, *messages[recent:]]


def recent_from(messages: Sequence[Message], keep_turns: int) -> int:
    """The index from which on messages stay: that of the last `keep_turns`-th turn of the model."""
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    return turns[-keep_turns] if 0 < keep_turns <= len(turns) else (len(messages) if not keep_turns else 0)


@dataclass(frozen=True)
class Rebuilt:
    """A log for other messages: `kept` tokens of the old one, then `ids`, with pictures at offsets in them."""

    kept: int
    ids: list[int]
    media: list[tuple[int, Patches]]

    @property
    def length(self) -> int:
        return self.kept + len(self.ids)


def rebuild(history: Any, before: Sequence[Message], after: Sequence[Message]) -> Rebuilt:
    """The log of `after` for that of `before`, of a `History`: messages in both keep their tokens, whatever these are.

    Runs in a thread, and changes nothing. Raises MediaError, ConversationError.
    """
    runtime = history.runtime
    begin = runtime.tokenizer.control_id(markers.ROLE)
    log = history.tokens
    old = split(log, begin, len(before))
    shown = [*history.head(), *chat_messages(after, runtime.pixels)]
    segments = runtime.chat_format.render(shown, history.head_tools, history.thinking, False)
    prompt = chat.encode(segments, runtime.tokenizer)
    new = split(prompt.ids, begin, len(after))
    kept_blocks = {id(message): block for message, block in zip(before, old.messages, strict=True)}
    blocks = [kept_blocks.get(id(message), block) for message, block in zip(after, new.messages, strict=True)]
    ids = [*old.head, *(token for block in blocks for token in block)]
    media = [(offset + _shift(new, blocks, offset, len(old.head)), patches) for offset, patches in prompt.media]
    same = next((i for i, (a, b) in enumerate(zip(log, ids, strict=False)) if a != b), min(len(log), len(ids)))
    # From the beginning of a message on, so that no picture is cut.
    kept, place = 0, len(old.head)
    for block in blocks:
        if place <= same:
            kept = place
        place += len(block)
    kept = len(ids) if same == len(ids) else kept
    return Rebuilt(kept, ids[kept:], [(offset - kept, patches) for offset, patches in media if offset >= kept])


def _shift(rendered: Blocks, blocks: list[list[int]], offset: int, head: int) -> int:
    """How far a picture at `offset` of the rendered log stands from there in the log of `blocks`."""
    there, here = len(rendered.head), head
    for block, used in zip(rendered.messages, blocks, strict=True):
        if offset < there + len(block):
            break
        there, here = there + len(block), here + len(used)
    return here - there


def asking() -> ChatMessage:
    """The request for a summary."""
    return ChatMessage("user", [_ASK])
