"""The pytest plugin: the fixtures `m3_scripted` and `m3_recorded`, and the option --m3-record.

pytest finds it by its entry point; until a test asks for a fixture, nothing of m3agent is imported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from m3agent.testing import ScriptedRuntime


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("m3agent").addoption(
        "--m3-record", action="store_true", help="record the runs of m3_recorded anew, with the real model"
    )


@pytest.fixture
def m3_scripted() -> Callable[..., ScriptedRuntime]:
    """`async with m3_scripted([…]) as runtime:`, see `m3agent.testing.scripted`."""
    from m3agent.testing import scripted

    return scripted


@pytest.fixture
def m3_recorded(request: pytest.FixtureRequest) -> Callable[..., AbstractAsyncContextManager[Any]]:
    """`async with m3_recorded() as runtime:` replays `recordings/TEST_FILE-TEST_NAME.json` beside the test file.

    With --m3-record the real model (`m3_recorded(model="folder")`; the embedded one unless given) runs and is recorded.
    """
    name = f"{request.path.stem}-{request.node.originalname}.json"

    @asynccontextmanager
    async def recorded(model: str | Path | None = None, name: str = name) -> AsyncIterator[Any]:
        from m3agent import Runtime
        from m3agent.testing import record, replay

        path = request.path.parent / "recordings" / name
        if request.config.getoption("--m3-record"):
            path.parent.mkdir(exist_ok=True)
            async with Runtime.open(model) as opened, record(opened, path, model=model) as runtime:
                yield runtime
        elif path.exists():
            async with replay(path) as runtime:
                yield runtime
        else:
            pytest.fail(f"{path} is missing: run pytest --m3-record once, with the model")

    return recorded
