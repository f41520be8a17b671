"""`RunStream`: one run of a session: the model's turns and the calls between them, pulled event by event.

There is no task behind a stream: each `__anext__` goes one step of the loop and leaves nothing running but the
engine's own generation, which stops within one step when the stream is left, cancelled or dropped. So a stream may be
abandoned at any point, and may be read and closed by different tasks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
from anyio.abc import TaskGroup

from m3agent.content import Content, Message, ToolCall, ToolResult, content_parts
from m3agent.errors import MediaError, SessionBusy, ToolError
from m3agent.events import Done, Event, Reply, Stop, ToolResultEvent, TurnFinished
from m3agent.history import CANCELLED, Answer, History
from m3agent.options import Limits, RunOptions
from m3agent.tools import Context
from m3agent.tools.arguments import clip
from m3agent.tools.execute import GRACE, call_tool
from m3agent.turn import TurnReader

if TYPE_CHECKING:
    from m3agent.runtime import TokenStream, Usage

PARALLEL_CALLS = 8


class RunStream:
    """Events of one run: `async with session.stream(…) as events: async for event in events: …`.

    Made by `Session.stream`; nothing happens before the first event is asked for. Leaving the block early stops the
    run: what was generated stays in the session, calls without a result get the result "cancelled", and the session
    can go on. Without the block the same happens as soon as the stream is dropped.
    """

    def __init__(self, history: History, busy: Busy, parts: tuple[Content, ...], options: RunOptions) -> None:
        sampling, turns = options.get("sampling"), options.get("max_turns")
        assert sampling is not None
        assert turns is not None
        self._limits = Limits(turns, options.get("max_tokens"))
        self._history = history
        self._busy = busy
        self._parts = parts
        self._sampling = sampling
        self._events: deque[Event] = deque()
        # Functions of the class, not bound methods: those would be a cycle, and keep a dropped stream alive.
        self._step: Callable[[RunStream], Awaitable[None]] | None = RunStream._start
        self._running: _Running | None = None  # while a step is on its way
        self._holds = False  # the session is ours
        self._began = False  # something was added to it; calls without results are this run's
        self._turn: TurnReader | None = None  # while one is being generated
        self._tokens: TokenStream | None = None
        self._exit = AsyncExitStack()
        self._first_message = 0
        self._turns = self._used = 0
        self._usage: Usage | None = None
        self._reply: Reply | None = None

    @property
    def reply(self) -> Reply:
        """What the run came to. Raises RuntimeError before `Done`."""
        if self._reply is None:
            raise RuntimeError("the run has not ended: read the stream to its end first")
        return self._reply

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        if self._running is not None:
            raise RuntimeError("another task is reading this stream")
        while not self._events:
            if self._step is None:
                raise StopAsyncIteration
            await self._advance(self._step)
        return self._events.popleft()

    async def aclose(self) -> None:
        """Stop the run, if it has not ended. From any task, also while another one reads; as often as you like."""
        if self._running is not None:
            running = self._running
            running.scope.cancel()
            await running.over.wait()
        await self._close()

    async def _advance(self, step: Callable[[RunStream], Awaitable[None]]) -> None:
        # The scope lives inside this one call, so it never crosses tasks; `aclose` of another task cancels it.
        with anyio.CancelScope() as scope:
            running = self._running = _Running(scope, anyio.Event())
            try:
                await step(self)
            except BaseException:
                await self._close()
                raise
            finally:
                self._running = None
                running.over.set()

    async def _close(self) -> None:
        if self._step is not None:
            self._step = None
            try:
                with anyio.CancelScope(shield=True):  # one step of the model at most
                    await self._exit.aclose()
            finally:
                self._stop()

    def __del__(self) -> None:
        if self._step is not None:
            self._step = None
            self._stop()

    def _stop(self) -> None:
        """Leave the session so that it can go on. Waits for nothing; a dropped token stream ends itself."""
        if not self._holds:
            return
        self._tokens = None
        if self._turn is not None:
            turn, self._turn = self._turn, None
            turn.finish()
            self._history.end_turn(turn.message())
        if self._began:
            self._answer_all(self._history.pending, CANCELLED)
        self._release()

    # The steps -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._busy.held:
            raise SessionBusy("this session runs already; wait for that run, or fork the session before")
        self._busy.held = self._holds = True
        self._sampling.check_stop(self._history.runtime.vocabulary)
        self._first_message = len(self._history.messages)
        parts = content_parts(self._parts)
        await self._send(Message(role="user", parts=parts) if parts else None)

    async def _send(self, message: Message | None) -> None:
        refused = await self._history.send(message)
        self._events.extend(ToolResultEvent(result) for result in refused)
        self._began = True
        self._turn = TurnReader(self._history)
        self._step = RunStream._open_turn

    async def _open_turn(self) -> None:
        left = None if self._limits.tokens is None else self._limits.tokens - self._used
        limits = [limit for limit in (left, self._sampling.max_tokens) if limit is not None]
        sampling = replace(self._sampling, max_tokens=min(limits, default=None))
        self._tokens = await self._exit.enter_async_context(self._history.generate(sampling))
        self._step = RunStream._read_token

    async def _read_token(self) -> None:
        assert self._tokens is not None
        assert self._turn is not None
        async for token in self._tokens:
            self._events.extend(self._turn.push(token.id))
            return
        self._step = RunStream._close_turn

    async def _close_turn(self) -> None:
        assert self._tokens is not None
        assert self._turn is not None
        await self._exit.aclose()
        tokens, turn = self._tokens, self._turn
        usage = tokens.usage
        self._events.extend(turn.finish())
        message = turn.message()
        self._history.end_turn(message)
        self._turn = self._tokens = None
        self._turns += 1
        self._used += usage.output_tokens
        self._usage = usage if self._usage is None else self._usage + usage
        self._events.append(TurnFinished(self._turns, message, usage))
        if tokens.finish == "length":
            self._answer_all(message.calls, "not run: the token limit was reached")
            self._end("tokens")
        elif not message.calls:
            self._end("end")
        else:
            self._step = RunStream._run_calls

    async def _run_calls(self) -> None:
        calls = self._history.messages[-1].calls
        contexts = [Context(call.name, call.id) for call in calls]
        answers: list[Answer | None] = [None] * len(calls)
        limiter = anyio.CapacityLimiter(PARALLEL_CALLS)
        broken: list[Exception] = []

        async def run(index: int, group: TaskGroup) -> None:
            try:
                async with limiter:
                    answers[index] = await self._answer(calls[index], contexts[index])
            except Exception as error:  # no tool's fault: it ends the run, and not as a group of one
                broken.append(error)
                group.cancel_scope.cancel()

        try:
            async with anyio.create_task_group() as group:
                for index in range(len(calls)):
                    group.start_soon(run, index, group)
            if broken:
                raise broken[0]
        finally:  # also when cancelled: every call has a result, or the next prompt would be out of order
            self._add(
                [
                    answer or self._history.error(call.id, _cancelled(context))
                    for call, context, answer in zip(calls, contexts, answers, strict=True)
                ]
            )
        if self._turns >= self._limits.turns:
            self._end("turns")
        elif self._limits.tokens is not None and self._used >= self._limits.tokens:
            self._end("tokens")
        else:
            self._step = RunStream._go_on

    async def _go_on(self) -> None:
        await self._send(None)

    # Their parts -----------------------------------------------------------------------------------------------

    async def _answer(self, call: ToolCall, context: Context) -> Answer:
        try:
            if call.damaged is not None:
                raise ToolError(call.damaged)
            parts = await call_tool(self._history.tools, call.name, call.arguments, context)
            result = ToolResult(call_id=call.id, parts=content_parts(parts))
            return await self._history.prepare(result)
        except (ToolError, MediaError) as error:
            return self._history.error(call.id, clip(str(error)))

    def _answer_all(self, calls: Sequence[ToolCall], text: str) -> None:
        if calls:
            self._add([self._history.error(call.id, text) for call in calls])

    def _add(self, answers: list[Answer]) -> None:
        self._events.extend(ToolResultEvent(result) for result in self._history.add_results(answers))

    def _end(self, stop: Stop) -> None:
        messages = tuple(self._history.messages[self._first_message :])
        last = next(message for message in reversed(messages) if message.role == "assistant")
        assert self._usage is not None
        self._reply = Reply(last.text, last.thinking, messages, self._usage, stop)
        self._events.append(Done(self._reply))
        self._step = None
        self._release()

    def _release(self) -> None:
        if self._holds:
            self._busy.held = self._holds = False


@dataclass(frozen=True)
class _Running:
    scope: anyio.CancelScope
    over: anyio.Event


@dataclass
class Busy:
    """Whether a run holds its session."""

    held: bool = False


def _cancelled(context: Context) -> str:
    if context.abandoned:
        return f"{CANCELLED}; the tool did not stop within {GRACE:.0f} s and was left running"
    return CANCELLED
