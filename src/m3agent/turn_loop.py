"""`TurnLoop`: the steps of a run: the user's message, the model's turns, the calls between them, and the end.

Nothing runs between two steps but the engine's own generation, which stops within one step of the model when it is
left, and the calls of a turn, which are a background task.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import anyio

from m3agent import tracing
from m3agent.answers import Answer
from m3agent.approval import Decision, checked_decisions
from m3agent.background import Background
from m3agent.calls import Calls, Surroundings
from m3agent.content import Content, Message, Text, ToolCall, content_parts
from m3agent.errors import NoOutput, SessionBusy, ToolError
from m3agent.events import ApprovalNeeded, Done, Event, Reply, Stop, ToolResultEvent, TurnFinished
from m3agent.history import CANCELLED, History
from m3agent.hooks import called
from m3agent.limits import Limits
from m3agent.make_room import make_room
from m3agent.options import RunOptions, Setup
from m3agent.output import ATTEMPTS, Output
from m3agent.turn import TurnReader

if TYPE_CHECKING:
    from m3agent.backend import TokenStream
    from m3agent.runtime import Usage

OUT_OF_TIME = "cancelled: the time limit of the run was reached"
_LIMITS = {"tokens": "token", "cost": "cost"}


class Shared:
    """What the runs of a session have in common. held: one of them holds the session. left: calls of a dropped stream
    that are still being cancelled. usage: of all runs so far.
    """

    def __init__(self) -> None:
        self.held = False
        self.left: Background | None = None
        self.usage = _no_usage()

    def spend(self, usage: Usage) -> None:
        self.usage += usage


@dataclass(frozen=True)
class Run:
    """What a run is made of. `session` is for tools and hooks."""

    session: Any
    history: History
    shared: Shared
    setup: Setup
    parts: tuple[Content, ...]
    options: RunOptions
    limits: Limits
    output: Output[Any] | None = None


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
        self._sampling = sampling
        self._message: Message | None = None  # the user's, until it was sent
        self._holds = False  # the session is ours
        self._began = False  # something was added to it; calls without results are this run's
        self._turn: TurnReader | None = None  # while one is being generated
        self._tokens: TokenStream | None = None
        self._cap: Stop = "tokens"  # what limits this turn's tokens
        self._calls: Calls | None = None  # while they run
        self._exit = AsyncExitStack()
        self._span = self._turn_span = None  # of tracing
        self._turns = 0
        self._answers = 0  # that did not fit the output's type
        self._value: Any = None
        self._usage = _no_usage()

    @property
    def usage(self) -> Usage:
        """Of the turns and calls that are over."""
        return self._usage

    # Ending early ----------------------------------------------------------------------------------------------

    async def halt(self) -> None:
        """Whatever runs for this run ends; it takes one step of the model, or as long as cancelled tools do."""
        if self._calls is not None:
            await self._calls.background.end()
        with anyio.CancelScope(shield=True):
            await self._exit.aclose()

    def stop(self) -> None:
        """Leave the session so that it can go on. Waits for nothing; a dropped token stream ends itself."""
        if not self._holds:
            return
        if self._turn is not None:
            self._end_turn()
        self._drop_calls(CANCELLED)
        tracing.end_run(self._span, self._usage, None)
        self._release()

    async def out_of_time(self) -> None:
        """End the run as one that has reached its time limit."""
        await self.halt()
        if self._turn is not None:
            self.events.append(self._end_turn())
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
            found = await make_room(self._history, rule, rule.at / 2, self._spend)
            if found is not None:
                self.events.append(found)
        refused = await self._history.send(self._message)
        self._message = None
        self._began = True
        self.events.extend(ToolResultEvent(result) for result in refused)
        self._turn = TurnReader(self._history)
        self.step = TurnLoop._open_turn

    async def _open_turn(self) -> None:
        if (hook := self._run.setup.hooks.before_model) is not None:
            await called(hook, self._run.session)
        most, self._cap = self._run.limits.of_turn(self._usage, self._sampling.max_tokens)
        guide = None
        if self._run.setup.guided:
            guide = await self._history.guide(None if self._run.output is None else self._run.output.schema)
        tokens = self._history.generate(replace(self._sampling, max_tokens=most), guide)
        self._turn_span = tracing.start_turn(self._span, self._history.runtime.name, tokens.sampling)
        self._tokens = await self._exit.enter_async_context(tokens)
        self.step = TurnLoop._read_token

    async def _read_token(self) -> None:
        assert self._tokens is not None
        assert self._turn is not None
        async for token in self._tokens:
            self.events.extend(self._turn.push(token.id))
            return
        self.step = TurnLoop._close_turn

    async def _close_turn(self) -> None:
        assert self._tokens is not None
        await self._exit.aclose()
        finish = self._tokens.finish
        ended = self._end_turn()
        self.events.append(ended)
        if finish == "length":
            self._answer_all(ended.message.calls, f"not run: the {_LIMITS[self._cap]} limit was reached")
        self.step = TurnLoop._after_turn if finish != "length" else TurnLoop._after_cut
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
        run, approve = self._run, self._run.options.get("approve")
        if isinstance(approve, Mapping):  # the decisions of now; about later calls the agent's callback is asked
            approve = run.setup.defaults.get("approve")
        assert not isinstance(approve, Mapping)
        surroundings = Surroundings(
            run.session,
            self._run.options.get("deps"),
            run.setup.hooks,
            approve,
            decisions,
            all_ask,
            self._span,
            run.setup.trace_content,
        )
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
        if self._history.pending and self._message is None:
            self.events.append(ApprovalNeeded(self._history.pending))
            self._end("approval")
        elif (stop := self._run.limits.reached(self._turns, self._usage)) is not None:
            self._end(stop)
        else:
            self.step = TurnLoop._send

    def _read_answer(self, output: Output[Any]) -> bool:
        """Whether the run may end; False asks the model for another answer."""
        try:
            self._value = output.read(self._history.messages[-1].text)
        except ToolError as error:
            self._answers += 1
            if self._answers < ATTEMPTS and self._run.limits.reached(self._turns, self._usage) is None:
                self._message = Message(role="user", parts=(Text(text=str(error)),))
                return False
            self._value = NoOutput(str(error))
        return True

    # Their parts -----------------------------------------------------------------------------------------------

    def _end_turn(self) -> TurnFinished:
        """What was generated becomes the turn's message, whole or not."""
        assert self._turn is not None
        turn, self._turn = self._turn, None
        tokens, self._tokens = self._tokens, None
        self.events.extend(turn.finish())
        message = turn.message()
        self._history.end_turn(message)
        self._turns += 1
        usage = _no_usage() if tokens is None else tokens.usage
        self._spend(usage)
        finish, content = None if tokens is None else tokens.finish, self._run.setup.trace_content
        tracing.end_turn(self._turn_span, usage, finish, message, content)
        return TurnFinished(self._turns, message, usage)

    def _spend(self, usage: Usage) -> None:
        self._usage += usage
        self._run.shared.spend(usage)

    def _count_calls(self) -> None:
        if self._calls is not None:
            for spent in (replace(_no_usage(), tool_seconds=self._calls.seconds), *self._calls.spent):
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
        messages = tuple(self._history.messages[self._history.began :])
        said = [message for message in messages if message.role == "assistant"]
        text, thinking = (said[-1].text, said[-1].thinking) if said else ("", "")
        if stop != "end" and self._run.output is not None:
            self._value = NoOutput(f"the run ended before an answer: {stop}")
        cost = self._run.limits.cost_of(self._usage)
        self.reply = Reply(text, thinking, messages, self._usage, stop, cost, self._value)
        self.events.append(Done(self.reply))
        self.step = None
        tracing.end_run(self._span, self._usage, stop)
        self._release()

    def _release(self) -> None:
        if self._holds:
            self._run.shared.held = self._holds = False


def _no_usage() -> Usage:
    from m3agent.runtime.usage import Usage  # imports torch, so not before a runtime is open

    return Usage()
