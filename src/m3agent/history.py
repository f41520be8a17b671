"""`History`: a session's messages and its token log. Both only grow, and what belongs together enters together.

Everything that can fail or wait (decoding a picture, cutting it into patches, tokenising) is done before, in a thread;
the entering itself waits for nothing, so a cancellation finds either all of a message or nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from m3agent import chat
from m3agent.chat import ChatCall, ChatMessage, MediaPart, Prompt, markers
from m3agent.chat.messages import Thinking
from m3agent.content import Message, Text, ToolCall, ToolResult
from m3agent.errors import ContextOverflow, ConversationError, MediaError, RuntimeClosed, ToolError
from m3agent.media import Image, Video
from m3agent.tools import Tool

if TYPE_CHECKING:
    from m3agent.media.pixels import PixelSpec
    from m3agent.runtime import Guide, Runtime, Sampling, Sequence, TokenStream

CANCELLED = "cancelled"
NOT_APPROVED = "not approved"
REPLY_ROOM = 1024  # tokens at most that results leave for the reply to them, and an eighth of the context


@dataclass(frozen=True)
class Answer:
    """The result of a call: what the program sees, what the model sees, and the tokens that this takes in the log."""

    result: ToolResult
    message: ChatMessage
    tokens: int


class History:
    def __init__(
        self,
        runtime: Runtime,
        instructions: str | None,
        thinking: Thinking,
        tools: Iterable[Tool[..., Any]],
        messages: Items[Message] = (),
    ) -> None:
        self.runtime = runtime
        self.thinking: Thinking = thinking
        self.tools = {tool.name: tool for tool in tools}
        self.messages = _complete(messages)
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
        self._enter(refused)
        self._waiting, self._restored, self._cut = {}, [], True
        if message is not None:
            self.messages.append(message)
        return [answer.result for answer in refused]

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
        self._cut = self.tokens[-1] != self.runtime.tokenizer.control_id(markers.END)

    async def prepare(self, result: ToolResult) -> Answer:
        """A result, its pictures decoded and cut into patches. Raises MediaError, ToolError for one that is absurdly
        long.
        """
        return await anyio.to_thread.run_sync(self._prepared, result)

    def error(self, call_id: str, text: str) -> Answer:
        """A result that only says, in a short text, why there is none."""
        return self._measured(error_result(call_id, text))

    def add_results(self, answers: Items[Answer]) -> list[ToolResult]:
        """Results of the last turn's calls, in call order, of all or some; they go into the log with the next `send`.

        One that would not fit there becomes an error that says so; the results are returned as they were added.
        """
        room = self._room()
        short = self.error("", _too_long(f"{room}", room)).tokens
        room -= short * (len(self.pending) - len(answers))
        later = sum(min(answer.tokens, short) for answer in answers)
        added: list[Answer] = []
        for answer in answers:
            later -= min(answer.tokens, short)
            if answer.tokens > max(room - later, short):
                answer = self.error(answer.result.call_id, _too_long(f"{answer.tokens}", room - later))
            room -= answer.tokens
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
        added = [part.message if isinstance(part, Answer) else _result_message(part, spec) for part in answers]
        added += _chat([message], spec) if message is not None else []
        if self._sequence is not None:
            segments = self.runtime.chat_format.render_next(added, self.thinking, after_cut=self._cut)
        else:
            head = [ChatMessage("developer", [self._instructions])] if self._instructions else []
            restored = _chat(self._restored, spec)
            segments = self.runtime.chat_format.render([*head, *restored, *added], self.definitions, self.thinking)
        texts = "".join(segment.text for segment in segments if isinstance(segment, chat.Text))
        limit = self.runtime.context_length
        if self.runtime.tokenizer.exceeds(texts, limit):
            raise ContextOverflow(f"a prompt of {len(texts)} characters is far beyond the context of {limit} tokens")
        return chat.encode(segments, self.runtime.tokenizer)

    def _prepared(self, result: ToolResult) -> Answer:
        """Runs in a thread."""
        limit = self.runtime.context_length
        if self.runtime.tokenizer.exceeds(result.text, limit):
            raise ToolError(_too_long(f"over {limit}", self._room()))
        return self._measured(result)

    def _measured(self, result: ToolResult) -> Answer:
        message = _result_message(result, self.runtime.pixels)
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


def error_result(call_id: str, text: str) -> ToolResult:
    return ToolResult(call_id=call_id, parts=(Text(text=text),), error=True)


def _too_long(tokens: str, room: int) -> str:
    return f"the result has {tokens} tokens; there is room for {max(room, 0)}"


def _chat(messages: Iterable[Message], spec: PixelSpec | None) -> list[ChatMessage]:
    found: list[ChatMessage] = []
    for message in messages:
        if message.role == "tool":
            found += [_result_message(result, spec) for result in message.results]
        elif message.role == "assistant":
            # A call too damaged to have a name still has a result, which must not lose its place.
            calls = [ChatCall(call.name or "unreadable", call.arguments) for call in message.calls]
            found.append(ChatMessage("assistant", [message.text], message.thinking or None, calls))
        else:
            found.append(ChatMessage("user", _chat_parts(message.parts, spec)))
    return found


def _result_message(result: ToolResult, spec: PixelSpec | None) -> ChatMessage:
    return ChatMessage("tool", _chat_parts(result.parts, spec))


def _chat_parts(parts: Iterable[Any], spec: PixelSpec | None) -> list[str | MediaPart]:
    found: list[str | MediaPart] = []
    for part in parts:
        if isinstance(part, Image | Video):
            found.append(_media_part(part, spec))
        elif isinstance(part, Text):
            found.append(part.text)
    return found


def _media_part(media: Image | Video, spec: PixelSpec | None) -> MediaPart:
    if spec is None:
        raise MediaError("this model has no vision tower: it reads text alone")
    from m3agent.media.pixels import image_patches, video_patches  # imports torch, so not before a model is open

    media.load()
    if isinstance(media, Image):
        return MediaPart(image_patches(media.rgb, spec))
    return MediaPart(video_patches(media.frames, media.timestamps, spec))


def _complete(messages: Items[Message]) -> list[Message]:
    """Messages to start from, checked. Calls at their end may lack results: they are pending."""
    checked = list(messages)
    called: list[str] = []
    for index, message in enumerate(checked):
        answered = [result.call_id for result in message.results]
        last = index == len(checked) - 1
        if answered != ([call for call in called if call in answered] if last and message.role == "tool" else called):
            raise ConversationError(f"the calls {called} need results in this order, the messages have {answered}")
        called = [call.id for call in message.calls]
        if len(set(called)) < len(called):
            raise ConversationError(f"the calls of one turn need ids that differ, not {called}")
    return checked
