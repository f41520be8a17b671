"""The refinement loop, with a session that says what a script tells it and really calls the tool."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import anyio
import numpy as np
import pytest

from m3agent.content import Content, Message, Text, ToolCall, ToolResult, content_parts
from m3agent.errors import RenderError, ToolError
from m3agent.events import CallFinished, Done, Event, Reply, ToolResultEvent, TurnFinished
from m3agent.loops import FunctionRenderer, PixelMatch, Refinement, Step, Stop, refine
from m3agent.media.image import Image
from m3agent.runtime.usage import Usage
from m3agent.tools import Context, Tool
from m3agent.tools.execute import call_tool

TARGET = Image(np.full((4, 4, 3), 200, np.uint8))
pytestmark = pytest.mark.anyio


class ScriptedSession:
    """Each item of the script is a turn: the codes that it renders, or the closing words."""

    def __init__(self, *script: list[Any] | str) -> None:
        self.script = list(script)
        self.tools: dict[str, Tool[..., Any]] = {}
        self.asked: tuple[Content, ...] = ()
        self.limits: dict[str, Any] = {}
        self.left = False
        self.forks: list[ScriptedSession] = []
        self.open = True

    def fork(self) -> ScriptedSession:
        """The first fork has the same script; a fork of a fork takes the next one of `forks`."""
        if not self.forks:
            raise AssertionError("the script has no further attempt")
        other = self.forks.pop(0)
        other.tools = dict(self.tools)
        return other

    async def close(self) -> None:
        self.open = False

    async def __aenter__(self) -> ScriptedSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def add_tool(self, tool: Tool[..., Any]) -> None:
        self.tools[tool.name] = tool

    @asynccontextmanager
    async def stream(self, *parts: Content, **limits: Any) -> AsyncIterator[AsyncGenerator[Event, None]]:
        self.asked, self.limits = content_parts(parts), limits
        async with aclosing(self._events()) as events:
            try:
                yield events
            finally:
                self.left = True

    async def _events(self) -> AsyncGenerator[Event, None]:
        for turn, item in enumerate(self.script):
            if turn == self.limits["max_turns"]:
                yield Done(Reply("", "", (), Usage(), "turns"))
                return
            codes = [] if isinstance(item, str) else item
            calls = tuple(self._call(f"call-{turn}-{n}", code) for n, code in enumerate(codes))
            for call in calls:
                yield CallFinished(call)
            said = (Text(text=item),) if isinstance(item, str) else calls
            yield TurnFinished(turn, Message(role="assistant", parts=said), Usage(output_tokens=10 + turn))
            if isinstance(item, str):
                yield Done(Reply(item, "", (), Usage(), "end"))
                return
            for call in calls:
                yield ToolResultEvent(await self._result(call))

    @staticmethod
    def _call(call_id: str, code: Any) -> ToolCall:
        if isinstance(code, ToolCall):
            return code.model_copy(update={"id": call_id})
        return ToolCall(id=call_id, name="render", arguments={"code": code})

    async def _result(self, call: ToolCall) -> ToolResult:
        if call.damaged:
            return ToolResult(call_id=call.id, parts=(Text(text=call.damaged),), error=True)
        try:
            parts = await call_tool(self.tools, call.name, call.arguments, Context(call.name, call.id))
        except ToolError as error:
            return ToolResult(call_id=call.id, parts=(Text(text=str(error)),), error=True)
        return ToolResult(call_id=call.id, parts=content_parts(parts))


def grey(code: str) -> np.ndarray:
    """A renderer whose language is one number: the grey of the picture."""
    return np.full((4, 4, 3), int(code), np.uint8)


RENDER = FunctionRenderer(grey, "grey")


def closeness(image: Image) -> float:
    return 1 - abs(float(image.rgb.mean()) - 200) / 255


async def run(session: ScriptedSession, goal: Any = "Grey, please.", **options: Any) -> Refinement:
    return await refine(session, goal, render=RENDER, **{"checks": [closeness], **options})  # type: ignore[arg-type]


async def test_the_tool_is_the_one_that_nano_was_trained_on():
    session = ScriptedSession("Done.")
    await run(session)
    assert session.tools["render"].definition == {
        "name": "render",
        "description": "Render grey code and look at the picture.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    }
    assert list(session.tools["render"].definition) == ["name", "description", "parameters"]


async def test_the_best_is_returned_and_not_the_last():
    session = ScriptedSession(["100"], ["190"], ["20"], "Done.")
    result = await run(session)
    assert [step.code for step in result.steps] == ["100", "190", "20"]
    assert result.best is result.steps[1]
    assert result.stopped == "answered"
    assert result.text == "Done."
    assert session.left


async def test_it_stops_at_the_first_pass():
    session = ScriptedSession(["100"], ["200"], ["20"], "Done.")
    result = await run(session, checks=[PixelMatch(TARGET)])
    assert [step.passed for step in result.steps] == [False, True]
    assert result.stopped == "passed"
    assert result.best is result.steps[1]
    assert session.left


async def test_the_model_sees_the_goal_and_each_render():
    session = ScriptedSession(["200"], "Done.")
    seen: list[Any] = []
    await run(session, ["Like this:", TARGET], stop=Stop(passing=False), on_event=seen.append)
    assert session.asked == (Text(text="Like this:"), TARGET)
    results = [event.result for event in seen if isinstance(event, ToolResultEvent)]
    assert results[0].parts == (TARGET,)


async def test_pictures_can_be_withheld():
    session = ScriptedSession(["200"], "Done.")
    seen: list[Any] = []
    result = await run(session, ["Like this:", TARGET], pictures=False, stop=Stop(passing=False), on_event=seen.append)
    assert session.asked == (Text(text="Like this:"),)
    results = [event.result for event in seen if isinstance(event, ToolResultEvent)]
    assert results[0].parts == (Text(text="rendered"),)
    assert result.steps[0].image == TARGET  # the record keeps it
    assert result.steps[0].score == 1.0


async def test_a_picture_alone_is_no_goal_when_pictures_are_withheld():
    with pytest.raises(ValueError, match="no words"):
        await run(ScriptedSession("Done."), TARGET, pictures=False)


async def test_a_failed_render_is_a_step_and_the_model_is_told_why():
    def refuse(code: str) -> Image:
        raise RenderError("no such grey")

    session = ScriptedSession(["x"], "Done.")
    seen: list[Any] = []
    result = await refine(session, "g", render=refuse, checks=[closeness], on_event=seen.append)  # type: ignore[arg-type]
    (step,) = result.steps
    assert (step.image, step.error, step.score, step.code) == (None, "no such grey", 0.0, "x")
    (told,) = [event.result for event in seen if isinstance(event, ToolResultEvent)]
    assert told.error
    assert told.text == "no such grey"
    assert result.best is None


@pytest.mark.parametrize(
    "call",
    [
        ToolCall(id="", name="render", arguments={}, damaged="the call was cut off"),
        ToolCall(id="", name="render", arguments={"colour": "red"}),
    ],
)
async def test_a_call_that_never_reached_the_renderer_is_a_step_too(call: ToolCall):
    result = await run(ScriptedSession([call], ["200"], "Done."))
    assert [step.image is None for step in result.steps] == [True, False]
    assert result.steps[0].error
    assert result.best is result.steps[1]


async def test_several_calls_in_one_turn_are_several_steps_in_call_order():
    result = await run(ScriptedSession(["10", "20", "30"], "Done."))
    assert [step.code for step in result.steps] == ["10", "20", "30"]
    assert [step.tokens for step in result.steps] == [10, 0, 0]


async def test_rounds_are_limited():
    session = ScriptedSession(*(["10"] for _ in range(9)))
    result = await run(session, max_rounds=3)
    assert len(result.steps) == 3
    assert result.stopped == "rounds"
    with pytest.raises(ValueError, match="max_rounds"):
        await run(session, max_rounds=0)


async def test_calls_of_other_tools_are_no_steps():
    session = ScriptedSession([ToolCall(id="", name="clock")], ["200"], "Done.")
    result = await run(session)
    assert [step.code for step in result.steps] == ["200"]


async def test_no_gain_and_a_rule_of_ones_own():
    session = ScriptedSession(["100"], ["50"], ["40"], ["200"], "Done.")
    assert (await run(session, stop=Stop(patience=2))).stopped == "no gain"
    session = ScriptedSession(["100"], ["50"], "Done.")
    result = await run(session, stop=lambda steps: "dark enough" if steps[-1].code == "50" else None)
    assert result.stopped == "dark enough"


async def test_tokens_and_usage_are_counted():
    result = await run(ScriptedSession(["100"], ["50"], "Done."))
    assert [step.tokens for step in result.steps] == [10, 11]
    assert result.usage.output_tokens == 10 + 11 + 12


async def test_time_runs_out_while_the_model_writes():
    class Slow(ScriptedSession):
        async def _events(self) -> AsyncGenerator[Event, None]:
            async with aclosing(super()._events()) as events:
                async for event in events:
                    yield event
                    if isinstance(event, ToolResultEvent):
                        await anyio.sleep_forever()

    session = Slow(["100"], "Done.")
    result = await run(session, stop=Stop(seconds=1.0))
    assert result.stopped == "seconds"
    assert len(result.steps) == 1
    assert session.left


async def test_time_runs_out_in_a_later_attempt():
    class Stuck(ScriptedSession):
        async def _events(self) -> AsyncGenerator[Event, None]:
            await anyio.sleep_forever()
            yield  # pyright: ignore[reportReturnType]

    session, _ = with_attempts([["100"], "Done."])
    session.forks[0].forks = [Stuck()]
    result = await run(session, checks=[PixelMatch(TARGET)], attempts=2, stop=Stop(seconds=1.0))
    assert result.stopped == "seconds"
    assert [step.code for step in result.steps] == ["100"]


async def test_a_faulty_check_is_the_programs_fault_and_not_told_to_the_model():
    def faulty(image: Image) -> float:
        raise ZeroDivisionError("a bug")

    session = ScriptedSession(["100"], "Done.")
    with pytest.raises(ZeroDivisionError, match="a bug"):
        await run(session, checks=[faulty])
    assert session.left


async def test_rendering_leaves_the_event_loop_free():
    def slow(code: str) -> np.ndarray:
        time.sleep(0.2)
        return grey(code)

    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with anyio.create_task_group() as group:
        group.start_soon(tick)
        await refine(ScriptedSession(["100"], "Done."), "g", render=slow)  # type: ignore[arg-type]
        group.cancel_scope.cancel()
    assert ticks >= 3


async def test_events_and_steps_are_told_as_they_happen():
    told: list[Any] = []

    async def listen(event: Any) -> None:
        await anyio.sleep(0)
        told.append(event)

    result = await run(ScriptedSession(["100"], "Done."), on_event=listen)
    kinds = [type(event) for event in told]
    assert kinds == [CallFinished, TurnFinished, ToolResultEvent, Step, TurnFinished, Done]
    assert told[3] is result.steps[0]


def with_attempts(first: list[Any], *later: list[Any]) -> tuple[ScriptedSession, list[ScriptedSession]]:
    """A session with scripts for the attempts after the first, and every session behind it."""
    session, begin = ScriptedSession(*first), ScriptedSession()
    begin.forks = [ScriptedSession(*script) for script in later]
    forks = [begin, *begin.forks]
    session.forks = [begin]
    return session, forks


async def test_a_second_attempt_begins_anew_when_the_model_is_content_and_the_checks_are_not():
    session, forks = with_attempts([["100"], "Done."], [["150"], ["200"], "Done."], [["1"]])
    result = await run(session, checks=[PixelMatch(TARGET)], attempts=3)
    assert [(step.attempt, step.code) for step in result.steps] == [(0, "100"), (1, "150"), (1, "200")]
    assert result.stopped == "passed"
    assert forks[1].asked == session.asked
    assert session.limits["sampling"] is None
    assert forks[1].limits["sampling"].temperature > 0
    assert [fork.open for fork in forks] == [False, False, True]  # the third attempt was never begun


async def test_a_repeated_draft_ends_an_attempt_but_not_the_last():
    session, _ = with_attempts([["100"], ["100"], ["200"]], [["9"], ["9"], ["8"], "Done."])
    result = await run(session, checks=[PixelMatch(TARGET)], attempts=2)
    assert [(step.attempt, step.code) for step in result.steps] == [
        (0, "100"),
        (0, "100"),
        (1, "9"),
        (1, "9"),
        (1, "8"),
    ]
    assert result.stopped == "answered"
    assert result.best is result.steps[0]


async def test_rounds_are_counted_over_all_attempts():
    session, _ = with_attempts([["1"], "Done."], [["2"], ["3"], ["4"]])
    result = await run(session, checks=[PixelMatch(TARGET)], attempts=5, max_rounds=3)
    assert [step.code for step in result.steps] == ["1", "2", "3"]
    assert result.stopped == "rounds"


async def test_without_checks_one_attempt_is_enough():
    result = await run(ScriptedSession(["1"], "Done."), checks=[], attempts=3)
    assert result.stopped == "answered"


async def test_forks_are_closed_when_a_check_fails():
    def broken(image: Image) -> float:
        raise ZeroDivisionError

    session, forks = with_attempts([["1"]], [["2"]])
    with pytest.raises(ZeroDivisionError):
        await run(session, checks=[broken], attempts=2)
    assert not forks[0].open
