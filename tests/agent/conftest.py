"""Scripted runtimes for the turn loop, and a tiny real one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from m3agent.chat import Tokenizer
from tests.agent.double import Fuse, ScriptedRuntime, make_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return make_tokenizer(folder)


@pytest.fixture
def runtime(tokenizer: Tokenizer) -> ScriptedRuntime:
    return ScriptedRuntime(tokenizer)


@pytest.fixture
def fused_threads(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fuse], None]:
    """Waiting for a thread is a waiting point, too."""
    real = anyio.to_thread.run_sync

    def install(fuse: Fuse) -> None:
        async def run_sync(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            await fuse.point()
            result = await real(function, *args, **options)
            await fuse.point()
            return result

        monkeypatch.setattr(anyio.to_thread, "run_sync", run_sync)

    return install
