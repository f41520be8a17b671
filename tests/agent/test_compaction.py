"""Compaction: what goes, what stays, what is computed again, and that it is said."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import anyio
import numpy as np
import pytest

import m3agent as m3
from m3agent.runtime import steps
from tests.agent.double import ScriptedRuntime, block, call, check_log, make_tokenizer, read_log
from tests.agent.test_real import say
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


@m3.tool
def write(letters: int, what: str = "y") -> str:
    return what * letters


@pytest.fixture
def runtime(tmp_path: Path) -> ScriptedRuntime:
    return ScriptedRuntime(make_tokenizer(tmp_path))


def session_of(runtime: ScriptedRuntime, **options: object) -> m3.Session:
    return m3.Agent(runtime, tools=[write], **options).session()


async def talk(session: m3.Session, runtime: ScriptedRuntime, runs: int, letters: int = 2000) -> None:
    for number in range(runs):
        runtime.says(block(call("write", letters=str(letters), what="abc"[number % 3])), f"Done {number}.")
        await session.run(f"Question {number}")


async def test_old_results_become_notes_and_the_rest_stays_to_the_token(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime, 4)
    before, log = session.messages, session.tokens
    compacted = await session.compact(m3.Compaction(keep_turns=3, summarise=False))
    assert compacted is not None
    assert (compacted.before, compacted.after) == (len(log), len(session.tokens))
    assert (compacted.results, compacted.turns) == (3, 0)
    assert compacted.after < 0.7 * compacted.before
    assert [m.role for m in session.messages] == [m.role for m in before]
    changed = [i for i, (a, b) in enumerate(zip(before, session.messages, strict=True)) if a != b]
    assert changed == [2, 6, 10]
    note = session.messages[2].results[0].text
    assert note == f"[left out: 2000 characters, call call_1, beginning: {'a' * 80}]"
    assert session.full_result("call_1") == "a" * 2000
    # Everything before the first note is the same, everything between is there as it was.
    old, new = (read_log(runtime, tokens) for tokens in (log, session.tokens))
    assert [a.body for i, a in enumerate(old) if i - 2 not in changed] == [
        b.body for i, b in enumerate(new) if i - 2 not in changed
    ]
    check_log(runtime, session)
    runtime.says("Fine.")
    assert (await session.run("And now?")).text == "Fine."
    check_log(runtime, session)
    assert m3.load_messages(m3.dump_messages(session.messages)) == session.messages
    assert await session.compact(m3.Compaction(keep_turns=3, summarise=False)) is None


async def test_old_turns_become_a_summary(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime, 4, letters=200)
    runtime.says("Found a, b, c; nothing is left to do.")
    compacted = await session.compact(m3.Compaction(keep_turns=2))
    assert compacted is not None
    assert compacted.turns == 6
    texts = [(message.role, message.text) for message in session.messages]
    assert [text for role, text in texts if role == "user"][:4] == [f"Question {i}" for i in range(4)]
    assert texts[4] == (
        "user",
        "Your own work so far, as you wrote it down when there had to be room:\nFound a, b, c; nothing is left to do.",
    )
    assert [role for role, _ in texts[5:]] == ["assistant", "tool", "assistant"]
    assert "Write down, for yourself" in runtime.tokenizer.decode(runtime.prompts[-1])
    check_log_without_runs_of_users(runtime, session)
    runtime.says("Go on.")
    assert (await session.run("?")).text == "Go on."


def check_log_without_runs_of_users(runtime: ScriptedRuntime, session: m3.Session) -> None:
    """Several messages of users in a row are what a summary leaves; else the log is as ever."""
    roles = [b.role for b in read_log(runtime, session.tokens)[2:]]
    assert roles == [{"assistant": "ai"}.get(m.role, m.role) for m in session.messages]


async def test_it_happens_by_itself_and_is_told(runtime: ScriptedRuntime) -> None:
    runtime.context_length = 9000
    session = session_of(runtime, compaction=m3.Compaction(at=0.6, keep_turns=2, summarise=False))
    seen: list[m3.Compacted] = []
    for number in range(12):
        runtime.says(block(call("write", letters="1500")), f"Done {number}.")
        async with session.stream(f"Question {number}") as events:
            seen += [event async for event in events if isinstance(event, m3.Compacted)]
        assert events.reply.text == f"Done {number}."
        assert [message.role for message in events.reply.messages] == ["user", "assistant", "tool", "assistant"]
    assert len(seen) >= 2
    assert all(event.after < event.before for event in seen)
    check_log(runtime, session)
    assert session.full_result("call_1") == "y" * 1500


async def test_a_full_session_goes_on_after_it(runtime: ScriptedRuntime) -> None:
    runtime.context_length = 9000
    session = session_of(runtime)
    await talk(session, runtime, 2, letters=3000)
    with pytest.raises(m3.ContextOverflow):
        await session.run("z" * 2500)
    assert await session.compact(m3.Compaction(keep_turns=0, summarise=False)) is not None
    runtime.says("There is room.")
    assert (await session.run("z" * 2500)).text == "There is room."
    check_log(runtime, session)


async def test_nothing_changes_when_it_is_cancelled_or_busy(runtime: ScriptedRuntime) -> None:
    session = session_of(runtime)
    await talk(session, runtime, 3)
    before = session.messages, session.tokens
    with anyio.CancelScope() as scope:
        scope.cancel()
        await session.compact(m3.Compaction(keep_turns=1))
    assert (session.messages, session.tokens) == before
    runtime.says("x")
    async with session.stream("Go") as events:
        await anext(events)
        with pytest.raises(m3.SessionBusy):
            await session.compact()
    check_log(runtime, session)


@pytest.mark.parametrize("options", [{"at": 0.0}, {"at": 1.5}, {"keep_turns": -1}])
def test_rules_that_make_no_sense_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="has to be"):
        m3.Compaction(**options)  # pyright: ignore[reportArgumentType]


async def test_pages_and_pictures_on_the_real_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what follows the first change is computed again; pictures after it are where they belong; pages go back."""
    config = replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=16384))
    write_checkpoint(tmp_path, config)
    tokens: deque[int] = deque()
    monkeypatch.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
    async with m3.Runtime.open(tmp_path, cache_tokens=32768) as runtime:
        agent = m3.Agent(runtime, thinking="disabled")
        say(tokens, runtime, "One.", "Two.", "Two.")
        picture = m3.Image(np.arange(56 * 56 * 3, dtype=np.uint8).reshape(56, 56, 3))
        messages = [
            m3.Message(role="user", parts=(m3.Text(text="Look."), picture)),
            m3.Message(role="assistant", parts=(m3.ToolCall(id="call_1", name="f"),)),
            m3.Message(
                role="tool", parts=(m3.ToolResult(call_id="call_1", parts=(m3.Text(text="long " * 300), picture)),)
            ),
            m3.Message(role="assistant", parts=(m3.Text(text="Seen."),)),
            m3.Message(role="user", parts=(picture, m3.Text(text="And this?"))),
            m3.Message(role="assistant", parts=(m3.Text(text="Yes."),)),
        ]
        async with agent.session(messages) as session:
            await session.run("Well?")
            computed = runtime.stats().computed_tokens
            compacted = await session.compact(m3.Compaction(keep_turns=2, summarise=False))
            assert compacted is not None
            assert compacted.results == 1
            reply = await session.run("Go on.")
            again = runtime.stats().computed_tokens - computed
            head = session.tokens.index(runtime.tokenizer.control["]~b]"])
            assert head < again < compacted.after  # the head and the first message were not computed again
            assert reply.usage.media_tokens == 4  # the last picture alone was
            async with agent.session(session.messages[:-2]) as fresh:
                await fresh.run("Go on.")
                ours, theirs = session._history.log, fresh._history.log
                assert ours is not None
                assert theirs is not None
                assert ours.tokens == theirs.tokens
                np.testing.assert_allclose(await ours.sequence.logits(), await theirs.sequence.logits(), atol=1e-4)
        assert runtime.stats().used_pages == 0
