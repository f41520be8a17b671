"""Commands under bubblewrap: what they can write, read, reach and leave behind."""

from __future__ import annotations

import os
import re
import shutil
import socket
from pathlib import Path

import pytest

import m3agent as m3
from m3agent.tools import Sandbox
from tests.tools.processes import call, eventually

pytestmark = [pytest.mark.anyio, pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is absent")]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


async def sh(command: str, root: Path, sandbox: Sandbox | None = None, seconds: float = 60) -> str:
    (text,) = await call(m3.tools.shell(root, sandbox=sandbox or Sandbox(), seconds=seconds), command)
    assert isinstance(text, str)
    return text


async def test_only_the_root_is_written(root: Path) -> None:
    beside = root.parent / "beside"
    beside.mkdir()
    assert await sh("pwd; echo made > here && cat here", root) == f"{root}\nmade\n[exit code 0]"
    assert (root / "here").read_text() == "made\n"
    for target in (beside / "x", Path("/etc/m3agent-test"), Path("/usr/m3agent-test")):
        await sh(f"echo no > {target}", root)
        assert not target.exists()
    assert "Read-only file system" in await sh("echo no > /etc/m3agent-test", root)
    await sh("echo gone > /tmp/m3agent-sandbox; echo gone > ~/m3agent-sandbox", root)
    assert not Path("/tmp/m3agent-sandbox").exists()
    assert not (Path.home() / "m3agent-sandbox").exists()


async def test_home_and_tmp_are_hidden_but_for_what_is_named(root: Path) -> None:
    secret = root.parent / "secret"
    secret.mkdir()
    (secret / "key").write_text("hunter2")
    assert "hunter2" not in await sh(f"cat {secret}/key", root)
    assert "hunter2" in await sh(f"cat {secret}/key", root, Sandbox(readable=[secret]))
    await sh(f"echo changed > {secret}/key", root, Sandbox(readable=[secret]))
    assert (secret / "key").read_text() == "hunter2"
    await sh(f"echo changed > {secret}/key", root, Sandbox(writable=[secret]))
    assert (secret / "key").read_text() == "changed\n"


async def test_network_only_when_asked_for(root: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        reach = f"(exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}) && echo reached"
        assert "reached" not in await sh(reach, root)
        assert "reached" in await sh(reach, root, Sandbox(network=True))


async def test_no_other_process_is_seen_and_none_is_left(root: Path) -> None:
    assert str(os.getpid()) not in await sh("ls /proc", root)
    # A daemon in a session of its own, with an emptied environment: outside nothing would tell whose it is.
    daemon = "setsid env -i sh -c 'exec -a m3agent-sandbox-daemon sleep 600' >/dev/null 2>&1 &"
    await sh(f"{daemon} sleep 0.3", root)
    names = [path for path in Path("/proc").glob("[0-9]*/cmdline") if b"m3agent-sandbox-daemon" in _bytes(path)]
    assert names == []


async def test_the_time_limit_ends_all_of_it(root: Path) -> None:
    text = await sh("trap '' TERM; sleep 601 & echo begun; wait; sleep 602", root, seconds=1)
    assert text.startswith("begun\n[stopped: the time limit of 1 s")

    def ended() -> bool:
        return not any(b"sleep\x0060" in _bytes(path) for path in Path("/proc").glob("[0-9]*/cmdline"))

    await eventually(ended)


async def test_a_long_output_can_be_read_in_the_next_call(root: Path) -> None:
    tools = m3.tools.shell(root, sandbox=Sandbox())
    (text,) = await call(tools, "seq 100000")
    path = re.search(r"full output: (\S+)\]", text)
    assert path is not None
    assert await call(tools, f"sed -n 50000p {path[1]}") == ["50000\n[exit code 0]"]


async def test_exit_codes_and_signals_are_told(root: Path) -> None:
    assert await sh("exit 3", root) == "[exit code 3]"
    assert "SIGKILL" in await sh("kill -9 $$", root)


def test_what_cannot_be_had_is_said_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(m3.ToolDefinitionError, match="is no folder"):
        m3.tools.shell(root, sandbox=Sandbox(writable=[root / "missing"]))
    with pytest.raises(m3.ToolDefinitionError, match="keep_background"):
        m3.tools.shell(root, sandbox=Sandbox(), keep_background=True)
    monkeypatch.setenv("PATH", str(root))
    with pytest.raises(m3.ToolDefinitionError, match="apt-get install bubblewrap"):
        m3.tools.shell(root, sandbox=Sandbox())


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
