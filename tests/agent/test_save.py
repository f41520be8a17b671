"""Saved sessions: the file, what becomes of it when it is damaged, and named ones that outlive the process."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import m3agent as m3
from m3agent.model import save_checkpoint
from m3agent.runtime import Runtime
from tests.agent.double import ScriptedRuntime, block, call, make_tokenizer
from tests.runtime.tiny import CONFIG, random_tensors, uncached_logits, write_checkpoint

pytestmark = pytest.mark.anyio
BIG = dataclasses.replace(CONFIG, text=dataclasses.replace(CONFIG.text, max_position_embeddings=8192))
Open = Callable[..., object]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), BIG)


@pytest.fixture
async def runtime(checkpoint: Path, anyio_backend: str) -> AsyncIterator[Runtime]:
    async with Runtime.open(checkpoint, cache_tokens=8192) as runtime:
        yield runtime


def picture(seed: int) -> m3.Image:
    return m3.Image(np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8))


@m3.tool
def weather(city: str) -> str:
    """Say how the weather is.

    Args:
        city: where.
    """
    return f"rain in {city}"


async def talked(agent: m3.Agent, *said: m3.Image | str) -> m3.Session:
    """A session with some turns of 20 tokens."""
    session = agent.session()
    for part in said:
        await session.run(part, max_tokens=20)
    return session


async def goes_on_alike(session: m3.Session, restored: m3.Session) -> m3.Usage:
    """Both say the same next; returns what the restored one used."""
    one = await session.run("And then?", max_tokens=20)
    two = await restored.run("And then?", max_tokens=20)
    assert one.text == two.text
    assert session.tokens == restored.tokens
    return two.usage


# The file -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pages", [False, True])
async def test_a_saved_session_goes_on_with_its_very_tokens(
    runtime: Runtime, checkpoint: Path, tmp_path: Path, pages: bool
) -> None:
    agent = m3.Agent(runtime, instructions="Be brief.", tools=[weather])
    session = await talked(agent, "Hello", picture(1), "What was that?")
    await session.save(tmp_path / "s.m3session", pages=pages)
    before = session.tokens
    async with Runtime.open(checkpoint, cache_tokens=8192) as other:
        twin = m3.Agent(other, instructions="Be brief.", tools=[weather])
        restored = await twin.restore(tmp_path / "s.m3session")
        assert restored.tokens == before
        assert restored.messages == session.messages
        usage = await goes_on_alike(session, restored)
        full = (len(before) - 1) // 8 * 8 if pages else 0
        assert usage.reused_tokens == full
        assert usage.computed_tokens == usage.prompt_tokens - full
    assert os.listdir(tmp_path) == ["s.m3session"]


async def test_in_the_same_runtime_the_pages_are_found_without_the_file_having_them(
    runtime: Runtime, tmp_path: Path
) -> None:
    agent = m3.Agent(runtime)
    session = await talked(agent, "Hello there", picture(2))
    await session.save(tmp_path / "s")
    restored = await agent.restore(tmp_path / "s")
    usage = await goes_on_alike(session, restored)
    assert usage.reused_tokens >= (len(session.messages) > 0) * 8
    assert usage.computed_tokens < 60


async def test_a_session_without_turns(runtime: Runtime, tmp_path: Path) -> None:
    agent = m3.Agent(runtime)
    await agent.session().save(tmp_path / "s", pages=True)
    restored = await agent.restore(tmp_path / "s")
    assert restored.messages == []
    await restored.run("Hello", max_tokens=3)


async def test_pending_calls_and_waiting_results_are_kept(runtime: Runtime, tmp_path: Path) -> None:
    asked = m3.ToolCall(id="call_1", name="weather", arguments={"city": "Ulm"})
    messages = [
        m3.Message(role="user", parts=(m3.Text(text="Weather?"),)),
        m3.Message(role="assistant", parts=(asked,)),
    ]
    agent = m3.Agent(runtime, tools=[weather])
    session = agent.session(messages)
    await session.save(tmp_path / "s")
    restored = await agent.restore(tmp_path / "s")
    assert restored.pending == (asked,)
    restored.answer([m3.ToolResult(call_id="call_1", parts=(m3.Text(text="sun"),))])
    await restored.save(tmp_path / "s")
    again = await agent.restore(tmp_path / "s")
    assert again.pending == ()
    await again.run(max_tokens=4)
    assert "sun" in runtime.tokenizer.decode(again.tokens)


@pytest.mark.parametrize("change", ["weights", "instructions", "thinking", "starts"])
async def test_with_something_else_only_the_messages_count(
    runtime: Runtime, checkpoint: Path, tmp_path: Path, change: str
) -> None:
    session = await talked(m3.Agent(runtime, instructions="Be brief."), "Hello", "Again")
    file = tmp_path / "s"
    await session.save(file, pages=True)
    folder = checkpoint
    if change == "weights":
        folder = write_checkpoint(tmp_path / "other", BIG) if (tmp_path / "other").mkdir() is None else checkpoint
        save_checkpoint(folder, BIG, random_tensors(BIG, seed=1))
    if change == "starts":
        rewrite(file, lambda text: text.replace('"starts":[', '"starts":[0,'))
    async with Runtime.open(folder, cache_tokens=8192) as other:
        agent = m3.Agent(
            other,
            instructions="Be long." if change == "instructions" else "Be brief.",
            thinking="enabled" if change == "thinking" else None,
        )
        restored = await agent.restore(file)
        assert restored.messages == session.messages
        assert restored.tokens == []
        reply = await restored.run("Go on", max_tokens=3)
        assert reply.usage.reused_tokens == 0


def rewrite(file: Path, change: Callable[[str], str]) -> None:
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    parts["session.json"] = change(parts["session.json"].decode()).encode()
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)


async def test_files_that_are_none(runtime: Runtime, tmp_path: Path) -> None:
    agent = m3.Agent(runtime)
    file = tmp_path / "s"
    with pytest.raises(m3.SessionFileError, match="cannot be read"):
        await agent.restore(file)
    for data in (b"", b"no archive", b"PK\x03\x04 cut"):
        file.write_bytes(data)
        with pytest.raises(m3.SessionFileError, match="no saved session"):
            await agent.restore(file)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("other", "x")
    with pytest.raises(m3.SessionFileError, match="no saved session"):
        await agent.restore(file)
    await (await talked(agent, "Hello")).save(file)
    rewrite(file, lambda text: text.replace("m3agent session 1", "m3agent session 9"))
    with pytest.raises(m3.SessionFileError, match="'m3agent session 9'"):
        await agent.restore(file)
    await (await talked(agent, "Hello")).save(file)
    rewrite(file, lambda text: text.replace('"role":"user"', '"role":"tool"', 1))
    with pytest.raises(m3.SessionFileError, match=r"no saved session|no conversation"):
        await agent.restore(file)


def test_damage_is_told_or_leads_to_the_same_tokens(checkpoint: Path, tmp_path: Path) -> None:
    """Bits flipped and ends cut: an error, or a session whose next logits are those of its own tokens."""

    async def saved() -> bytes:
        async with Runtime.open(checkpoint, cache_tokens=8192) as runtime:
            session = await talked(m3.Agent(runtime), "Hello", "Again")
            await session.save(tmp_path / "s", pages=True)
            return (tmp_path / "s").read_bytes()

    whole = anyio.run(saved)

    @settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.data())
    def damaged(data: st.DataObject) -> None:
        content = bytearray(whole)
        for _ in range(data.draw(st.integers(1, 3))):
            place = data.draw(st.integers(0, len(content) - 1))
            content[place] ^= 1 << data.draw(st.integers(0, 7))
        cut = data.draw(st.sampled_from([len(content), len(content), len(content) // 2, len(content) - 30]))
        (tmp_path / "d").write_bytes(bytes(content[:cut]))

        async def check() -> None:
            async with Runtime.open(checkpoint, cache_tokens=4096) as runtime:
                model = runtime.engine._steps.model
                try:
                    restored = await m3.Agent(runtime).restore(tmp_path / "d")
                except m3.M3Error:
                    return
                log = restored._history.log
                if log is None:
                    return
                cached = await log.sequence.logits()
                tokens = log.tokens
                np.testing.assert_allclose(cached, uncached_logits(model, tokens)[-1], atol=1e-4)

        anyio.run(check)

    damaged()


async def test_a_disk_that_is_full_leaves_what_was_there(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = m3.Agent(runtime)
    session = await talked(agent, "Hello")
    await session.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    await session.run("More", max_tokens=5)

    def full(self: zipfile.ZipFile, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    with pytest.raises(m3.SessionFileError, match="No space left"):
        await session.save(tmp_path / "s")
    monkeypatch.undo()
    assert (tmp_path / "s").read_bytes() == before
    assert os.listdir(tmp_path) == ["s"]
    await session.run("Still here", max_tokens=5)


async def test_a_save_that_is_cancelled_leaves_what_was_there(runtime: Runtime, tmp_path: Path) -> None:
    session = await talked(m3.Agent(runtime), "Hello", "Hello again")
    await session.save(tmp_path / "s")
    before = (tmp_path / "s").read_bytes()
    for wait in (0, 0.0005, 0.001, 0.002, 0.004):
        with anyio.move_on_after(wait):
            await session.save(tmp_path / "s", pages=True)
        assert len(os.listdir(tmp_path)) == 1
        content = (tmp_path / "s").read_bytes()
        assert content == before or zipfile.is_zipfile(tmp_path / "s")
    await session.run("Still here", max_tokens=5)


# By name ------------------------------------------------------------------------------------------------------------


async def test_named_sessions_go_on_where_they_were(runtime: Runtime, tmp_path: Path) -> None:
    agent, sessions = m3.Agent(runtime), m3.Sessions(tmp_path)
    async with sessions.open(agent, "alice") as session:
        await session.run("I am Alice", max_tokens=8)
        tokens = session.tokens
        fork = session.fork()
        await fork.run("not kept", max_tokens=4)
    async with sessions.open(agent, "alice") as session:
        assert session.tokens == tokens
        assert len(session.messages) == 2
    async with sessions.open(agent, "../b/ö.x") as session:
        assert session.messages == []
    assert [each.name for each in sessions.names()] == ["../b/ö.x", "alice"]
    assert all(path.parent == tmp_path for path in tmp_path.rglob("*"))
    assert sessions.delete("alice")
    assert not sessions.delete("alice")
    async with sessions.open(agent, "alice") as session:
        assert session.messages == []


@pytest.mark.parametrize("name", ["", "x" * 181, "ö" * 60])
async def test_names_that_are_no_file(runtime: Runtime, tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name has 1 to 180"):
        async with m3.Sessions(tmp_path).open(m3.Agent(runtime), name):
            pass


async def test_one_session_is_open_once(runtime: Runtime, tmp_path: Path) -> None:
    agent = m3.Agent(runtime)
    async with m3.Sessions(tmp_path).open(agent, "alice"):
        with pytest.raises(m3.SessionBusy):
            async with m3.Sessions(tmp_path).open(agent, "alice"):
                pass
        with pytest.raises(m3.SessionBusy):
            m3.Sessions(tmp_path).delete("alice")
        async with m3.Sessions(tmp_path).open(agent, "bob"):
            pass
    async with m3.Sessions(tmp_path).open(agent, "alice"):
        pass


async def test_a_session_whose_time_is_over_is_gone(runtime: Runtime, tmp_path: Path) -> None:
    agent, sessions = m3.Agent(runtime), m3.Sessions(tmp_path, ttl=3600)
    for name in ("old", "new", "open"):
        async with sessions.open(agent, name) as session:
            await session.run("Hello", max_tokens=2)
    for name in ("old", "open"):
        os.utime(tmp_path / f"{name}.m3session", (0, time.time() - 4000))
    async with m3.Sessions(tmp_path).open(agent, "open") as session:
        assert [each.name for each in sessions.names()] == ["new", "open"]
        assert session.messages
    with pytest.raises(ValueError, match="ttl"):
        m3.Sessions(tmp_path, ttl=0)


async def test_a_turn_is_saved_before_its_calls_run(runtime: Runtime, tmp_path: Path) -> None:
    """What a process finds that is killed inside a tool: the turn, and its call pending."""
    found: list[list[m3.Message]] = []

    @m3.tool
    async def look(context: m3.Context) -> str:
        """Look."""
        saved = await m3.Agent(scripted, tools=[look]).restore(tmp_path / "alice.m3session")
        found.append(saved.messages)
        assert [each.name for each in saved.pending] == ["look"]
        return "seen"

    scripted = ScriptedRuntime(make_tokenizer(tmp_path)).says(block(call("look")), "Done.")
    async with m3.Sessions(tmp_path).open(m3.Agent(scripted, tools=[look]), "alice") as session:
        assert (await session.run("Look")).text == "Done."
    assert [message.role for message in found[0]] == ["user", "assistant"]


PROGRAM = """
import sys, anyio, m3agent as m3

async def main():
    async with m3.Runtime.open(sys.argv[1], cache_tokens=4096) as runtime:
        async with m3.Sessions(sys.argv[2], pages=True).open(m3.Agent(runtime), "alice") as session:
            print("open", len(session.messages), flush=True)
            while True:
                await session.run("Go on", max_tokens=6)
                print("turn", len(session.messages), flush=True)

anyio.run(main)
"""


@pytest.mark.parametrize("after", [0.0, 0.01, 0.05])
def test_a_killed_process_loses_the_running_turn_at_most(checkpoint: Path, tmp_path: Path, after: float) -> None:
    known = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(checkpoint), str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        try:
            word, count = child.stdout.readline().split()
            assert (word, int(count) >= known) == ("open", True)
            for _ in range(3):
                known = int(child.stdout.readline().split()[1])
            time.sleep(after)
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()
            child.stdout.close()
    assert known >= 10
