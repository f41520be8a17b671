"""`TurnLoop`: the steps of a run: the user's message, the model's turns, the calls between them, and the end.

Nothing runs between two steps but the engine's own generation, which stops within one step of the model when it is
left, and the calls of a turn, which are a background task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from m3agent import tracing
from m3agent.answers import Answer
from m3agent.approval import Decision, checked_decisions
from m3agent.calls import Calls
from m3agent.content import Message, Text, ToolCall, content_parts
from m3agent.errors import NoOutput, SessionBusy, ToolError
from m3agent.events import ApprovalNeeded, Done, Event, Reply, Stop, ToolResultEvent, TurnFinished
from m3agent.history import CANCELLED
from m3agent.hooks import called
from m3agent.make_room import make_room
from m3agent.output import ATTEMPTS, Output
from m3agent.run import Run, no_usage
from m3agent.turn import OpenTurn

if TYPE_CHECKING:
    from m3agent.runtime import Usage

OUT_OF_TIME = "cancelled: the time limit of the run was reached"
_LIMITS = {"tokens": "token", "cost": "cost"}


class TurnLoop:
    """`step` is what happens next, None at the end; `events` are what the steps so far gave."""

    def __init__(self, run: Run) -> None:
        sampling = run.options.get("sampling")
        assert sampling is not None
        # Functions of the class, not bound methods: those would be a cycle, and keep a dropped stream alive.
        self.step: Callable[[TurnLoop], Awaitable[None]] | None = TurnLoop._start
        self.events: deque[Event] = deque()
        self.reply: Reply[Any] | None = None
        self._run = run
        self._history = run.history
        self._limits = run.limits
        self._sampling = sampling
        self._message: Message | None = None  # the user's, until it was sent
        self._holds = False  # the session is ours
        self._began = False  # something was added to it; calls without results are this run's
        self._turn: OpenTurn | None = None  # while one is being generated
        self._cap: Stop = "tokens"  # what limits this turn's tokens
        self._calls: Calls | None = None  # while they run
        self._span: tracing.Span = None
        self._turns = 0
        self._answers = 0  # that did not fit the output's type
        self._value: Any = None
        self._usage = no_usage()

    @property
    def usage(self) -> Usage:
        """Of the turns and calls that are over."""
        return self._usage

    # Ending early ----------------------------------------------------------------------------------------------

    async def halt(self) -> None:
        """Whatever runs for this run ends; it takes one step of the model, or as long as cancelled tools do."""
        if self._calls is not None:
            await self._calls.background.end()
        if self._turn is not None:
            with anyio.CancelScope(shield=True):
                await self._turn.halt()

    def stop(self, error: BaseException | None = None) -> None:
        """Leave the session so that it can go on. Waits for nothing; a dropped token stream ends itself.

        error: what ended the run; None for a cancellation.
        """
        if not self._holds:
            return
        failure = tracing.failure_of(error)
        if self._turn is not None:
            self._end_turn(failure)
        self._drop_calls(CANCELLED)
        tracing.end_run(self._span, self._usage, None, failure)
        self._release()

    async def out_of_time(self) -> None:
        """End the run as one that has reached its time limit."""
        await self.halt()
        if self._turn is not None:
            self.events.append(self._end_turn(tracing.TIMEOUT))
        self._drop_calls(OUT_OF_TIME)
        self._end("seconds")

    # The steps -------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        if self._run.shared.held:
            raise SessionBusy("this session runs already; wait for that run, or fork the session before")
        self._run.shared.held = self._holds = True
        history = self._history
        self._span = tracing.start_run(history.runtime.name)
        self._sampling.check_stop(history.runtime.vocabulary)
        parts = content_parts(self._run.parts)
        if parts and self._run.output is not None:
            parts = (*parts, Text(text=self._run.output.request))
        self._message = Message(role="user", parts=parts) if parts else None
        approve = self._run.options.get("approve")
        decisions = checked_decisions(approve if isinstance(approve, Mapping) else {}, history.pending)
        # One message holds the results of a turn: those that come now join the ones that are there.
        completes = bool(history.pending) and history.messages[-1].role == "tool"
        history.began = len(history.messages) - completes
        if self._run.shared.left is not None:
            await self._run.shared.left.wait()
            self._run.shared.left = None
        if history.pending and (decisions or self._message is None):
            self._run_calls(history.pending, decisions, all_ask=True)
        else:
            await self._send()

    async def _send(self) -> None:
        rule = self._run.setup.compaction
        if rule is not None and self._history.fill >= rule.at:
            found = await make_room(self._history, rule, rule.at / 2, self._spend_summary)
            if found is not None:
                self.events.append(found)
        refused = await self._history.send(self._message)
        self._message = None
        self._began = True
        self.events.extend(ToolResultEvent(result) for result in refused)
        self._turn = OpenTurn(self._history)
        self.step = TurnLoop._open_turn

    async def _open_turn(self) -> None:
        assert self._turn is not None
        if (hook := self._run.setup.hooks.before_model) is not None:
            await called(hook, self._run.session)
        most, self._cap = self._limits.of_turn(self._usage, self._sampling.max_tokens)
        guide = None
        if self._run.setup.guided:
            guide = await self._history.guide(None if self._run.output is None else self._run.output.schema)
        priority = self._run.options.get("priority") or 0
        await self._turn.generate(replace(self._sampling, max_tokens=most), guide, priority, self._span)
        self.step = TurnLoop._read_token

    async def _read_token(self) -> None:
        assert self._turn is not None
        if (events := await self._turn.next()) is not None:
            self.events.extend(events)
            return
        self.step = TurnLoop._close_turn

    async def _close_turn(self) -> None:
        assert self._turn is not None
        await self._turn.halt()
        finish = self._turn.finish
        ended = self._end_turn()
        self.events.append(ended)
        if finish == "length":
            self._answer_all(ended.message.calls, f"not run: the {_LIMITS[self._cap]} limit was reached")
        self.step = TurnLoop._after_turn if finish != "length" else TurnLoop._after_cut
        await self._keep()
        if (hook := self._run.setup.hooks.after_model) is not None:
            await called(hook, self._run.session, ended.message, ended.usage)

    async def _after_turn(self) -> None:
        if calls := self._history.pending:
            self._run_calls(calls, {}, all_ask=False)
        elif self._run.output is None or self._read_answer(self._run.output):
            self._end("end")
        else:
            self.step = TurnLoop._send

    async def _after_cut(self) -> None:
        self._end(self._cap)

    def _run_calls(self, calls: Sequence[ToolCall], decisions: Mapping[str, Decision], all_ask: bool) -> None:
        surroundings = self._run.surroundings(decisions, all_ask, self._span)
        self._began = True
        self._calls = Calls(calls, self._history, surroundings)
        self.step = TurnLoop._read_calls

    async def _read_calls(self) -> None:
        assert self._calls is not None
        event = await self._calls.next()
        if event is not None:
            self.events.append(event)
            return
        answers = self._calls.answers()
        self._count_calls()
        self._add(answers)
        await self._keep()
        if self._history.pending and self._message is None:
            self.events.append(ApprovalNeeded(self._history.pending))
            self._end("approval")
        elif (stop := self._limits.reached(self._turns, self._usage)) is not None:
            self._end(stop)
        else:
            self.step = TurnLoop._send

    def _read_answer(self, output: Output[Any]) -> bool:
        """Whether the run may end; False asks the model for another answer."""
        try:
            self._value = output.read(self._history.messages[-1].text)
        except ToolError as error:
            self._answers += 1
            if self._answers < ATTEMPTS and self._limits.reached(self._turns, self._usage) is None:
                self._message = Message(role="user", parts=(Text(text=str(error)),))
                return False
            self._value = NoOutput(str(error))
        return True

    # Their parts -----------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        if (keep := self._run.setup.keep) is not None:
            await keep(self._history)

    def _end_turn(self, failure: str = tracing.CANCELLED) -> TurnFinished:
        """What was generated becomes the turn's message, whole or not; `failure` says why not, for its span."""
        assert self._turn is not None
        turn, self._turn = self._turn, None
        events, message, usage = turn.end(self._run.setup.trace_content, failure)
        self.events.extend(events)
        self._turns += 1
        self._spend(usage)
        return TurnFinished(self._turns, message, usage)

    def _spend(self, usage: Usage) -> None:
        self._usage += usage
        self._run.shared.spend(usage)

    def _spend_summary(self, usage: Usage) -> None:
        self._spend(usage)
        if self._limits.tokens is not None:  # that limit is one on turns
            self._limits = replace(self._limits, tokens=self._limits.tokens + usage.output_tokens)

    def _count_calls(self) -> None:
        if self._calls is not None:
            for spent in (replace(no_usage(), tool_seconds=self._calls.seconds), *self._calls.spent):
                self._spend(spent)
            self._calls = None

    def _drop_calls(self, reason: str) -> None:
        """Calls without a result get `reason` for one."""
        calls = self._calls
        if calls is not None:
            if not calls.background.over:
                calls.background.cancel()
                self._run.shared.left = calls.background
            self._count_calls()
            self._add(calls.cut(reason))
        elif self._began:
            self._answer_all(self._history.pending, reason)

    def _answer_all(self, calls: Sequence[ToolCall], text: str) -> None:
        self._add([self._history.error(call.id, text) for call in calls])

    def _add(self, answers: list[Answer]) -> None:
        if answers:
            self.events.extend(ToolResultEvent(result) for result in self._history.add_results(answers))

    def _end(self, stop: Stop) -> None:
        self.reply = self._run.reply(self._usage, stop, self._value)
        self.events.append(Done(self.reply))
        self.step = None
        tracing.end_run(self._span, self._usage, stop)
        self._release()

    def _release(self) -> None:
        if self._holds:
            self._run.shared.held = self._holds = False
