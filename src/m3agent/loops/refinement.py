"""`refine`: the model writes code, sees the picture that comes of it, and goes on until a rule says stop."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from m3agent.content import Content, Text, ToolCall, ToolResult, content_parts
from m3agent.errors import RenderError
from m3agent.events import CallFinished, Done, Event, ToolResultEvent, TurnFinished
from m3agent.loops.checks import Check, judge
from m3agent.loops.record import Refinement, Step, Verdict, best_of
from m3agent.loops.stop import Stop, StopRule
from m3agent.loops.tool import declare, shown
from m3agent.media.image import Image
from m3agent.render.renderer import Renderer, Rendering, as_renderer, drawing
from m3agent.tools import Context, Tool

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage
    from m3agent.session import Session

_ENDED = {"end": "answered", "turns": "rounds", "tokens": "tokens"}

# A greedy model repeats itself; a second attempt has to differ. Mild, since each number of a drawing has to be right.
_TEMPERATURE, _TOP_P = 0.7, 0.98


async def refine(
    session: Session,
    goal: Content | Sequence[Content],
    *,
    render: Renderer | Callable[[str], Any],
    checks: Sequence[Check] = (),
    stop: StopRule | None = None,
    max_rounds: int = 8,
    attempts: int = 1,
    pictures: bool = True,
    on_event: Callable[[Event | Step], Any] | None = None,
) -> Refinement:
    """Let the session's model write code for `goal`, look at its render, and correct it; return the best of it.

    The session must not have had a turn yet: it is given one tool, `render(code)`, whose result is the picture, or
    the reason why there is none. Each call is a step. The loop ends when the model answers without a call, when
    `stop` says so, or after `max_rounds` steps; the session can go on in each case.

    A model that overlooked something once tends to overlook it again, since its own draft is what it reads. With
    `attempts` over 1, a model that answers, or writes a draft for the second time, before the checks are content
    begins anew with fresh eyes: on a fork of the session as it was before the goal, sampled instead of greedy.

    Args:
        goal: what to arrive at, in words and pictures.
        render: a `Renderer` such as `SvgRenderer()`, or a function from code to picture. Never on the event loop.
        checks: what scores each render, such as `PixelMatch(target)`; functions from picture to bool or score do too.
        stop: `Stop(…)`, by default one that ends at the first picture that all checks accept.
        max_rounds: steps at most, all attempts together.
        attempts: how often the model may begin. The session itself keeps the first attempt.
        pictures: False withholds every picture from the model, the goal's and the renders: what they are worth
            is the difference that this makes.
        on_event: called (and awaited, if it returns an awaitable) with each event of the session and each finished
            `Step`, as they happen.

    Raises:
        ValueError: a goal without words while pictures are withheld, or `max_rounds` or `attempts` under 1.
        Whatever a check or `on_event` raises, and what the session raises.
    """
    for name, number in (("max_rounds", max_rounds), ("attempts", attempts)):
        if number < 1:
            raise ValueError(f"{name} is {number}; at least one is needed")
    rule = Stop() if stop is None else stop
    desk = _Desk(as_renderer(render), checks, pictures)
    parts = _goal_parts(goal, pictures)
    session.add_tool(desk.tool())
    log = _Log(desk, on_event)
    seconds = rule.seconds if isinstance(rule, Stop) else None
    stopped = "seconds"
    if not checks:
        attempts = 1  # nothing could be wrong with the first
    begin = session.fork() if attempts > 1 else session  # the goal is not in it yet
    try:
        with anyio.move_on_after(seconds) as limit:
            stopped = await _attempt(session, parts, rule, log, max_rounds, last=attempts == 1)
            while stopped in ("answered", "repeated") and log.attempt + 1 < attempts:
                log.attempt += 1
                async with begin.fork() as again:
                    last = log.attempt + 1 == attempts
                    stopped = await _attempt(again, parts, rule, log, max_rounds, last=last)
        if limit.cancelled_caught:  # in whichever attempt
            stopped = "seconds"
    finally:
        if begin is not session:
            await begin.close()
    return Refinement(best_of(log.steps), tuple(log.steps), stopped, log.text, log.usage)


async def _attempt(
    session: Session, parts: tuple[Content, ...], rule: StopRule, log: _Log, max_rounds: int, *, last: bool
) -> str:
    """One run of the session from the goal on; why it ended. What is repeated ends any attempt but the last."""
    from m3agent.runtime.sampling import Sampling

    sampling = Sampling(temperature=_TEMPERATURE, top_p=_TOP_P, seed=log.attempt) if log.attempt else None
    rounds = max_rounds - len(log.steps)
    tokens = None
    if isinstance(rule, Stop) and rule.tokens is not None:
        tokens = max(1, rule.tokens - log.usage.output_tokens)
    async with session.stream(*parts, max_turns=rounds + 1, max_tokens=tokens, sampling=sampling) as stream:
        async for event in stream:
            step = await log.take(event)
            if step is not None:
                reason = rule(log.steps) or ("rounds" if len(log.steps) >= max_rounds else None)
                if reason is None and not last and log.repeats(step):
                    reason = "repeated"
                if reason is not None:
                    return reason
            if isinstance(event, Done):
                return _ENDED[event.reply.stop]
    raise AssertionError("a stream ends with Done")


def _goal_parts(goal: Content | Sequence[Content], pictures: bool) -> tuple[Content, ...]:
    parts = content_parts([*goal] if isinstance(goal, Sequence) and not isinstance(goal, str) else [goal])
    if not pictures:
        parts = tuple(part for part in parts if isinstance(part, Text))
    if not parts:
        raise ValueError("the goal has no words; with pictures=False nothing of it is left")
    return parts


@dataclass(frozen=True)
class _Outcome:
    rendering: Rendering | None = None
    error: str | None = None
    checks: tuple[Verdict, ...] = ()


@dataclass
class _Desk:
    """The tool `render`, and what came of each call until the loop picks it up."""

    renderer: Renderer
    checks: Sequence[Check]
    pictures: bool
    outcomes: dict[str, _Outcome] = field(default_factory=dict[str, _Outcome])
    broken: Exception | None = None  # a check failed: that is the program's fault, not the model's

    def tool(self) -> Tool[..., Any]:
        def keep(rendering: Rendering, context: Context) -> list[str | Image] | Image | str:
            try:
                checks = judge(self.checks, rendering.images[0])
                self.outcomes[context.call_id] = _Outcome(rendering, None, checks)
            except Exception as error:
                self.broken = error
            return shown(rendering, pictures=self.pictures)

        def failed(error: RenderError, context: Context) -> None:
            self.outcomes[context.call_id] = _Outcome(error=str(error))

        render_async = getattr(self.renderer, "render_async", None)

        def render(code: str, context: Context) -> Any:
            try:
                return keep(drawing(self.renderer.render(code)), context)
            except RenderError as error:
                failed(error, context)
                raise

        async def render_and_wait(code: str, context: Context) -> Any:
            assert render_async is not None
            try:
                drawn = drawing(await render_async(code))
            except RenderError as error:
                failed(error, context)
                raise
            return await anyio.to_thread.run_sync(keep, drawn, context)

        if render_async is not None:
            return declare(render_and_wait, self.renderer.language)
        return declare(render, self.renderer.language)


@dataclass
class _Log:
    """Turns the session's events into steps."""

    desk: _Desk
    on_event: Callable[[Event | Step], Any] | None
    steps: list[Step] = field(default_factory=list[Step])
    text: str = ""
    attempt: int = 0
    _calls: dict[str, ToolCall] = field(default_factory=dict[str, ToolCall])
    _usage: list[Usage] = field(default_factory=list["Usage"])
    _tokens: int = 0
    _since: float = field(default_factory=time.perf_counter)

    @property
    def usage(self) -> Usage:
        from m3agent.runtime.usage import Usage

        return sum(self._usage, Usage())

    def repeats(self, step: Step) -> bool:
        """Whether this attempt has had the same code before."""
        return any(s.code == step.code for s in self.steps[: step.index] if s.attempt == step.attempt)

    async def take(self, event: Event) -> Step | None:
        """The step that this event completes, if it does."""
        await self._tell(event)
        if isinstance(event, CallFinished):
            self._calls[event.call.id] = event.call
        elif isinstance(event, TurnFinished):
            self._usage.append(event.usage)
            self._tokens += event.usage.output_tokens
        elif isinstance(event, Done):
            self.text = event.reply.text
        elif isinstance(event, ToolResultEvent) and self._calls[event.result.call_id].name in ("render", ""):
            if self.desk.broken is not None:
                raise self.desk.broken
            step = self._step(event.result)
            self.steps.append(step)
            await self._tell(step)
            return step
        return None

    def _step(self, result: ToolResult) -> Step:
        call = self._calls[result.call_id]
        # Without an outcome the call never reached the tool: it was damaged, or its arguments did not fit.
        outcome = self.desk.outcomes.pop(call.id, None) or _Outcome(error=result.text)
        score = 0.0
        image = None
        if outcome.rendering is not None:
            image = outcome.rendering.images[0]
            score = sum(v.score for v in outcome.checks) / len(outcome.checks) if outcome.checks else 1.0
        code, now = call.arguments.get("code", ""), time.perf_counter()
        seconds, self._since = now - self._since, now
        tokens, self._tokens = self._tokens, 0
        checks = outcome.checks
        index = len(self.steps)
        error, rendering = outcome.error, outcome.rendering
        return Step(index, self.attempt, str(code), image, error, score, checks, tokens, seconds, rendering)

    async def _tell(self, event: Event | Step) -> None:
        if self.on_event is not None:
            answer = self.on_event(event)
            if inspect.isawaitable(answer):
                await answer
