"""Rewinding: what goes, that the log is cut to the token and keeps its pages, and that the session goes on."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import m3agent as m3
from m3agent.runtime import steps
from tests.agent.double import ScriptedRuntime, block, call, check_log, read_log
from tests.agent.going_on import agent, check_goes_on, check_restores
from tests.agent.test_real import say
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


@m3.tool
def write(letters: int) -> str:
    return "y" * letters


@m3.tool(needs_approval=True)
def erase(name: str) -> str:
    return f"{name} is gone"


async def three_runs(runtime: ScriptedRuntime) -> tuple[m3.Session, list[list[int]]]:
    """A session, and its log after each run."""
    session = agent(runtime, write, erase).session()
    logs: list[list[int]] = []
    for number in range(3):
        runtime.says(block(call("write", letters="30")), f"Done {number}.")
        await session.run(f"Question {number}")
        logs.append(session.tokens)
    return session, logs


@pytest.mark.parametrize("turns", [1, 2])
async def test_a_rewound_session_is_the_one_that_it_was(runtime: ScriptedRuntime, turns: int) -> None:
    session, logs = await three_runs(runtime)
    messages = session.messages
    session.rewind(turns)
    assert session.tokens == logs[2 - turns]
    assert session.messages == messages[: 4 * (3 - turns)]
    await check_restores(runtime, session, write, erase)
    await check_goes_on(runtime, session)
    assert "Question 2" not in runtime.tokenizer.decode(session.tokens)


async def test_to_every_message(runtime: ScriptedRuntime) -> None:
    session, logs = await three_runs(runtime)
    for to in range(len(session.messages) + 1):
        fork = session.fork()
        fork.rewind(to=to)
        assert fork.messages == session.messages[:to]
        assert logs[-1][: len(fork.tokens)] == fork.tokens
        # Calls without results wait for a decision, results for the model.
        assert [call.name for call in fork.pending] == (["write"] if to % 4 == 2 else [])
        runtime.replies.clear()
        runtime.says("ok", "ok")
        if to % 4 == 2:
            again = fork.fork()
            assert (await again.run(approve={again.pending[0].id: True})).text == "ok"
            assert again.tokens[: len(fork.tokens)] == fork.tokens
            assert again.messages[to].results[0].text == "y" * 30
        if to % 4 == 3:
            assert (await fork.run()).text == "ok"
        else:
            assert (await fork.run("z")).text == "ok"
        assert logs[-1][: len(fork.tokens)] != fork.tokens
        roles = [{"assistant": "ai"}.get(message.role, message.role) for message in fork.messages]
        assert [b.role for b in read_log(runtime, fork.tokens)[2:]] == roles


async def test_a_turn_that_was_cut_short(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("a longer answer", "ok"), write).session()
    await session.run("x", max_tokens=3)
    cut = session.tokens
    await session.run("y")
    log = session.tokens
    session.rewind()
    assert log[: len(session.tokens)] == session.tokens == [*cut, runtime.tokenizer.control["[e~["]]
    runtime.says("ok")
    await session.run("y")
    assert session.tokens == log
    session.rewind(to=2)
    session.rewind(to=1)
    check_log(runtime, session)


async def test_before_the_first_run_of_a_restored_session(runtime: ScriptedRuntime) -> None:
    session, logs = await three_runs(runtime)
    again = agent(runtime, write, erase).session(session.messages)
    again.rewind()
    runtime.says("ok")
    await again.run("z")
    assert again.tokens[: len(logs[1])] == logs[1]
    assert len(again.messages) == 10
    check_log(runtime, again)


async def test_news_of_tools_that_go_are_told_anew(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says("ok", "ok", "ok", "ok"), write).session()
    await session.run("x")
    session.add_tool(erase)
    session.remove_tool("write")
    await session.run("y")
    log = session.tokens
    session.rewind()
    await session.run("y")
    assert session.tokens == log
    session.rewind()
    session.add_tool(write)
    session.remove_tool("erase")
    await session.run("y")  # the model knows of these, and of no others
    assert session.messages[2].parts == (m3.Text(text="y"),)
    session.rewind(2)
    assert session.messages == []
    assert read_log(runtime, session.tokens)[1].body.count('"name": "write"') == 1
    await check_goes_on(runtime, session)
    assert [tool["name"] for tool in session.messages[0].head_tools or ()] == ["write"]


async def test_messages_that_the_user_did_not_write_are_no_turns_of_the_user(runtime: ScriptedRuntime) -> None:
    session = agent(runtime, write, erase).session()
    for number in range(6):
        runtime.says("word " * 120)
        await session.run(f"Question {number}")
    runtime.says("SUMMARY")
    assert await session.compact(m3.Compaction(keep_turns=1)) is not None
    runtime.says("ok")
    await session.run("Question 6")
    session.rewind()
    assert session.messages[-1].text == "word " * 120
    session.rewind()  # the last turn's question stands before the summary, which goes with it
    assert [message.text for message in session.messages] == [f"Question {number}" for number in range(5)]
    runtime.says("ok")
    assert (await session.run("z")).text == "ok"
    with pytest.raises(ValueError, match="turns is 7; the user has said 6 messages"):
        session.rewind(7)


async def test_what_there_is_not_and_when_not(runtime: ScriptedRuntime) -> None:
    session, logs = await three_runs(runtime)
    for wrong in (0, 4, -1):
        with pytest.raises(ValueError, match="the user has said 3 messages"):
            session.rewind(wrong)
    for wrong in (-1, 13):
        with pytest.raises(ValueError, match="there are 12 messages"):
            session.rewind(to=wrong)
    runtime.says("ok")
    async with session.stream("x") as events:
        await anext(events)
        with pytest.raises(m3.SessionBusy):
            session.rewind()
    session.rewind()
    assert session.tokens == logs[-1]
    runtime.says(block(call("erase", name="a")))
    await session.run("x")
    assert session.pending
    session.rewind()
    assert session.pending == ()
    assert session.tokens == logs[-1]
    session.rewind(to=12)
    assert session.tokens == logs[-1]
    await session.close()
    with pytest.raises(m3.RuntimeClosed):
        session.rewind()


async def test_pages_on_the_real_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that stays is computed again, a picture included, and the pages of what goes are given back."""
    write_checkpoint(tmp_path, replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=8192)))
    tokens: deque[int] = deque()
    monkeypatch.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
    picture = m3.Image(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3))
    async with m3.Runtime.open(tmp_path, cache_tokens=16384) as runtime:
        async with m3.Agent(runtime, thinking="disabled").session() as session:
            say(tokens, runtime, "One.", "Two.", "Two.")
            await session.run("Look.", picture)
            log, pages = session.tokens, runtime.stats().used_pages
            await session.run("long " * 500, picture)
            session.rewind()
            assert session.tokens == log
            assert runtime.stats().used_pages <= pages + 1
            reply = await session.run("Go on.")
            assert reply.usage.reused_tokens >= len(log) - 1
            assert reply.usage.media_tokens == 0
            async with m3.Agent(runtime, thinking="disabled").session(session.messages[:-2]) as fresh:
                say(tokens, runtime, "Two.")
                await fresh.run("Go on.")
                ours, theirs = session._history.log, fresh._history.log
                assert ours is not None
                assert theirs is not None
                assert ours.tokens == theirs.tokens
                np.testing.assert_allclose(await ours.sequence.logits(), await theirs.sequence.logits(), atol=1e-4)
        assert runtime.stats().used_pages == 0
