"""A recorded run in which the session made room is said again: its log is cut, and pictures with it."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import m3agent as m3
from m3agent.runtime import steps
from m3agent.testing import ReplayMismatch, record, replay
from tests.agent.double import block, call
from tests.agent.test_real import say
from tests.runtime.tiny import CONFIG, write_checkpoint

pytestmark = pytest.mark.anyio


def picture(shade: int) -> m3.Image:
    return m3.Image(np.full((56, 56, 3), shade, np.uint8))


@m3.tool
def look(letters: int) -> list[object]:
    return ["y" * letters, picture(9)]


async def one_run(runtime: object, shades: tuple[int, int] = (1, 2)) -> list[m3.Message]:
    agent = m3.Agent(runtime, tools=[look], thinking="disabled", guided=False)  # pyright: ignore[reportArgumentType]
    async with agent.session() as session:
        await session.run("a", picture(shades[0]))
        await session.run("b", picture(shades[1]))
        compacted = await session.compact(m3.Compaction(keep_turns=1))
        assert compacted is not None
        assert (compacted.results, compacted.turns) == (1, 2)
        await session.run("c")
        session.rewind(2)
        await session.run("d", picture(3))
        return session.messages


async def test_a_run_with_compaction_and_rewinding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, replace(CONFIG, text=replace(CONFIG.text, max_position_embeddings=16384)))
    tokens: deque[int] = deque()
    with monkeypatch.context() as patched:
        patched.setattr(steps, "choose", lambda logits, sampling, source, allowed: (tokens.popleft(), 0.0))
        async with m3.Runtime.open(tmp_path, cache_tokens=32768) as opened:
            async with record(opened, tmp_path / "run.json", model=tmp_path) as runtime:
                said = (block(call("look", letters="2000")), "One. " * 60, "Two.", "SUMMARY", "Three.", "Four.")
                say(tokens, opened, *said)
                recorded = await one_run(runtime)
            assert opened.stats().used_pages == 0
    assert not tokens
    async with replay(tmp_path / "run.json") as runtime:
        assert await one_run(runtime) == recorded
    for shades in ((7, 2), (1, 7)):
        with pytest.raises(ReplayMismatch, match="a picture or film in it is another one"):
            await one_run(replay(tmp_path / "run.json"), shades)
