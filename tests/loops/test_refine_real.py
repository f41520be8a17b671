"""The loop on a real session and runtime: resvg's pictures go through the vision tower, calls through the parser."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from m3agent.agent import Agent
from m3agent.content import Text
from m3agent.loops import PixelMatch, SvgRenderer, refine, render_tool
from m3agent.runtime import Runtime
from tests.loops.rigged import rig, write_rigged_checkpoint

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 56 56">\n<circle cx="{}" cy="28" r="9" fill="red"/>\n</svg>'
RENDERER = SvgRenderer((56, 56))
TARGET = RENDERER.render(SVG.format(30))
pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rigged_checkpoint(tmp_path_factory.mktemp("rigged"))


@pytest.fixture
async def runtime(checkpoint: Path, anyio_backend: str) -> AsyncIterator[Runtime]:
    async with Runtime.open(checkpoint, cache_tokens=8192) as runtime:
        yield runtime


async def test_look_draft_mend(runtime: Runtime):
    turns = [[SVG.format(12)], ["<svg><oops"], [SVG.format(30)], "Done."]
    rig(runtime, turns, render_tool(RENDERER).definition)
    async with Agent(runtime).session() as session:
        checks = [PixelMatch(TARGET)]
        result = await refine(session, ["Draw this picture.", TARGET], render=RENDERER, checks=checks)
        assert [step.code for step in result.steps] == [SVG.format(12), "<svg><oops", SVG.format(30)]
        first, broken, last = result.steps
        assert first.image == RENDERER.render(SVG.format(12))
        assert 0.8 < first.score < 0.99
        assert broken.image is None
        assert last.passed
        assert last.image == TARGET
        assert result.stopped == "passed"
        assert result.best is last
        assert result.usage.recomputed_tokens == 0
        results = [part for message in session.messages for part in message.results]
        assert results[0].parts == (first.image,)
        assert results[1].parts == (Text(text=broken.error),)
        reply = await session.run()  # the session goes on behind the loop
        assert reply.text == "Done."
        assert runtime.tokenizer.decode(session.tokens).count("]<]image[>[") == 3 * 4  # 2 × 2 merged patches each
    assert runtime.stats().used_pages == 0


async def test_the_model_ends_by_itself(runtime: Runtime):
    rig(runtime, [[SVG.format(12)], "Done."], render_tool(RENDERER).definition)
    async with Agent(runtime).session() as session:
        result = await refine(session, ["Draw this picture.", TARGET], render=RENDERER, checks=[PixelMatch(TARGET)])
        assert (result.stopped, result.text, len(result.steps)) == ("answered", "Done.", 1)


async def test_without_pictures_no_picture_token_is_in_the_log(runtime: Runtime):
    rig(runtime, [[SVG.format(12)], "Done."], render_tool(RENDERER).definition)
    async with Agent(runtime).session() as session:
        result = await refine(
            session,
            ["Draw this picture.", TARGET],
            render=RENDERER,
            checks=[PixelMatch(TARGET)],
            pictures=False,
        )
        assert result.steps[0].image is not None
        text = runtime.tokenizer.decode(session.tokens)
        assert "]<]image[>[" not in text
        assert "rendered" in text
