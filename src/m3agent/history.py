"""`History`: a session's messages and its token log, which grow together; compaction and rewinding alone shorten them.

Everything that can fail or wait (decoding a picture, cutting it into patches, tokenising) is done before, in a thread;
the entering itself waits for nothing, so a cancellation finds either all of a message or nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from m3agent import chat
from m3agent.answers import Answer, Measure, error_result
from m3agent.chat import ChatMessage, Prompt
from m3agent.chat.messages import Thinking
from m3agent.content import Message, ToolCall, ToolResult
from m3agent.errors import ContextOverflow, ConversationError, RuntimeClosed
from m3agent.session_tools import SessionTools
from m3agent.token_log import TokenLog
from m3agent.tools import Tool
from m3agent.transcript import calls_so_far, chat_messages, complete, result_message

if TYPE_CHECKING:
    from m3agent.backend import Backend, Sequence, TokenStream
    from m3agent.media.pixels import Patches
    from m3agent.runtime import Guide, Sampling

CANCELLED = "cancelled"
NOT_APPROVED = "not approved"
REPLY_ROOM = 1024  # tokens at most that results leave for the reply to them, and an eighth of the context


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
        self.messages = complete(messages)
        self.tools = SessionTools(tools, self.messages)
        self.calls = calls_so_far(self.messages)  # call ids count on from here
        self.began = 0  # the first message of the last run
        self.log: TokenLog | None = None  # from the first prompt on
        self.instructions = instructions
        self.name = ""  # of its sequence, for whoever looks at the runtime
        self._restored: list[Message] = []  # rendered with the head, once
        # The results of the last turn, by call, which are not in the log yet. Those of `messages` are measured late.
        self._waiting: dict[str, Answer | ToolResult] = {}
        self._take_up()
        self._closed = False

    # What there is -------------------------------------------------------------------------------------------------

    @property
    def tokens(self) -> list[int]:
        return [] if self.log is None else self.log.tokens

    def head(self) -> list[ChatMessage]:
        """What stands before all messages."""
        return [ChatMessage("developer", [self.instructions])] if self.instructions else []

    @property
    def logged(self) -> list[Message]:
        """The messages that are in the log, between turns."""
        return self.messages[:-1] if self._waiting else list(self.messages)

    @property
    def pending(self) -> tuple[ToolCall, ...]:
        """The calls of the last turn that have no result: they wait for approval."""
        answered = {result.call_id for result in self.messages[-1].results} if self.messages else ()
        return tuple(call for call in self._last_calls if call.id not in answered)

    @property
    def hanging(self) -> bool:
        """Something is still to come that belongs to the last turn: its end, or results of its calls."""
        return bool(self._waiting or self.pending) or (self.log is not None and self.log.cut)

    @property
    def fill(self) -> float:
        """The share of the context that the log takes, with the results that wait for the next turn."""
        return self._used / self.runtime.context_length

    @property
    def _used(self) -> int:
        waiting = sum(answer.tokens for answer in self._waiting.values() if isinstance(answer, Answer))
        return (0 if self.log is None else len(self.log)) + waiting

    @property
    def _last_calls(self) -> list[ToolCall]:
        last = self.messages[-2:] if self.messages and self.messages[-1].role == "tool" else self.messages[-1:]
        return last[0].calls if last else []

    # Turns ---------------------------------------------------------------------------------------------------------

    async def send(self, message: Message | None = None) -> list[ToolResult]:
        """Add a user's message, or nothing but the results that wait, and the opening of the model's next turn.

        Pending calls count as not approved; returned are their results. Raises MediaError, ConversationError (nothing
        to send), ContextOverflow, RuntimeClosed; then nothing was added.
        """
        refused = [self.error(call.id, NOT_APPROVED) for call in self.pending]
        changes = self.tools.news
        if changes and (message is not None or self._waiting or refused):
            message = Message(role="user", parts=(*changes, *(message.parts if message is not None else ())))
        prompt, entering = await anyio.to_thread.run_sync(self._prompt, message, refused)
        if self._closed:
            raise RuntimeClosed("the session is closed")
        log = TokenLog(self.runtime.sequence(), self.runtime.tokenizer, []) if self.log is None else self.log
        room = self.runtime.context_length - len(log) - 1  # one for the reply
        if len(prompt.ids) > room:
            raise ContextOverflow(f"the prompt has {len(prompt.ids)} tokens; there is room for {max(room, 0)}")
        log.sequence.name = self.name
        # Nothing below waits: message and tokens enter together.
        log.append(prompt, entering)
        self.log = log
        self.tools.told(changes)
        self._enter(refused)
        self._waiting, self._restored = {}, []
        if message is not None:
            self.messages.append(message)
        self._write_head()
        return [answer.result for answer in refused]

    async def guide(self, answer: dict[str, Any] | None) -> Guide | None:
        """What holds the next turn to the tools' schemas, and to the answer's. Raises GuideError."""
        definitions, guides = self.tools.definitions, self.runtime.guides
        if guides.compiled(definitions, answer):
            return guides.turn(definitions, self.thinking, answer)
        return await anyio.to_thread.run_sync(guides.turn, definitions, self.thinking, answer)

    def generate(self, sampling: Sampling, guide: Guide | None = None, priority: int = 0) -> TokenStream:
        assert self.log is not None
        self.log.sequence.priority = priority
        return self.log.sequence.generate(sampling, guide)

    def end_turn(self, message: Message) -> None:
        """The model's turn is over, by itself or not. Its tokens are in the log already."""
        self.messages.append(message)
        self.calls += len(message.calls)

    def _prompt(self, message: Message | None, refused: Items[Answer]) -> tuple[Prompt, int]:
        """The next prompt, and how many messages it has, the opening of the turn included. Runs in a thread and changes
        nothing.
        """
        waiting = self._waiting | {answer.result.call_id: answer for answer in refused}
        if message is None and not waiting:
            raise ConversationError("there is nothing to answer: pass a text or a picture")
        spec = self.runtime.pixels
        answers = [waiting[call.id] for call in self._last_calls if call.id in waiting]
        added = [part.message if isinstance(part, Answer) else result_message(part, spec) for part in answers]
        added += chat_messages([message], spec) if message is not None else []
        entering = len(self._restored) + bool(answers) + (message is not None) + 1
        if self.log is not None:
            segments = self.runtime.chat_format.render_next(added, self.thinking, after_cut=self.log.cut)
        else:
            restored = chat_messages(self._restored, spec)
            shown = [*self.head(), *restored, *added]
            segments = self.runtime.chat_format.render(shown, self.tools.head, self.thinking)
        texts = "".join(segment.text for segment in segments if isinstance(segment, chat.Text))
        limit = self.runtime.context_length
        if self.runtime.tokenizer.exceeds(texts, limit):
            raise ContextOverflow(f"a prompt of {len(texts)} characters is far beyond the context of {limit} tokens")
        return chat.encode(segments, self.runtime.tokenizer), entering

    # Results of calls ----------------------------------------------------------------------------------------------

    async def prepare(self, result: ToolResult) -> Answer:
        """A result, its pictures decoded and cut into patches; a text that is too long for the context is cut, and
        kept whole beside. Raises MediaError, ToolError for pictures that do not fit.
        """
        tool = self.tools.by_name.get(next((call.name for call in self._last_calls if call.id == result.call_id), ""))
        keep = None if tool is None else tool.max_result
        return await anyio.to_thread.run_sync(self._measure.prepared, result, self._room(), keep)

    def error(self, call_id: str, text: str) -> Answer:
        """A result that only says, in a short text, why there is none."""
        return self.measured(error_result(call_id, text))

    def measured(self, result: ToolResult) -> Answer:
        """A result without pictures, which is as quick as its text is short; others go through `prepare`."""
        return self._measure.of(result)

    def add_results(self, answers: Items[Answer]) -> list[ToolResult]:
        """Results of the last turn's calls, in call order, of all or some; they go into the log with the next `send`.

        Those that would not fit there together are cut to equal shares of the room, or become errors that say so; the
        results are returned as they were added.
        """
        added = self._measure.fitted_together(answers, self._room(), len(self.pending) - len(answers))
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

    @property
    def _measure(self) -> Measure:
        after_cut = self.log is not None and self.log.cut
        return Measure(self.runtime, self.thinking, "read_result" in self.tools.by_name, after_cut)

    def _room(self) -> int:
        """Tokens that results may take; it is below 0 when not even the reply has the room that it should have."""
        limit = self.runtime.context_length
        return limit - self._used - self._measure.tokens([]) - min(REPLY_ROOM, limit // 8)

    # Another past --------------------------------------------------------------------------------------------------

    def become(self, log: TokenLog, messages: list[Message]) -> None:
        """Go on with another log and its messages, compacted. Waits for nothing."""
        assert self.log is not None
        self.log.close()
        self.log, self.messages = log, messages
        self._write_head()

    def pictures(self) -> list[Patches]:
        """Those of the messages that a log has, in its order. Takes a while. Raises MediaError, ConversationError."""
        shown = [*self.head(), *chat_messages(self.logged, self.runtime.pixels)]
        segments = self.runtime.chat_format.render(shown, self.tools.head, self.thinking, False)
        return [patches for _, patches in chat.encode(segments, self.runtime.tokenizer).media]

    def take_up_log(self, sequence: Sequence, starts: list[int] | None) -> None:
        """Go on with a log that was saved with these messages."""
        self.log = TokenLog(sequence, self.runtime.tokenizer, starts)
        self._take_up()

    def rewind(self, to: int) -> None:
        """Keep the first `to` messages. Raises RuntimeClosed, SessionBusy, ConversationError."""
        if self._closed:
            raise RuntimeClosed("the session is closed")
        if to == len(self.messages):
            return
        kept = self.messages[:to]
        in_log = to - bool(kept and kept[-1].role == "tool")  # the last results wait again, as before they were sent
        if self.log is not None:
            log = self.log.first(in_log)
            self.log.close()
            self.log = log
        self.messages = kept
        self.tools.reread(kept)
        self._take_up()

    def _take_up(self) -> None:
        """The results at the end of the messages wait; without a log the other messages do so as well."""
        last = self.messages[-1] if self.messages else None
        results = last.results if last is not None and last.role == "tool" else []
        self._waiting = {result.call_id: result for result in results}
        self._restored = self.logged if self.log is None else []

    def _write_head(self) -> None:
        """The first message says what the head's tools are, so that messages alone are enough to go on with."""
        if self.messages[0].head_tools is None:
            self.messages[0] = self.messages[0].model_copy(update={"head_tools": self.tools.head})

    def fork(self) -> History:
        other = History(self.runtime, self.instructions, self.thinking, ())
        other.messages, other.calls, other.began = list(self.messages), self.calls, self.began
        other.tools = self.tools.copy()
        other.name = self.name
        other._restored, other._waiting = list(self._restored), dict(self._waiting)
        other._closed = self._closed
        other.log = None if self.log is None else self.log.fork()
        return other

    def close(self) -> None:
        self._closed = True
        if self.log is not None:
            self.log.close()
