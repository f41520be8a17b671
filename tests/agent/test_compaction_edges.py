"""Compaction where something hangs on the last turn, where the model writes odd tokens, and more than once."""

from __future__ import annotations

import pytest

import m3agent as m3
from m3agent.chat import markers
from tests.agent.double import ScriptedRuntime, block, call, check_log, read_log
from tests.agent.going_on import check_restores

pytestmark = pytest.mark.anyio


@m3.tool
def write(letters: int, what: str = "y") -> str:
    return what * letters


@m3.tool(needs_approval=True)
def erase(name: str) -> str:
    return f"{name} is gone"


def session_of(runtime: ScriptedRuntime, **options: object) -> m3.Session:
    return m3.Agent(runtime, tools=[write, erase], **options).session()  # pyright: ignore[reportArgumentType]


async def talk(session: m3.Session, runtime: ScriptedRuntime, runs: int = 6) -> None:
    """Turns that only a summary can shorten."""
    for number in range(runs):
        runtime.says("word " * 120)
        await session.run(f"Question {number}")


def roles(session: m3.Session) -> list[str]:
    return [message.role for message in session.messages]


ALL = m3.Compaction(keep_turns=0)


async def test_a_turn_that_was_cut_short_stays(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime)
    runtime.says("a longer answer")
    await session.run("Be short", max_tokens=3)
    runtime.says("SUMMARY")
    compacted = await session.compact(ALL)
    assert compacted is not None
    assert compacted.turns == 6
    assert session.messages[-1].text == "a l"
    runtime.says("ok")
    await session.run("z")
    check_log(runtime, session)
    assert [b.body for b in read_log(runtime, session.tokens)[-3:]] == ["</mm:think>a l", "z", "</mm:think>ok"]


async def test_pending_calls_stay_and_run_after_it(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime)
    runtime.says(block(call("erase", name="a"), call("write", letters="5")))
    assert (await session.run("x")).stop == "approval"
    pending = session.pending
    runtime.says("SUMMARY")
    compacted = await session.compact(ALL)
    assert compacted is not None
    assert compacted.turns == 6
    assert session.pending == pending != ()
    # The question stood before the turn whose calls have no results.
    asked = read_log(runtime, runtime.prompts[-1])
    assert [b.role for b in asked[-3:]] == ["user", "user", "ai"]
    runtime.says("done")
    assert (await session.run(approve={pending[0].id: True})).text == "done"
    assert session.messages[-2].results[0].text == "a is gone"
    check_log(runtime, session)


async def test_results_that_wait_keep_their_call(runtime: ScriptedRuntime) -> None:
    """The session makes room by itself between a turn and the sending of its results."""
    runtime.context_length = 8000
    session = session_of(runtime, compaction=m3.Compaction(at=0.5, keep_turns=0))
    await talk(session, runtime, 3)
    runtime.says(block(call("write", letters="900")), "SUMMARY", "Done.")
    seen: list[m3.Compacted] = []
    async with session.stream("q") as events:
        seen += [event async for event in events if isinstance(event, m3.Compacted)]
    assert [event.turns for event in seen] == [3]
    assert roles(session)[-4:] == ["user", "assistant", "tool", "assistant"]
    assert [message.role for message in events.reply.messages] == ["user", "user", "assistant", "tool", "assistant"]
    assert session.messages[-2].results[0].text == "y" * 900
    check_log(runtime, session)
    await check_restores(runtime, session, write, erase)


async def test_after_a_whole_last_turn_was_replaced_the_log_goes_on_in_order(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime)
    runtime.says("SUMMARY")
    compacted = await session.compact(ALL)
    assert compacted is not None
    assert compacted.turns == 6
    assert roles(session) == ["user"] * 7
    with pytest.raises(m3.ConversationError, match="nothing to answer"):
        await session.run()
    runtime.says("ok")
    assert (await session.run("z")).text == "ok"
    check_log(runtime, session)
    await check_restores(runtime, session, write, erase)


