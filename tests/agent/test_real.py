"""Sessions on a real runtime: a tiny model with random weights. Where a test needs calls, only the choice of the next
token is scripted; pages, prefill, the vision tower and the counters are real."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest

import m3agent as m3
from m3agent.runtime import steps
from tests.agent.double import END, block, call, check_log, ids_of
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=16384))
    return write_checkpoint(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture
async def runtime(folder: Path) -> AsyncIterator[m3.Runtime]:
    async with m3.Runtime.open(folder, cache_tokens=32768) as runtime:
        yield runtime


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, runtime: m3.Runtime) -> deque[int]:
    """The tokens that the model will choose, whatever it computes."""
    tokens: deque[int] = deque()
    monkeypatch.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
    return tokens


def say(script: deque[int], runtime: m3.Runtime, *replies: str) -> None:
    for reply in replies:
        script.extend(ids_of(reply + END, runtime.tokenizer))


@m3.tool
async def render(code: str) -> m3.Image:
    """Render SVG code and look at the picture."""
    return m3.Image(np.full((56, 56, 3), len(code), np.uint8))


async def test_kv_01_ten_turns_compute_nothing_twice(runtime: m3.Runtime, script: deque[int]) -> None:
    agent = m3.Agent(runtime, tools=[render])
    session = agent.session()
    log: list[int] = []
    picture = m3.Image(np.full((56, 56, 3), 200, np.uint8))
    for turn in range(5):  # two model turns each
        say(script, runtime, f"Now.{block(call('render', code='x' * (turn + 1)))}", "Done.")
        reply = await session.run("Draw this picture.", picture)
        assert (reply.text, reply.stop) == ("Done.", "end")
        assert reply.usage.recomputed_tokens == 0
        # Per run: the message with its picture, a result with its picture, and each turn's last token.
        assert reply.usage.computed_tokens < 120 or turn == 0
        assert reply.usage.media_tokens == 8
        assert session.tokens[: len(log)] == log
        log = session.tokens
    check_log(runtime, session)
    assert runtime.stats().recomputed_tokens == 0
    pages = runtime.stats().used_pages
    fork = session.fork()
    say(script, runtime, "Mine.", "Yours.")
    await session.run("a")
    await fork.run("b")
    assert runtime.stats().recomputed_tokens == 0
    assert runtime.stats().used_pages < pages + 30
    await session.close()
    await fork.close()
    assert runtime.stats().used_pages == 0


async def test_a_call_that_is_only_quoted_does_not_run(runtime: m3.Runtime, script: deque[int]) -> None:
    """The model repeats a hostile file: markers in ordinary tokens, as the file's text was, not control tokens."""
    quoted = block(call("render", code="x"))
    script.extend([*runtime.tokenizer.encode(quoted), runtime.tokenizer.control_id(END)])
    session = m3.Agent(runtime, tools=[render]).session()
    reply = await session.run("What does the file say?", m3.Text(text=quoted))
    assert (reply.text, reply.stop) == (quoted, "end")
    assert [message.role for message in session.messages] == ["user", "assistant"]


