"""Messages as plain data, and sessions that go on from them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import m3agent as m3
from m3agent.chat import Tokenizer
from tests.agent.double import ScriptedRuntime, block, call, check_log

IMAGE = m3.Image(np.full((4, 6, 3), 7, np.uint8))

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=8,
)
said = st.lists(st.builds(m3.Text, text=text) | st.just(IMAGE), max_size=3).map(tuple)
calls = st.builds(
    m3.ToolCall, id=text, name=text, arguments=st.dictionaries(text, values, max_size=3), damaged=st.none() | text
)
results = st.builds(m3.ToolResult, call_id=text, parts=said, error=st.booleans())
messages = st.lists(
    st.one_of(
        st.builds(m3.Message, role=st.just("user"), parts=said),
        st.builds(
            m3.Message,
            role=st.just("assistant"),
            parts=st.lists(st.builds(m3.Text, text=text) | st.builds(m3.Thinking, text=text) | calls, max_size=3).map(
                tuple
            ),
        ),
        st.builds(m3.Message, role=st.just("tool"), parts=st.lists(results, max_size=2).map(tuple)),
    ),
    max_size=4,
)


@given(messages)
def test_messages_survive_json(conversation: list[m3.Message]) -> None:
    dumped = m3.dump_messages(conversation)
    json.loads(dumped)
    assert m3.load_messages(dumped) == conversation


def test_text_that_no_encoding_can_hold_can_be_kept() -> None:
    said = m3.Message(role="user", parts=(m3.Text(text="caf\udce9 \U0001f600"),))
    assert said.text == "caf\ufffd \U0001f600"
    assert m3.load_messages(m3.dump_messages([said])) == [said]


@pytest.mark.parametrize(
    "data",
    [
        "[{]",
        '[{"role": "system", "parts": []}]',
        '[{"role": "user", "parts": [{"type": "call", "id": "1", "name": "x"}]}]',
        '[{"role": "user", "parts": [{"type": "image", "data": "no base64"}]}]',
        '[{"role": "user", "parts": [{"type": "text", "text": "a", "more": 1}]}]',
    ],
)
def test_what_is_no_conversation_is_refused(data: str) -> None:
    with pytest.raises(m3.ConversationError, match="no messages of a session"):
        m3.load_messages(data)


def agent(runtime: ScriptedRuntime, *tools: Any, **options: Any) -> m3.Agent:
    return m3.Agent(runtime, tools=tools, **options)


@m3.tool
def look(n: int) -> list[Any]:
    return [f"view {n}", IMAGE]


@pytest.mark.anyio
async def test_a_session_from_messages_has_the_same_prompt(runtime: ScriptedRuntime) -> None:
    first = agent(runtime, look).session()
    runtime.says("Looking." + block(call("look", n="1")), "Seen.", "Bye.")
    await first.run("Look", IMAGE)
    second = agent(runtime, look).session(m3.load_messages(m3.dump_messages(first.messages)))
    await first.run("Thanks")
    runtime.says("Bye.")
    await second.run("Thanks")
    assert second.tokens == first.tokens
    assert second.messages == first.messages
    check_log(runtime, second)


@pytest.mark.anyio
async def test_calls_that_a_crash_left_open_are_pending(runtime: ScriptedRuntime) -> None:
    session = agent(runtime.says(block(call("look", n="1"))), look).session()
    async with session.stream("Look") as events:
        async for event in events:
            if isinstance(event, m3.TurnFinished):
                saved = m3.dump_messages(session.messages)
                break
    again = agent(runtime.says("ok"), look).session(m3.load_messages(saved))
    assert [call.name for call in again.pending] == ["look"]
    await again.run("Go on")
    assert again.messages[2].results[0].text == "not approved"
    assert again.pending == ()
    check_log(runtime, again)


def test_results_must_follow_their_calls(tokenizer: Tokenizer) -> None:
    call_ = m3.ToolCall(id="a", name="look", arguments={"n": 1})
    wrong = [
        m3.Message(role="assistant", parts=(call_,)),
        m3.Message(role="tool", parts=(m3.ToolResult(call_id="b", parts=()),)),
    ]
    with pytest.raises(m3.ConversationError, match="need results in this order"):
        agent(ScriptedRuntime(tokenizer), look).session(wrong)
    twice = [m3.Message(role="assistant", parts=(call_, call_))]
    with pytest.raises(m3.ConversationError, match="ids that differ"):
        agent(ScriptedRuntime(tokenizer), look).session(twice)


@pytest.mark.anyio
@pytest.mark.parametrize("answered", [(), ("a",), ("b",), ("a", "c")])
async def test_pending_calls_are_kept_and_answered_in_call_order(
    runtime: ScriptedRuntime, answered: tuple[str, ...]
) -> None:
    calls = tuple(m3.ToolCall(id=id_, name="look", arguments={"n": 1}) for id_ in "abc")
    results = tuple(m3.ToolResult(call_id=id_, parts=(m3.Text(text=f"seen {id_}"), IMAGE)) for id_ in answered)
    saved = [m3.Message(role="user", parts=(m3.Text(text="x"),)), m3.Message(role="assistant", parts=calls)]
    saved += [m3.Message(role="tool", parts=results)] if results else []
    session = agent(runtime.says("ok"), look).session(m3.load_messages(m3.dump_messages(saved)))
    assert session.messages == saved
    assert [call.id for call in session.pending] == [id_ for id_ in "abc" if id_ not in answered]
    forked = session.fork()
    runtime.context_length = 10
    with pytest.raises(m3.ContextOverflow):
        await session.run("Go on")
    assert session.messages == saved
    runtime.context_length = 100_000
    await session.run("Go on")
    texts = [f"seen {id_}" if id_ in answered else "not approved" for id_ in "abc"]
    assert [result.text for result in session.messages[2].results] == texts
    assert len(forked.pending) == 3 - len(answered)
    check_log(runtime, session)


@pytest.mark.anyio
async def test_a_session_from_messages_goes_on_from_results(runtime: ScriptedRuntime) -> None:
    first = agent(runtime.says(block(call("look", n="1"))), look).session()
    await first.run("x", max_turns=1)
    second = agent(runtime, look).session(m3.load_messages(m3.dump_messages(first.messages)))
    for session in (first, second):
        runtime.says("ok")
        assert (await session.run()).text == "ok"
    assert first.tokens == second.tokens
