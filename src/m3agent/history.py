"""`History`: a session's messages and its token log, which grow together; only `compact` takes anything out of them.

Everything that can fail or wait (decoding a picture, cutting it into patches, tokenising) is done before, in a thread;
the entering itself waits for nothing, so a cancellation finds either all of a message or nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from m3agent import chat
from m3agent.chat import ChatMessage, Prompt, markers
from m3agent.chat.messages import Thinking
from m3agent.compaction import (
    SUMMARY,
    Compaction,
    Rebuilt,
    asking,
    rebuild,
    recent_from,
    without_old_results,
    without_old_turns,
)
from m3agent.content import Message, Text, ToolCall, ToolChange, ToolResult
from m3agent.cutting import LEAST, cut_result
from m3agent.errors import ContextOverflow, ConversationError, RuntimeClosed, ToolDefinitionError, ToolError
from m3agent.events import Compacted
from m3agent.tools import Tool
from m3agent.transcript import chat_messages, complete, result_message

if TYPE_CHECKING:
    from m3agent.backend import Backend, Sequence, TokenStream
    from m3agent.runtime import Guide, Sampling, Usage

CANCELLED = "cancelled"
NOT_APPROVED = "not approved"
REPLY_ROOM = 1024  # tokens at most that results leave for the reply to them, and an eighth of the context


@dataclass(frozen=True)
class Answer:
    """The result of a call: what the program sees, what the model sees, and the tokens that this takes in the log."""

    result: ToolResult
    message: ChatMessage
    tokens: int
    original: ToolResult | None = None  # of a result that was cut


class History:
    def __init__(
        self,
        runtime: Backend,
        instructions: str | None,
        thinking: Thinking,
        tools: Iterable[Tool[..., Any]],
        messages: Items[Message] = (),
    ) -> None:
        self.runtime = runtime
        self.thinking: Thinking = thinking
        self.tools = {tool.name: tool for tool in tools}
        self.messages = complete(messages)
        self.whole: dict[str, str] = {}  # by call: the texts of results that were cut
        self._head: list[dict[str, Any]] | None = None  # the tools in the head, once it is in the log
        self._changes: list[ToolChange] = []  # of tools, that the model is not told yet
        self.calls = sum(len(message.calls) for message in self.messages)  # so far; call ids count on
        self._instructions = instructions
        # The results of the last turn, by call, which are not in the log yet. Those of `messages` are measured late.
        self._waiting: dict[str, Answer | ToolResult] = {}
        self._restored = list(self.messages)  # rendered with the head, once
        if self._restored and self._restored[-1].role == "tool":
            self._waiting = {result.call_id: result for result in self._restored.pop().results}
        self._sequence: Sequence | None = None  # from the first prompt on
        self._cut = False  # the log ends in a turn without its end token
        self._closed = False

    @property
    def started(self) -> bool:
        """The head, tools included, is in the log and cannot change any more."""
        return self._sequence is not None

    def add_tool(self, tool: Tool[..., Any]) -> None:
        """Raises ToolDefinitionError for a name that is taken."""
        if tool.name in self.tools:
            raise ToolDefinitionError(f"there is a tool {tool.name!r} already; give one of them another name")
        self.tools[tool.name] = tool
        if self.started:
            self._changes.append(ToolChange(added=(tool.definition,)))

    def remove_tool(self, name: str) -> None:
        """Raises ToolDefinitionError for a name that no tool has."""
        if name not in self.tools:
            raise ToolDefinitionError(
                f"there is no tool {name!r} to remove; there are: {', '.join(self.tools) or 'none'}"
            )
        del self.tools[name]
        if self.started:
            self._changes.append(ToolChange(removed=(name,)))

    @property
    def tokens(self) -> list[int]:
        return [] if self._sequence is None else self._sequence.tokens

    @property
    def definitions(self) -> list[dict[str, Any]]:
        return [tool.definition for tool in self.tools.values()]

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """The calls of the last turn that have no result: they wait for approval."""
        answered = {result.call_id for result in self.messages[-1].results} if self.messages else ()
        return tuple(call for call in self._last_calls if call.id not in answered)

    @property
    def _last_calls(self) -> list[ToolCall]:
        last = self.messages[-2:] if self.messages and self.messages[-1].role == "tool" else self.messages[-1:]
        return last[0].calls if last else []

    async def send(self, message: Message | None = None) -> list[ToolResult]:
        """Add a user's message, or nothing but the results that wait, and the opening of the model's next turn.

        Pending calls count as not approved; returned are their results. Raises MediaError, ConversationError (nothing
        to send), ContextOverflow, RuntimeClosed; then nothing was added.
        """
        refused = [self.error(call.id, NOT_APPROVED) for call in self.pending]
        changes = list(self._changes)
        if changes and (message is not None or self._waiting or refused):
            message = Message(role="user", parts=(*changes, *(message.parts if message is not None else ())))
        prompt = await anyio.to_thread.run_sync(self._prompt, message, refused)
        if self._closed:
            raise RuntimeClosed("the session is closed")
        sequence = self.runtime.sequence() if self._sequence is None else self._sequence
        room = self.runtime.context_length - len(sequence) - 1  # one for the reply
        if len(prompt.ids) > room:
            raise ContextOverflow(f"the prompt has {len(prompt.ids)} tokens; there is room for {max(room, 0)}")
        # Nothing below waits: message and tokens enter together.
        sequence.append(prompt.ids, prompt.media)
        self._sequence = sequence
        self._head = self._head or self.definitions
        del self._changes[: len(changes)]
        self._enter(refused)
        self._waiting, self._restored, self._cut = {}, [], True
        if message is not None:
            self.messages.append(message)
        return [answer.result for answer in refused]

    @property
    def head_tools(self) -> list[dict[str, Any]]:
        """The definitions at the front of the prompt."""
        return self._head or self.definitions

    def head(self) -> list[ChatMessage]:
        """What stands before all messages."""
        return [ChatMessage("developer", [self._instructions])] if self._instructions else []

    @property
    def fill(self) -> float:
        """The share of the context that the log takes, with the results that wait for the next turn."""
        waiting = sum(answer.tokens for answer in self._waiting.values() if isinstance(answer, Answer))
        used = 0 if self._sequence is None else len(self._sequence)
        return (used + waiting) / self.runtime.context_length

    async def compact(self, rule: Compaction, target: float) -> tuple[Compacted, Usage] | None:
        """Make room, until the log takes `target` of the context or nothing more may go; None when nothing could.

        Between turns only. Raises RuntimeClosed, MediaError, ConversationError; then nothing has changed, and the same
        holds when it is cancelled.
        """
        if self._sequence is None:
            return None
        began, before = len(self._sequence), self._logged
        rest = self.messages[len(before) :]
        recent = recent_from(before, rule.keep_turns)
        after, whole = without_old_results(before, recent)
        built = await anyio.to_thread.run_sync(rebuild, self, before, after)
        usage, summarised = _no_usage(), 0
        turns = sum(message.role == "assistant" for message in before[:recent])
        if rule.summarise and built.length > target * self.runtime.context_length and turns:
            summary, usage = await self._summary(built)
            after, summarised = without_old_turns(after, recent, summary), turns
            built = await anyio.to_thread.run_sync(rebuild, self, before, after)
        if built.length >= began:
            return None
        sequence = self._sequence.fork(built.kept)
        sequence.append(built.ids, built.media)
        # Nothing below waits: log and messages change together.
        self._sequence.close()
        self._sequence, self.messages = sequence, [*after, *rest]
        self.whole |= {call_id: text for call_id, text in whole.items() if call_id not in self.whole}
        return Compacted(began, built.length, len(whole), summarised), usage

    @property
    def _logged(self) -> list[Message]:
        """The messages that are in the log."""
        return self.messages[:-1] if self._waiting else list(self.messages)

    async def _summary(self, built: Rebuilt) -> tuple[str, Usage]:
        """What the model makes of its past, on a fork; "" where there is no room to ask."""
        assert self._sequence is not None
        fork = self._sequence.fork(built.kept)
        try:
            fork.append(built.ids, built.media)
            segments = self.runtime.chat_format.render_next([asking()], "disabled", after_cut=self._cut)
            prompt = chat.encode(segments, self.runtime.tokenizer)
            most = min(SUMMARY, self.runtime.context_length // 8)
            most = min(most, self.runtime.context_length - len(fork) - len(prompt.ids) - 1)
            if most < 16:
                return "", _no_usage()
            fork.append(prompt.ids, prompt.media)
            sampling = replace(self.runtime.defaults.sampling(), max_tokens=most)
            parser, detokenizer = (
                chat.ReplyParser([], "disabled", tokens=True),
                chat.Detokenizer(self.runtime.tokenizer),
            )
            events: list[chat.ParseEvent] = []
            async with fork.generate(sampling) as stream:
                async for token in stream:
                    for text, control in detokenizer.push(token.id):
                        events += parser.feed(text, control)
                usage = stream.usage
            events += parser.finish()
            return "".join(event.text for event in events if isinstance(event, chat.TextDelta)).strip(), usage
        finally:
            fork.close()

    async def guide(self, answer: dict[str, Any] | None) -> Guide | None:
        """What holds the next turn to the tools' schemas, and to the answer's. Raises GuideError."""
        definitions, guides = self.definitions, self.runtime.guides
        if guides.compiled(definitions, answer):
            return guides.turn(definitions, self.thinking, answer)
        return await anyio.to_thread.run_sync(guides.turn, definitions, self.thinking, answer)

    def generate(self, sampling: Sampling, guide: Guide | None = None) -> TokenStream:
        assert self._sequence is not None
        return self._sequence.generate(sampling, guide)

    def end_turn(self, message: Message) -> None:
        """The model's turn is over, by itself or not. Its tokens are in the log already."""
        self.messages.append(message)
        self.calls += len(message.calls)
        assert self._sequence is not None
        self._cut = self._sequence.last != self.runtime.tokenizer.control_id(markers.END)

    async def prepare(self, result: ToolResult) -> Answer:
        """A result, its pictures decoded and cut into patches; a text that is too long for the context is cut, and
        kept whole beside. Raises MediaError, ToolError for pictures that do not fit.
        """
        return await anyio.to_thread.run_sync(self._prepared, result)

    def error(self, call_id: str, text: str) -> Answer:
        """A result that only says, in a short text, why there is none."""
        return self.measured(error_result(call_id, text))

    def add_results(self, answers: Items[Answer]) -> list[ToolResult]:
        """Results of the last turn's calls, in call order, of all or some; they go into the log with the next `send`.

        Those that would not fit there together are cut to equal shares of the room, or become errors that say so; the
        results are returned as they were added.
        """
        room = self._room()
        short = self.error("", _too_long(f"{room}", room)).tokens
        room -= short * (len(self.pending) - len(answers))
        share = max(_share([answer.tokens for answer in answers], room), short)
        added: list[Answer] = []
        for answer in answers:
            if answer.tokens > share:
                try:
                    answer = self._fitted(answer, share)
                except ToolError as error:
                    answer = self.error(answer.result.call_id, str(error))
            if answer.original is not None:
                self.whole[answer.result.call_id] = answer.original.text
            added.append(answer)
        self._enter(added)
        return [answer.result for answer in added]

    def _enter(self, answers: Items[Answer]) -> None:
        """One message has all results of a turn, so it is replaced when further ones come."""
        if not answers:
            return
        calls = self._last_calls
        if self.messages[-1].role == "tool":
            self.messages.pop()
        self._waiting |= {answer.result.call_id: answer for answer in answers}
        found = [self._waiting[call.id] for call in calls if call.id in self._waiting]
        results = tuple(part.result if isinstance(part, Answer) else part for part in found)
        self.messages.append(Message(role="tool", parts=results))

    def fork(self) -> History:
        other = History(self.runtime, self._instructions, self.thinking, self.tools.values())
        other.messages, other.calls = list(self.messages), self.calls
        other.whole, other._head, other._changes = dict(self.whole), self._head, list(self._changes)
        other._restored, other._waiting = list(self._restored), dict(self._waiting)
        other._cut, other._closed = self._cut, self._closed
        other._sequence = None if self._sequence is None else self._sequence.fork()
        return other

    def close(self) -> None:
        self._closed = True
        if self._sequence is not None:
            self._sequence.close()

    def _prompt(self, message: Message | None, refused: Items[Answer]) -> Prompt:
        """Runs in a thread and changes nothing."""
        waiting = self._waiting | {answer.result.call_id: answer for answer in refused}
        if message is None and not waiting:
            raise ConversationError("there is nothing to answer: pass a text or a picture")
        spec = self.runtime.pixels
        answers = [waiting[call.id] for call in self._last_calls if call.id in waiting]
        added = [part.message if isinstance(part, Answer) else result_message(part, spec) for part in answers]
        added += chat_messages([message], spec) if message is not None else []
        if self._sequence is not None:
            segments = self.runtime.chat_format.render_next(added, self.thinking, after_cut=self._cut)
        else:
            restored = chat_messages(self._restored, spec)
            segments = self.runtime.chat_format.render(
                [*self.head(), *restored, *added], self.definitions, self.thinking
            )
        texts = "".join(segment.text for segment in segments if isinstance(segment, chat.Text))
        limit = self.runtime.context_length
        if self.runtime.tokenizer.exceeds(texts, limit):
            raise ContextOverflow(f"a prompt of {len(texts)} characters is far beyond the context of {limit} tokens")
        return chat.encode(segments, self.runtime.tokenizer)

    def _prepared(self, result: ToolResult) -> Answer:
        """Runs in a thread."""
        tool = self.tools.get(next((call.name for call in self._last_calls if call.id == result.call_id), ""))
        keep, room = len(result.text), self._room()
        if tool is not None and tool.max_result is not None:
            keep = min(keep, tool.max_result)
        if self.runtime.tokenizer.exceeds(result.text[:keep], self.runtime.context_length):
            keep = max(4 * room, LEAST)  # not even tokenised whole; four characters a token are more than enough
        answer = self._cut_to(result, keep)
        return self._fitted(answer, room) if answer.tokens > room else answer

    def _fitted(self, answer: Answer, room: int) -> Answer:
        """The answer with its text cut so far that it fits. Raises ToolError where that leaves nothing of it."""
        original, keep, found = answer.original or answer.result, len(answer.result.text), answer
        while found.tokens > room:
            keep = min(keep * 9 // 10, int(keep * 0.95 * max(room, 0) / found.tokens))
            if keep < LEAST:
                raise ToolError(_too_long(f"{answer.tokens}", room))
            found = self._cut_to(original, keep)
        return found

    def _cut_to(self, original: ToolResult, keep: int) -> Answer:
        result = cut_result(original, keep, "read_result" in self.tools)
        return replace(self.measured(result), original=None if result is original else original)

    def measured(self, result: ToolResult) -> Answer:
        """A result without pictures, which is as quick as its text is short; others go through `prepare`."""
        message = result_message(result, self.runtime.pixels)
        return Answer(result, message, self._tokens([message]) - self._tokens([]))

    def _tokens(self, messages: Items[ChatMessage]) -> int:
        """How many tokens a prompt with these messages appends."""
        segments = self.runtime.chat_format.render_next(messages, self.thinking, after_cut=self._cut)
        return len(chat.encode(segments, self.runtime.tokenizer).ids)

    def _room(self) -> int:
        """Tokens that results may take; it is below 0 when not even the reply has the room that it should have."""
        limit = self.runtime.context_length
        used = 0 if self._sequence is None else len(self._sequence)
        used += sum(answer.tokens for answer in self._waiting.values() if isinstance(answer, Answer))
        return limit - used - self._tokens([]) - min(REPLY_ROOM, limit // 8)


def _no_usage() -> Usage:
    from m3agent.runtime import Usage

    return Usage()


def error_result(call_id: str, text: str) -> ToolResult:
    return ToolResult(call_id=call_id, parts=(Text(text=text),), error=True)


def _too_long(tokens: str, room: int) -> str:
    return f"the result has {tokens} tokens; there is room for {max(room, 0)}"


def _share(sizes: Items[int], room: int) -> int:
    """The most that each may have, so that all fit; what a small one leaves over goes to the others."""
    left = len(sizes)
    for size in sorted(sizes):
        if size > room // left:
            return room // left
        room, left = room - size, left - 1
    return max(sizes, default=0)
