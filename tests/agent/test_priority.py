"""A run's priority reaches the engine."""

from pathlib import Path

import pytest

from m3agent.agent import Agent
from m3agent.runtime import Runtime
from m3agent.testing import record
from tests.runtime.tiny import write_checkpoint

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("recorded", [False, True])
async def test_the_calls_of_a_run_have_its_priority(tmp_path: Path, recorded: bool) -> None:
    async with Runtime.open(write_checkpoint(tmp_path), cache_tokens=2048) as runtime:
        seen: list[int] = []
        submit = runtime.engine.submit
        runtime.engine.submit = lambda request: seen.append(request.priority) or submit(request)
        agent = Agent(record(runtime, tmp_path / "run.json") if recorded else runtime, max_turns=1)
        session = agent.session()
        for options in ({"priority": 3}, {}, {"priority": -1}):
            await session.run("Hello", max_tokens=2, **options)
        assert seen == [3, 0, -1]
