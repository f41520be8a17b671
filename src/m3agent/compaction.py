"""`Compaction`: when a session whose context runs short goes on with less of its past, and what of it that is.

First the results of old calls give way to short notes, then, should that not be enough, the model's own old turns to a
summary that it writes itself. What users said, and the last turns, stay as they are. Whole texts of results are kept
beside: with the note, or with the summary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from m3agent.content import Message, Summary, Text, ToolResult

SHORT = 300  # characters; a result that is not longer stays
_SUMMARY = "Your own work so far, as you wrote it down when there had to be room:\n"
_LEFT_OUT = "Your earlier turns were left out here, to make room."


@dataclass(frozen=True, kw_only=True)
class Compaction:
    """When a session makes room, and what it keeps.

    at: the share of the context from which on it does, before the model's next turn. keep_turns: the last turns of the
    model that stay as they are, results included; with 0, the last one still stays while it is cut short or its calls
    have results to come. summarise: whether old turns may give way to a summary.
    """

    at: float = 0.8
    keep_turns: int = 4
    summarise: bool = True

    def __post_init__(self) -> None:
        if not 0.1 <= self.at <= 1:
            raise ValueError(f"at is {self.at}; it has to be a share of the context between 0.1 and 1")
        if self.keep_turns < 0:
            raise ValueError(f"keep_turns is {self.keep_turns}; it has to be 0 or more")


def recent_from(messages: Sequence[Message], keep_turns: int) -> int:
    """The index from which on messages stay: that of the last `keep_turns`-th turn of the model."""
    turns = [place for place, message in enumerate(messages) if message.role == "assistant"]
    return turns[-keep_turns] if 0 < keep_turns <= len(turns) else (len(messages) if not keep_turns else 0)


def without_old_results(messages: Sequence[Message], recent: int) -> tuple[list[Message], int]:
    """Messages whose long results before index `recent` are notes, and how many these are."""
    found: list[Message] = []
    notes = 0
    for place, message in enumerate(messages):
        if message.role == "tool" and place < recent:
            results = [_noted(result) for result in message.results]
            changed = sum(after is not before for before, after in zip(message.results, results, strict=True))
            notes += changed
            message = message.model_copy(update={"parts": tuple(results)}) if changed else message
        found.append(message)
    return found, notes


def _noted(result: ToolResult) -> ToolResult:
    pictures = len(result.parts) - sum(isinstance(part, Text) for part in result.parts)
    if len(result.text) <= SHORT and not pictures:
        return result
    shown = f" and {pictures} pictures" if pictures else ""
    begin = " ".join(result.text[:80].split())
    note = f"[left out: {len(result.text)} characters{shown}, call {result.call_id}, beginning: {begin}]"
    return result.model_copy(update={"parts": (Text(text=note),), "whole": _whole(result)})


def without_old_turns(messages: Sequence[Message], recent: int, summary: str) -> list[Message]:
    """What users said before index `recent`, the summary in place of the model's turns there, and the rest.

    An earlier summary goes, too: the model had it before it when it wrote this one. Where it wrote none ("": there was
    no room to), the earlier one is what remains.
    """
    old = messages[:recent]
    said = [message for message in old if message.role == "user" and not _summaries(message)]
    earlier = [part for message in old for part in _summaries(message)]
    text = _SUMMARY + summary if summary else "\n".join([*(part.text for part in earlier), _LEFT_OUT])
    results = {call_id: whole for part in earlier for call_id, whole in part.results.items()}
    results |= {result.call_id: _whole(result) for message in old for result in message.results}
    return [*said, Message(role="user", parts=(Summary(text=text, results=results),)), *messages[recent:]]


def place_after(place: int, before: Sequence[Message], after: Sequence[Message], recent: int) -> int:
    """Where index `place` of the messages before lies in those that `without_old_turns` left."""
    if place >= recent:
        return place - len(before) + len(after)
    return sum(message.role == "user" and not _summaries(message) for message in before[:place])


def _summaries(message: Message) -> list[Summary]:
    return [part for part in message.parts if isinstance(part, Summary)]


def _whole(result: ToolResult) -> str:
    return result.text if result.whole is None else result.whole
