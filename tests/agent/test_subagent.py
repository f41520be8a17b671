"""Agents as tools of agents: in sessions of their own, and on forks of the calling one."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

import m3agent as m3
from m3agent.runtime import steps
from tests.agent.double import ScriptedRuntime, block, call, check_log, make_tokenizer
from tests.agent.test_real import say
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


@pytest.fixture
def runtime(tmp_path: Path) -> ScriptedRuntime:
    return ScriptedRuntime(make_tokenizer(tmp_path))


@m3.tool
async def stock(sku: str, context: m3.Context) -> str:
    return f"{sku}: {context.deps}"


def pair(runtime: ScriptedRuntime, *, fork: bool = False, **options: object) -> m3.Session:
    inner = m3.Agent(runtime, instructions="Look up.", tools=[stock])
    outer = m3.Agent(runtime, tools=[inner.as_tool(name="research", fork=fork, **options), stock])
    return outer.session()


async def test_a_session_of_its_own(runtime: ScriptedRuntime) -> None:
    runtime.says(block(call("research", task="Find A.")), block(call("stock", sku="A")), "A is there.", "Yes.")
    session = pair(runtime)
    async with session.stream("Is A there?", deps="depot") as events:
        progress = [event.value async for event in events if isinstance(event, m3.ToolProgress)]
    assert events.reply.text == "Yes."
    assert session.messages[2].results[0].text == "A is there."
    assert any(isinstance(value, m3.ToolResultEvent) and value.result.text == "A: depot" for value in progress)
    inner = [value.reply.usage.output_tokens for value in progress if isinstance(value, m3.Done)]
    assert events.reply.usage.output_tokens > inner[0] > 0  # and it is counted in
    assert "Look up." in runtime.tokenizer.decode(runtime.prompts[1])
    assert runtime.closed_sequences == 1
    check_log(runtime, session)


async def test_on_a_fork_of_the_caller(runtime: ScriptedRuntime) -> None:
    calls = block(call("research", task="Find A."), call("research", task="Find B."))
    runtime.says(calls, "One is there.", "One is there.", "Both.")
    session = pair(runtime, fork=True)
    reply = await session.run("Are A and B there?")
    assert reply.text == "Both."
    assert [result.text for result in session.messages[2].results] == ["One is there.", "One is there."]
    log = runtime.prompts[0]
    tasks: set[str] = set()
    for prompt in map(runtime.tokenizer.decode, runtime.prompts[1:3]):
        assert prompt.startswith(runtime.tokenizer.decode(log))  # all of the past is there
        answered = prompt.rpartition("]~b]tool")[2]
        assert answered.count("being done elsewhere") == 1
        tasks |= set(re.findall(r"give back:\n(Find .\.)</response>", answered))
    assert tasks == {"Find A.", "Find B."}
    check_log(runtime, session)


async def test_a_typed_result(runtime: ScriptedRuntime) -> None:
    runtime.says(block(call("research", task="Count.")), "[1, 2]", "Two.")
    session = pair(runtime, output=list[int])
    await session.run("How many?")
    assert session.messages[2].results[0].text == "[1, 2]"


async def test_an_agent_that_ends_early_is_an_error_for_the_caller(runtime: ScriptedRuntime) -> None:
    inner = m3.Agent(runtime, tools=[stock], max_turns=1)
    outer = m3.Agent(runtime, tools=[inner.as_tool(name="research")])
    runtime.says(block(call("research", task="x")), "Looking." + block(call("stock", sku="A")), "Too bad.")
    reply = await outer.run("x")
    assert reply.messages[2].results[0].error
    assert reply.messages[2].results[0].text == "it ended early (turns), with: Looking."


async def test_agents_inside_agents_have_an_end(runtime: ScriptedRuntime) -> None:
    agent = m3.Agent(runtime)
    again = m3.Agent(runtime, tools=[agent.as_tool(name="again", fork=True)])
    runtime.says(*[block(call("again", task="deeper"))] * 5, *["done"] * 5)
    session = again.session()
    reply = await session.run("x")
    assert reply.text == "done"
    deepest = runtime.tokenizer.decode(runtime.prompts[5])
    assert "agents are 4 deep inside each other" in deepest


async def test_cancelling_reaches_it(runtime: ScriptedRuntime) -> None:
    @m3.tool
    async def wait() -> None:
        started.set()
        await anyio.sleep(600)

    started = anyio.Event()
    inner = m3.Agent(runtime, tools=[wait])
    outer = m3.Agent(runtime, tools=[inner.as_tool(name="research")])
    runtime.says(block(call("research", task="x")), block(call("wait")), "Going on.")
    session = outer.session()
    with anyio.fail_after(10):
        async with anyio.create_task_group() as group:
            group.start_soon(session.run, "x")
            await started.wait()
            group.cancel_scope.cancel()
    assert runtime.closed_sequences == 1
    assert session.messages[2].results[0].text == "cancelled"
    assert (await session.run("y")).text == "Going on."
    check_log(runtime, session)


@pytest.mark.parametrize("fork", [True, False])
async def test_pages_go_back_and_a_fork_computes_nothing_twice(tmp_path: Path, fork: bool) -> None:
    config = replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=16384))
    write_checkpoint(tmp_path, config)
    tokens: deque[int] = deque()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
        async with m3.Runtime.open(tmp_path, cache_tokens=32768) as runtime:
            inner = m3.Agent(runtime)
            async with m3.Agent(runtime, tools=[inner.as_tool(name="research", fork=fork)]).session() as session:
                say(tokens, runtime, block(call("research", task="Find it.")), "Found.", "Good.")
                reply = await session.run("x")
                assert reply.text == "Good."
                assert reply.usage.recomputed_tokens == 0
                assert runtime.stats().used_pages > 0
                if fork:
                    assert reply.usage.computed_tokens < 1.3 * len(session.tokens)
            assert runtime.stats().used_pages == 0
