"""`Calls`: the calls of one turn, run side by side in the background, with their events as they come.

It holds nothing of the stream that reads it, and changes nothing of the history: the stream takes the answers when
all of them are there, or those that are there when it is left.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from m3agent import tracing
from m3agent.answers import Answer, error_result
from m3agent.approval import Approve, Decision, ask, needs_approval, refuse
from m3agent.background import Background
from m3agent.content import ToolCall, ToolResult, content_parts
from m3agent.errors import MediaError, ToolError
from m3agent.events import ToolFinished, ToolProgress
from m3agent.history import CANCELLED, History
from m3agent.hooks import Hooks, called, changed_call, result_of
from m3agent.mailbox import Mailbox
from m3agent.tools import Context
from m3agent.tools.arguments import clip
from m3agent.tools.execute import GRACE, call_tool

if TYPE_CHECKING:
    from m3agent.runtime import Usage

PARALLEL_CALLS = 8
UNREAD_PROGRESS = 1000  # values that wait for a reader; beyond, further ones are dropped


@dataclass(frozen=True)
class Surroundings:
    """What the calls of a run share.

    decisions: of calls that were asked about before. all_ask: no call runs without a decision, whatever its tool says.
    """

    session: Any
    deps: Any
    hooks: Hooks
    approve: Approve | None
    decisions: Mapping[str, Decision]
    all_ask: bool
    span: tracing.Span = None
    trace_content: bool = False


class Calls:
    def __init__(self, calls: Sequence[ToolCall], history: History, surroundings: Surroundings) -> None:
        self._events = _Events()
        self.seconds = 0.0
        self._calls = calls
        self._history = history
        self._given = surroundings
        self._contexts = [self._context(call) for call in calls]
        self._answers: list[Answer | None] = [None] * len(calls)
        self._undecided: set[int] = set()
        self._limiter = anyio.CapacityLimiter(PARALLEL_CALLS)
        self._error: BaseException | None = None
        self.background = Background(self._run)

    async def next(self) -> ToolProgress | ToolFinished | None:
        """The next event, None after the last one. Raises what ended the calls, if it was no tool's fault."""
        event = await self._events.get()
        if event is None:
            await self.background.wait()
            error = self._error or self.background.error
            if error is not None:
                raise error
        return event

    @property
    def spent(self) -> list[Usage]:
        """What agents used that ran inside the calls."""
        return [usage for context in self._contexts for usage in context.spent]

    def answers(self) -> list[Answer]:
        """When all are over, one for each call but those that nobody has decided about."""
        return [self._answer_to(index, CANCELLED) for index in range(len(self._calls)) if index not in self._undecided]

    def cut(self, reason: str) -> list[Answer]:
        """One for every call: calls that have none so far get `reason`."""
        return [self._answer_to(index, reason) for index in range(len(self._calls))]

    def _answer_to(self, index: int, reason: str) -> Answer:
        answer, context = self._answers[index], self._contexts[index]
        if context.abandoned:
            reason += f"; the tool did not stop within {GRACE:.0f} s and was left running"
        return answer or self._history.error(self._calls[index].id, reason)

    # In the background ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        began = time.perf_counter()
        try:
            async with anyio.create_task_group() as group:
                await self._guarded(group, self._begin, group)
        finally:
            self.seconds = time.perf_counter() - began
            self._events.put(None)

    async def _guarded(self, group: TaskGroup, step: Callable[..., Awaitable[None]], *arguments: Any) -> None:
        try:
            await step(*arguments)
        except (anyio.get_cancelled_exc_class(), GeneratorExit):
            raise
        except BaseException as error:  # no tool's fault, or beyond what a tool may raise: it ends the run as it is
            self._error = self._error or error
            group.cancel_scope.cancel()

    async def _begin(self, group: TaskGroup) -> None:
        """Start what may run at once; then ask about the others, one question at a time and in call order."""
        asking: list[int] = []
        for index, call in enumerate(self._calls):
            with self._told(index):
                if await self._asks(call):
                    asking.append(index)
                else:
                    group.start_soon(self._guarded, group, self._call, index)
        for index in asking:
            with self._told(index):
                if await self._approved(index):
                    group.start_soon(self._guarded, group, self._call, index)
                else:
                    self._undecided.add(index)

    async def _call(self, index: int) -> None:
        async with self._limiter:
            began = time.perf_counter()
            call, given = self._calls[index], self._given
            with self._told(index, began), tracing.tool(given.span, call, given.trace_content) as span:
                result = await self._result(call, self._contexts[index])
                span.result(result)
                self._finish(index, await self._history.prepare(result), began)

    @contextmanager
    def _told(self, index: int, began: float | None = None) -> Generator[None]:
        """What goes wrong in one call is its answer."""
        try:
            yield
        except (ToolError, MediaError) as error:
            self._finish(index, self._history.error(self._calls[index].id, clip(str(error))), began)

    def _finish(self, index: int, answer: Answer, began: float | None) -> None:
        self._answers[index] = answer
        seconds = 0.0 if began is None else time.perf_counter() - began
        self._events.put(ToolFinished(answer.result, seconds))

    async def _asks(self, call: ToolCall) -> bool:
        """Whether a decision is needed. Raises ToolError for a call that cannot run: nobody is asked about it."""
        if call.damaged is not None:
            raise ToolError(call.damaged)
        return await needs_approval(self._history.tools.by_name.get(call.name), call) or self._given.all_ask

    async def _approved(self, index: int) -> bool:
        """False for a call that nobody has decided about. Raises ToolError for one that was refused."""
        call = self._calls[index]
        decision = self._given.decisions.get(call.id)
        if decision is None and self._given.approve is not None:
            decision = await ask(self._given.approve, call, self._contexts[index])
        if decision is None:
            return False
        refuse(decision)
        return True

    async def _result(self, call: ToolCall, context: Context) -> ToolResult:
        hooks = self._given.hooks
        if hooks.before_tool is not None:
            changed = await called(hooks.before_tool, call, context)
            if isinstance(changed, ToolCall):
                call = changed_call(call, changed)
            elif changed is not None:
                return result_of(call, changed, "before_tool")
        try:
            parts = await call_tool(self._history.tools.by_name, call.name, call.arguments, context)
            result = ToolResult(call_id=call.id, parts=content_parts(parts))
        except ToolError as error:
            result = error_result(call.id, clip(str(error)))
        if hooks.after_tool is not None:
            changed = await called(hooks.after_tool, call, result, context)
            if changed is not None:
                return result_of(call, changed, "after_tool")
        return result

    def _context(self, call: ToolCall) -> Context:
        # Of the events alone: a context that held these calls would be a cycle, and keep the session's tools alive.
        events = self._events

        def report(value: Any) -> None:
            events.report(ToolProgress(call.id, value))

        return Context(call.name, call.id, deps=self._given.deps, session=self._given.session, on_progress=report)


class _Events:
    """What happened, until it is read; None is the end. Progress that nobody reads does not pile up."""

    def __init__(self) -> None:
        self._mailbox: Mailbox[ToolProgress | ToolFinished | None] = Mailbox()
        self._unread = 0
        self.put = self._mailbox.put

    def report(self, event: ToolProgress) -> None:
        """May be called from a tool's thread."""
        if self._unread < UNREAD_PROGRESS:
            self._unread += 1
            self._mailbox.put(event)

    async def get(self) -> ToolProgress | ToolFinished | None:
        event = await self._mailbox.get()
        if isinstance(event, ToolProgress):
            self._unread -= 1
        return event
