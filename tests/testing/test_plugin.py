"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import m3agent
from tests.test_examples import needs_nano

SOURCE = Path(m3agent.__file__).parent.parent

TESTS = """
import pytest
import m3agent as m3
from m3agent import testing

pytestmark = pytest.mark.anyio

@pytest.fixture
def anyio_backend():
    return "asyncio"

async def test_scripted(m3_scripted):
    async with m3_scripted(["Hello."]) as runtime:
        assert (await m3.Agent(runtime).run("Hi")).text == "Hello."

async def test_recorded(m3_recorded):
    async with m3_recorded() as runtime:
        reply = await m3.Agent(runtime, sampling=m3.Sampling(0.0, max_tokens=8)).run("Hi")
        assert reply.usage.output_tokens > 0
"""


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "PYTEST_ADDOPTS": ""}
    plugin = [] if _installed() else ["-p", "m3agent.testing.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )


def _installed() -> bool:
    from importlib.metadata import entry_points

    return any(point.name == "m3agent" for point in entry_points(group="pytest11"))


@needs_nano
def test_fixtures_and_recording(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    missing = pytest_in(tmp_path)
    assert "1 failed, 1 passed" in missing.stdout
    assert "run pytest --m3-record once" in missing.stdout
    assert "2 passed" in pytest_in(tmp_path, "--m3-record").stdout
    assert (tmp_path / "recordings" / "test_it-test_recorded.json").is_file()
    assert "2 passed" in pytest_in(tmp_path).stdout


def test_the_plugin_imports_nothing_until_it_is_used() -> None:
    code = "import sys, m3agent.testing.pytest_plugin; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "torch" not in done.stdout.split()
    assert "m3agent.agent" not in done.stdout.split()
