"""`RunStream`: one run of a session: the model's turns and the calls between them, pulled event by event.

Each `__anext__` goes one step of the loop. Between two of them nothing runs but the engine's own generation, which
stops within one step when the stream is left, and the calls of a turn, which are a background task that the stream
cancels and waits for. So a stream may be abandoned at any point, and may be read and closed by different tasks.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import anyio

from m3agent.approval import checked_decisions
from m3agent.background import Background
from m3agent.calls import Calls, Surroundings
from m3agent.content import Content, Message, ToolCall, content_parts
from m3agent.errors import SessionBusy
from m3agent.events import ApprovalNeeded, Done, Event, Reply, Stop, ToolResultEvent, TurnFinished
from m3agent.history import CANCELLED, Answer, History
from m3agent.hooks import called
from m3agent.limits import Limits
from m3agent.options import RunOptions, Setup
from m3agent.turn import TurnReader

if TYPE_CHECKING:
    from m3agent.runtime import TokenStream, Usage

OUT_OF_TIME = "cancelled: the time limit of the run was reached"


@dataclass
class Busy:
    """Whether a run holds its session, and calls of a dropped stream that are still being cancelled."""

    held: bool = False
    left: Background | None = None


@dataclass(frozen=True)
class Run:
    """What a stream is made of. `session` is for tools and hooks."""

    session: Any
    history: History
    busy: Busy
    setup: Setup
    parts: tuple[Content, ...]
    options: RunOptions
    limits: Limits


class RunStream:
    """Events of one run: `async with session.stream(…) as events: async for event in events: …`.

    Made by `Session.stream`; nothing happens before the first event is asked for. Leaving the block early stops the
    run: what was generated stays in the session, calls without a result get the result "cancelled", and the session
    can go on. Without the block the same happens as soon as the stream is dropped; tools that are cancelled by that may
    still be in their `finally` blocks, and the session's next run waits for them.
    """

    def __init__(self, run: Run) -> None:
        sampling = run.options.get("sampling")
        assert sampling is not None
        self._run = run
        self._limits = run.limits
        self._options = run.options
        self._sampling = sampling
        self._history = run.history
        self._busy = run.busy
        self._message: Message | None = None  # the user's, until it was sent
        self._events: deque[Event] = deque()
        # Functions of the class, not bound methods: those would be a cycle, and keep a dropped stream alive.
        self._step: Callable[[RunStream], Awaitable[None]] | None = RunStream._start
        self._running: _Running | None = None  # while a step is on its way
        self._deadline = math.inf
        self._holds = False  # the session is ours
        self._began = False  # something was added to it; calls without results are this run's
        self._turn: TurnReader | None = None  # while one is being generated
        self._tokens: TokenStream | None = None
        self._cap: Stop = "tokens"  # what limits this turn's tokens
        self._calls: Calls | None = None  # while they run
        self._exit = AsyncExitStack()
        self._first_message = 0
        self._turns = 0
        self._usage = _no_usage()
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
        if self._limits.seconds is not None and self._step is RunStream._start:
            self._deadline = anyio.current_time() + self._limits.seconds
        while not self._events:
            if self._step is None:
                raise StopAsyncIteration
            await self._advance(self._step, self._deadline)
        event = self._events.popleft()
        if (tell := self._options.get("on_event")) is not None:
            await self._advance(lambda _: called(tell, event), math.inf)
        return event

    async def aclose(self) -> None:
        """Stop the run, if it has not ended. From any task, also while another one reads; as often as you like."""
        if self._running is not None:
            running = self._running
            running.closed = True
            running.scope.cancel()
            await running.over.wait()
        elif self._step is not None:
            await self._advance(RunStream._close, math.inf)

    async def _advance(self, step: Callable[[RunStream], Awaitable[None]], deadline: float) -> None:
        # The scope lives inside this one call, so it never crosses tasks; `aclose` of another task cancels it.
        with anyio.CancelScope(deadline=deadline) as scope:
            running = self._running = _Running(scope, anyio.Event())
            try:
                await step(self)
            except BaseException as error:
                try:
                    late = isinstance(error, anyio.get_cancelled_exc_class()) and anyio.current_time() >= deadline
                    if late and not running.closed:
                        await self._out_of_time()
                finally:
                    await self._close()
                raise
            finally:
                self._running = None
                running.over.set()

    async def _close(self) -> None:
        if self._step is not None:
            self._step = None
            try:
                await self._halt()
            finally:
                self._stop()

    async def _halt(self) -> None:
        """Whatever runs for this stream ends; it takes one step of the model, or as long as cancelled tools do."""
        if self._calls is not None:
            await self._calls.background.end()
        with anyio.CancelScope(shield=True):
            await self._exit.aclose()

    def __del__(self) -> None:
        if self._step is not None:
            self._step = None
            self._stop()

    def _stop(self) -> None:
        """Leave the session so that it can go on. Waits for nothing; a dropped token stream ends itself."""
        if not self._holds:
            return
        if self._turn is not None:
            self._end_turn()
        self._drop_calls(CANCELLED)
        self._release()

    # The steps -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._busy.held:
            raise SessionBusy("this session runs already; wait for that run, or fork the session before")
        self._busy.held = self._holds = True
        history = self._history
        self._sampling.check_stop(history.runtime.vocabulary)
        parts = content_parts(self._run.parts)
        self._message = Message(role="user", parts=parts) if parts else None
        approve = self._options.get("approve")
        decisions = checked_decisions(approve if isinstance(approve, Mapping) else {}, history.pending)
        # One message holds the results of a turn: those that come now join the ones that are there.
        completes = bool(history.pending) and history.messages[-1].role == "tool"
        self._first_message = len(history.messages) - completes
        if self._busy.left is not None:
            await self._busy.left.wait()
            self._busy.left = None
        if history.pending and (decisions or self._message is None):
            self._run_calls(history.pending, decisions, all_ask=True)
        else:
            await self._send()

    async def _send(self) -> None:
        refused = await self._history.send(self._message)
        self._message = None
        self._began = True
        self._events.extend(ToolResultEvent(result) for result in refused)
        self._turn = TurnReader(self._history)
        self._step = RunStream._open_turn

    async def _open_turn(self) -> None:
        if (hook := self._run.setup.hooks.before_model) is not None:
            await called(hook, self._run.session)
        most, self._cap = self._limits.of_turn(self._usage, self._sampling.max_tokens)
        tokens = self._history.generate(replace(self._sampling, max_tokens=most))
        self._tokens = await self._exit.enter_async_context(tokens)
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
        await self._exit.aclose()
        finish = self._tokens.finish
        ended = self._end_turn()
        self._events.append(ended)
        if finish == "length":
            self._answer_all(ended.message.calls, f"not run: the {_LIMITS[self._cap]} limit was reached")
        self._step = RunStream._after_turn if finish != "length" else RunStream._after_cut
        if (hook := self._run.setup.hooks.after_model) is not None:
            await called(hook, self._run.session, ended.message, ended.usage)

    async def _after_turn(self) -> None:
        if calls := self._history.pending:
            self._run_calls(calls, {}, all_ask=False)
        else:
            self._end("end")

    async def _after_cut(self) -> None:
        self._end(self._cap)

    def _run_calls(self, calls: Sequence[ToolCall], decisions: Mapping[str, bool | str], all_ask: bool) -> None:
        run, approve = self._run, self._options.get("approve")
        if isinstance(approve, Mapping):  # the decisions of now; about later calls the agent's callback is asked
            approve = run.setup.defaults.get("approve")
        assert not isinstance(approve, Mapping)
        surroundings = Surroundings(
            run.session, self._options.get("deps"), run.setup.hooks, approve, decisions, all_ask
        )
        self._began = True
        self._calls = Calls(calls, self._history, surroundings)
        self._step = RunStream._read_calls

    async def _read_calls(self) -> None:
        assert self._calls is not None
        event = await self._calls.next()
        if event is not None:
            self._events.append(event)
            return
        answers = self._calls.answers()
        self._count_calls()
        self._add(answers)
        if self._history.pending and self._message is None:
            self._events.append(ApprovalNeeded(self._history.pending))
            self._end("approval")
        elif (stop := self._limits.reached(self._turns, self._usage)) is not None:
            self._end(stop)
        else:
            self._step = RunStream._send

    # Their parts -----------------------------------------------------------------------------------------------

    def _end_turn(self) -> TurnFinished:
        """What was generated becomes the turn's message, whole or not."""
        assert self._turn is not None
        turn, self._turn = self._turn, None
        tokens, self._tokens = self._tokens, None
        self._events.extend(turn.finish())
        message = turn.message()
        self._history.end_turn(message)
        self._turns += 1
        usage = _no_usage() if tokens is None else tokens.usage
        self._usage += usage
        return TurnFinished(self._turns, message, usage)

    def _count_calls(self) -> None:
        if self._calls is not None:
            self._usage += replace(_no_usage(), tool_seconds=self._calls.seconds)
            self._calls = None

    def _drop_calls(self, reason: str) -> None:
        """Calls without a result get `reason` for one."""
        calls = self._calls
        if calls is not None:
            if not calls.background.over:
                calls.background.cancel()
                self._busy.left = calls.background
            self._count_calls()
            self._add(calls.cut(reason))
        elif self._began:
            self._answer_all(self._history.pending, reason)

    async def _out_of_time(self) -> None:
        await self._halt()
        if self._turn is not None:
            self._events.append(self._end_turn())
        self._drop_calls(OUT_OF_TIME)
        self._end("seconds")

    def _answer_all(self, calls: Sequence[ToolCall], text: str) -> None:
        self._add([self._history.error(call.id, text) for call in calls])

    def _add(self, answers: list[Answer]) -> None:
        if answers:
            self._events.extend(ToolResultEvent(result) for result in self._history.add_results(answers))

    def _end(self, stop: Stop) -> None:
        messages = tuple(self._history.messages[self._first_message :])
        said = [message for message in messages if message.role == "assistant"]
        text, thinking = (said[-1].text, said[-1].thinking) if said else ("", "")
        self._reply = Reply(text, thinking, messages, self._usage, stop, self._limits.cost_of(self._usage))
        self._events.append(Done(self._reply))
        self._step = None
        self._release()

    def _release(self) -> None:
        if self._holds:
            self._busy.held = self._holds = False


@dataclass
class _Running:
    scope: anyio.CancelScope
    over: anyio.Event
    closed: bool = False


_LIMITS = {"tokens": "token", "cost": "cost"}


def _no_usage() -> Usage:
    from m3agent.runtime.usage import Usage  # imports torch, so not before a runtime is open

    return Usage()
