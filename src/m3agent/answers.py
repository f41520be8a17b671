"""`Answer`: the result of a call as the program sees it and as the model does, cut where the context is too short."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from m3agent import chat
from m3agent.chat import ChatMessage
from m3agent.chat.messages import Thinking
from m3agent.content import Text, ToolResult
from m3agent.cutting import LEAST, cut_result
from m3agent.errors import ToolError
from m3agent.transcript import result_message

if TYPE_CHECKING:
    from m3agent.backend import Backend


@dataclass(frozen=True)
class Answer:
    """The result of a call: what the program sees, what the model sees, and the tokens that this takes in the log."""

    result: ToolResult
    message: ChatMessage
    tokens: int
    original: ToolResult | None = None  # of a result that was cut


@dataclass(frozen=True)
class Measure:
    """How long a result becomes in the log. readable: the model has the tool that shows the rest of a cut one."""

    runtime: Backend
    thinking: Thinking
    readable: bool = False
    after_cut: bool = False

    def of(self, result: ToolResult) -> Answer:
        """Decodes pictures, so it belongs into a thread for a result that has some. Raises MediaError."""
        message = result_message(result, self.runtime.pixels)
        return Answer(result, message, self.tokens([message]) - self.tokens([]))

    def tokens(self, messages: Items[ChatMessage]) -> int:
        """How many tokens a prompt with these messages appends."""
        segments = self.runtime.chat_format.render_next(messages, self.thinking, after_cut=self.after_cut)
        return len(chat.encode(segments, self.runtime.tokenizer).ids)

    def prepared(self, result: ToolResult, room: int, keep: int | None) -> Answer:
        """The answer, in `room` tokens and about `keep` characters of text. Raises MediaError, ToolError."""
        keep = len(result.text) if keep is None else min(keep, len(result.text))
        if self.runtime.tokenizer.exceeds(result.text[:keep], self.runtime.context_length):
            keep = max(4 * room, LEAST)  # not even tokenised whole; four characters a token are more than enough
        answer = self._cut(result, keep)
        return self.fitted(answer, room) if answer.tokens > room else answer

    def fitted(self, answer: Answer, room: int) -> Answer:
        """The answer with its text cut so far that it fits. Raises ToolError where that leaves nothing of it."""
        original, keep, found = answer.original or answer.result, len(answer.result.text), answer
        while found.tokens > room:
            keep = min(keep * 9 // 10, int(keep * 0.95 * max(room, 0) / found.tokens))
            if keep < LEAST:
                raise ToolError(_too_long(f"{answer.tokens}", room))
            found = self._cut(original, keep)
        return found

    def fitted_together(self, answers: Items[Answer], room: int, missing: int) -> list[Answer]:
        """The answers cut to equal shares of the room, or errors that say so; `missing` such errors keep their room."""
        short = self.of(error_result("", _too_long(f"{room}", room))).tokens
        room -= short * missing
        share = max(_fair_share([answer.tokens for answer in answers], room), short)
        found: list[Answer] = []
        for answer in answers:
            if answer.tokens > share:
                try:
                    answer = self.fitted(answer, share)
                except ToolError as error:
                    answer = self.of(error_result(answer.result.call_id, str(error)))
            found.append(answer)
        return found

    def _cut(self, original: ToolResult, keep: int) -> Answer:
        result = cut_result(original, keep, self.readable)
        if result is original:
            return self.of(original)
        kept = original.text if original.whole is None else original.whole
        return replace(self.of(result.model_copy(update={"whole": kept})), original=original)


def error_result(call_id: str, text: str) -> ToolResult:
    return ToolResult(call_id=call_id, parts=(Text(text=text),), error=True)


def _too_long(tokens: str, room: int) -> str:
    return f"the result has {tokens} tokens; there is room for {max(room, 0)}"


def _fair_share(sizes: Items[int], room: int) -> int:
    """The most that each may have, so that all fit; what a small one leaves over goes to the others."""
    left = len(sizes)
    for size in sorted(sizes):
        if size > room // left:
            return room // left
        room, left = room - size, left - 1
    return max(sizes, default=0)