async def test_tokens_that_begin_a_message_inside_a_turn_shift_nothing(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    for number in range(2):
        runtime.says(block(call("write", letters="900", what="ab"[number])), f"Done {number}.")
        await session.run(f"Question {number}")
    runtime.says(f"odd {markers.ROLE}ai\nmore{markers.ROLE}user\nand more")
    await session.run("x")
    odd = session.tokens
    runtime.says(block(call("write", letters="900", what="c")), "Done.")
    await session.run("y")
    before = session.tokens
    compacted = await session.compact(m3.Compaction(keep_turns=1, summarise=False))
    assert compacted is not None
    assert compacted.results == 3
    # What was not a result is there as it was, in its place: the log is the old one with notes for results.
    text, old = (runtime.tokenizer.decode(tokens) for tokens in (session.tokens, before))
    for number, letter in enumerate("abc", start=1):
        note = f"[left out: 900 characters, call call_{number}, beginning: {letter * 80}]"
        old = old.replace(letter * 900, note)
    assert text == old
    after = session.tokens
    session.rewind()
    assert session.tokens == after[: len(session.tokens)]
    assert session.tokens[-30:] == odd[-30:]
    runtime.says("ok")
    assert (await session.run("z")).text == "ok"


async def test_a_summary_takes_the_place_of_the_last_one(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    runtime.says(block(call("write", letters="40")), "Done.")
    await session.run("First")
    for text in ("SUMMARY ONE", "SUMMARY TWO"):
        await talk(session, runtime)
        runtime.says(text)
        assert await session.compact(m3.Compaction(keep_turns=1)) is not None
    assert "SUMMARY ONE" in runtime.tokenizer.decode(runtime.prompts[-1])  # it is part of what was summed up
    found = [message.text for message in session.messages if "SUMMARY" in message.text]
    assert len(found) == 1
    assert found[0].endswith("SUMMARY TWO")
    assert [message.text for message in session.messages if message.role == "user"][:2] == ["First", "Question 0"]
    assert session.full_result("call_1") == "y" * 40
    runtime.says(block(call("write", letters="3")), "ok")
    await session.run("z")
    assert session.messages[-2].results[0].call_id == "call_2"
    again = await check_restores(runtime, session, write, erase)
    assert again.full_result("call_1") == "y" * 40


async def test_the_earlier_summary_stays_where_there_is_no_room_for_another(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime)
    runtime.says("SUMMARY ONE")
    await session.compact(m3.Compaction(keep_turns=1))
    await talk(session, runtime)
    runtime.context_length = len(session.tokens) + 20
    compacted = await session.compact(m3.Compaction(keep_turns=1))
    assert compacted is not None
    assert compacted.usage.output_tokens == 0
    (summary,) = [message.text for message in session.messages if "SUMMARY" in message.text]
    assert summary.endswith("SUMMARY ONE\nYour earlier turns were left out here, to make room.")


async def test_what_a_summary_takes_is_counted(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime)
    used = session.usage
    assert used.output_tokens == 6 * 601
    runtime.says("SUMMARY")
    compacted = await session.compact(m3.Compaction(keep_turns=1))
    assert compacted is not None
    assert compacted.usage.output_tokens == len("SUMMARY") + 1
    assert compacted.usage.prompt_tokens > compacted.after
    assert session.usage == used + compacted.usage
    assert session.fork().usage == m3.Usage()
    # Counted also where nothing came of it: the "summary" is longer than what it would replace.
    short = session_of(runtime)
    runtime.says("a")
    await short.run("b")
    runtime.says("b", "A long summary of it " * 20)
    await short.run("c")
    used, log = short.usage, short.tokens
    assert await short.compact(m3.Compaction(keep_turns=1)) is None
    assert short.tokens == log
    assert short.usage.output_tokens == used.output_tokens + 421


async def test_a_run_reports_the_usage_of_its_summary(runtime: ScriptedRuntime) -> None:
    runtime.context_length = 8000
    session = session_of(runtime, compaction=m3.Compaction(at=0.5, keep_turns=1))
    await talk(session, runtime, 4)
    before = session.usage
    runtime.says("SUMMARY", "Done.")
    reply = await session.run("q")
    assert reply.usage.output_tokens == len("SUMMARY") + 1 + len("Done.") + 1
    assert session.usage == before + reply.usage


async def test_a_summary_is_no_turn_to_a_limit_on_tokens(runtime: ScriptedRuntime) -> None:
    runtime.context_length = 8000
    session = session_of(runtime, compaction=m3.Compaction(at=0.5, keep_turns=1))
    await talk(session, runtime, 4)
    runtime.says("SUMMARY", "Done.")
    reply = await session.run("q", max_tokens=3)
    assert (reply.text, reply.stop) == ("Don", "tokens")
    assert reply.usage.output_tokens == len("SUMMARY") + 1 + 3
