"""Recorded runs: what the real m3-nano generated is said again without it, and a changed run is told apart."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import m3agent as m3
from m3agent.testing import ReplayMismatch, record, replay
from tests.test_examples import needs_nano

pytestmark = [pytest.mark.anyio, needs_nano]
GREEDY = m3.Sampling(0.0, max_tokens=60)


def picture(shade: int) -> m3.Image:
    return m3.Image(np.full((224, 224, 3), shade, np.uint8))


@m3.tool(description="Render SVG code and look at the picture.")
def render(code: str) -> str:
    return "rendered"


async def one_run(runtime: object, *, words: str = "Draw this picture.", shade: int = 200) -> list[m3.Message]:
    agent = m3.Agent(runtime, tools=[render], sampling=GREEDY)
    async with agent.session() as session:
        await session.run(words, picture(shade), max_turns=2)
        async with session.fork() as other:
            await other.run("Again.", max_turns=1)
            return [*session.messages, *other.messages]


async def test_a_recorded_run_is_repeated_exactly(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    async with m3.Runtime.open() as opened, record(opened, path) as runtime:
        recorded = await one_run(runtime)
    async with replay(path) as runtime:
        assert await one_run(runtime) == recorded
        with pytest.raises(ReplayMismatch, match="no more generations"):
            await one_run(runtime)


async def test_a_changed_run_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    async with m3.Runtime.open() as opened, record(opened, path) as runtime:
        await one_run(runtime)
    with pytest.raises(ReplayMismatch, match=r"this prompt was not recorded.*it has 'Paint.*where 'Draw"):
        await one_run(replay(path), words="Paint this picture.")
    with pytest.raises(ReplayMismatch, match="a picture or film in it is another one"):
        await one_run(replay(path), shade=10)


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    for content in ("", "[]", '{"format": 1}', '{"format": 99, "generations": []}'):
        (tmp_path / "x.json").write_text(content)
        with pytest.raises(ReplayMismatch):
            replay(tmp_path / "x.json")
    with pytest.raises(ReplayMismatch, match="is no recording"):
        replay(tmp_path / "missing.json")