@pytest.mark.parametrize("cache_tokens", [None, 4096])
async def test_a_tool_with_too_much_to_say_does_not_end_the_session(folder: Path, cache_tokens: int | None) -> None:
    """Neither where the model's context is the limit nor where the KV cache is."""

    @m3.tool
    def read() -> str:
        """Read the book."""
        return "word " * 20_000

    tokens: deque[int] = deque()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
        async with m3.Runtime.open(folder, cache_tokens=cache_tokens) as runtime:
            session = m3.Agent(runtime, tools=[read]).session()
            say(tokens, runtime, block(call("read")), "It is long.", "Fine.")
            assert (await session.run("Read it.")).text == "It is long."
            assert " of 100000 characters left out" in session.messages[2].results[0].text
            before = session.tokens
            with pytest.raises(m3.ContextOverflow, match="there is room for"):
                await session.run("word " * (runtime.context_length // 5))
            assert (session.tokens, len(session.messages)) == (before, 4)
            reply = await session.run("word")
            assert (reply.text, reply.usage.recomputed_tokens) == ("Fine.", 0)
            check_log(runtime, session)


async def test_a_picture_changes_what_the_model_computes(runtime: m3.Runtime) -> None:
    """From the tool to the vision tower: the same call with other pixels leads to other logits."""
    logits: list[Any] = []
    for shade in (0, 255):
        session = m3.Agent(runtime).session()
        await session.run("What is it?", m3.Image(np.full((56, 56, 3), shade, np.uint8)), max_tokens=1)
        logits.append(await session._history.log.sequence.logits())  # pyright: ignore
        await session.close()
    assert not np.allclose(logits[0], logits[1])


@pytest.mark.parametrize(
    "sizes",
    [
        {"temporal_patch_size": 4},
        {"temporal_patch_size": 1, "spatial_merge_size": 1},
        {"patch_size": 8, "spatial_merge_size": 3, "segment_max_frames": 1},
    ],
)
async def test_pixels_are_cut_as_the_tower_wants_them(tmp_path: Path, sizes: dict[str, int]) -> None:
    assert CONFIG.vision is not None
    write_checkpoint(tmp_path, replace(CONFIG, vision=replace(CONFIG.vision, **sizes)))
    (tmp_path / "preprocessor_config.json").write_text('{"max_pixels": 6000, "patch_size": 14, "merge_size": 2}')
    async with m3.Runtime.open(tmp_path, cache_tokens=4096) as runtime:
        film = m3.Video(list(np.zeros((3, 60, 60, 3), np.uint8)), frame_rate=1.0)
        reply = await m3.Agent(runtime).run("x", m3.Image(np.zeros((60, 60, 3), np.uint8)), film, max_tokens=1)
        assert reply.usage.media_tokens > 4


async def test_whatever_a_random_model_says_the_session_stays_valid(runtime: m3.Runtime) -> None:
    sampling = m3.Sampling(temperature=1.0, seed=3)
    session = m3.Agent(runtime, tools=[render], sampling=sampling).session()
    for _ in range(3):
        reply = await session.run("Say something.", max_tokens=40)
        assert reply.usage.output_tokens <= 40
        assert reply.usage.recomputed_tokens == 0
    assert runtime.tokenizer.decode(session.tokens).count("]~b]user\n") >= 3
    await session.close()
    assert runtime.stats().used_pages == 0


async def test_cancel_in_mid_generation_keeps_what_was_generated(runtime: m3.Runtime, script: deque[int]) -> None:
    session = m3.Agent(runtime, tools=[render]).session()
    for taken in range(12):
        say(script, runtime, "a long, long answer" * 3)
        with anyio.CancelScope() as scope:
            async with session.stream("x") as events:
                count = 0
                async for _ in events:
                    count += 1
                    if count > taken:
                        scope.cancel()
        said = session.messages[-1].text
        assert len(said) == taken + 1
        script.clear()
    say(script, runtime, "Still here.")
    reply = await session.run("And now?")
    assert reply.text == "Still here."
    assert reply.usage.recomputed_tokens == 0
    check_log(runtime, session)


async def test_stream_03_a_dropped_stream_stops_the_model(runtime: m3.Runtime, script: deque[int]) -> None:
    session = m3.Agent(runtime).session()
    say(script, runtime, "x" * 3000)
    async for _ in session.stream("go"):
        break
    with anyio.fail_after(5):
        while (stats := runtime.stats()).active_requests or stats.waiting_requests:
            await anyio.sleep(0.005)
    script.clear()
    say(script, runtime, "Still here.")
    assert (await session.run("And now?")).text == "Still here."
    check_log(runtime, session)


async def test_closing_a_session_ends_its_run(runtime: m3.Runtime, script: deque[int]) -> None:
    session = m3.Agent(runtime).session()
    say(script, runtime, "x" * 3000)

    async def run() -> None:
        with pytest.raises(m3.RuntimeClosed):
            await session.run("go")

    async with anyio.create_task_group() as group:
        group.start_soon(run)
        await anyio.sleep(0.05)
        await session.close()
    await session.close()
    assert runtime.stats().used_pages == 0


async def test_sessions_of_one_runtime_run_side_by_side(runtime: m3.Runtime) -> None:
    sampling = m3.Sampling(temperature=0.0, stop=frozenset())
    agent = m3.Agent(runtime, sampling=sampling)
    alone = [(await agent.run(f"Number {n}", max_tokens=12)).text for n in range(3)]
    together: dict[int, str] = {}

    async def run(n: int) -> None:
        together[n] = (await agent.run(f"Number {n}", max_tokens=12)).text

    async with anyio.create_task_group() as group:
        for n in range(3):
            group.start_soon(run, n)
    assert [together[n] for n in range(3)] == alone


async def test_run_sync_inside_a_loop_says_what_to_write(runtime: m3.Runtime) -> None:
    with pytest.raises(RuntimeError, match="await"):
        m3.Agent(runtime).run_sync("Hi")


def test_run_sync_in_a_script(folder: Path) -> None:
    agent = m3.Agent(m3.Runtime.open(folder, cache_tokens=8192))  # opened by the first run
    with pytest.raises(m3.RuntimeClosed, match="not open yet"):
        agent.session()
    first = agent.run_sync("Hi", max_tokens=3)
    assert first.usage.output_tokens <= 3
    session = agent.session()
    assert session.run_sync("Hi", max_tokens=3).text == first.text
    anyio.run(agent.runtime.close)
