"""m3agent inside other programs: notebooks, web servers, forks, threads with loops, programs that end early."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import nbformat
import pytest
from nbclient import NotebookClient

import m3agent as m3
from tests.test_examples import needs_nano

pytestmark = needs_nano
SOURCE = str(Path(m3.__file__).parent.parent)
ENVIRONMENT = {**os.environ, "PYTHONPATH": SOURCE, "OMP_NUM_THREADS": "1"}


def test_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells await in the notebook's own loop; run_sync, which has no place there, says what to write."""
    monkeypatch.setenv("PYTHONPATH", SOURCE)
    cells = [
        "import m3agent as m3\nruntime = await m3.Runtime.open()\nsession = m3.Agent(runtime).session()",
        "reply = await session.run('Hello', max_tokens=3)\nprint(reply.usage.output_tokens)",
        "async with session.stream('And?', max_tokens=3) as events:\n    print(len([1 async for _ in events]) > 0)",
        "try:\n    session.run_sync('Hello')\nexcept RuntimeError as error:\n    print(error)",
        "await runtime.close()\nprint(runtime.closed)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in notebook.cells]
    assert printed[1:3] == ["3\n", "True\n"]
    assert "a notebook has one, too" in printed[3]
    assert printed[4] == "True\n"


APP = """
import contextlib, os
import m3agent as m3
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route

@contextlib.asynccontextmanager
async def lifespan(app):
    async with m3.Runtime.open() as runtime:
        app.state.agent = m3.Agent(runtime)
        yield

async def ask(request):
    reply = await request.app.state.agent.run(request.query_params["q"], max_tokens=8)
    return PlainTextResponse(f"{os.getpid()} {reply.usage.output_tokens}")

app = Starlette(routes=[Route("/", ask)], lifespan=lifespan)
"""


def test_uvicorn_workers(tmp_path: Path) -> None:
    """Two worker processes, each with a runtime of its own, which serves its requests side by side."""
    (tmp_path / "app.py").write_text(APP)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "app:app",
        "--workers",
        "2",
        "--port",
        str(port),
        "--log-level",
        "warning",
    ]
    server = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    try:
        url = f"http://127.0.0.1:{port}/?q=Hello"

        def ask(_: int = 0) -> str:
            with urllib.request.urlopen(url, timeout=60) as response:
                return response.read().decode()

        end = time.monotonic() + 90
        while True:
            try:
                ask()
                break
            except OSError:
                assert time.monotonic() < end, "the server did not start"
                assert server.poll() is None
                time.sleep(0.2)
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(ask, range(16)))
        assert all(1 <= int(answer.split()[1]) <= 8 for answer in answers)
    finally:
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert "Traceback" not in errors, errors


FORK = """
import os, anyio
import m3agent as m3

async def opened():
    return await m3.Runtime.open()

async def ask(runtime, name):
    print(name, (await m3.Agent(runtime).run("Hi", max_tokens=2)).usage.output_tokens, flush=True)

if os.fork() == 0:  # before anything was opened
    anyio.run(ask, anyio.run(opened), "child:")
    os._exit(0)
os.wait()
runtime = anyio.run(opened)
anyio.run(ask, runtime, "parent:")
if os.fork() == 0:
    try:
        anyio.run(ask, runtime, "never:")
    except m3.RuntimeClosed as error:
        print("forked:", error, flush=True)
    os._exit(0)
os.wait()
anyio.run(ask, runtime, "parent:")
"""


def run(program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "program.py").write_text(program)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_forks(tmp_path: Path) -> None:
    """A fork before opening is no matter; after it, the child is told, and the parent goes on."""
    done = run(FORK, tmp_path)
    assert done.returncode == 0, done.stderr
    child, before, forked, after = done.stdout.splitlines()
    assert (child, before, after) == ("child: 2", "parent: 2", "parent: 2")
    assert forked.startswith("forked: the runtime was opened before this process was forked")


def test_loops_in_threads_share_a_runtime() -> None:
    """One runtime, opened in none of them, serves asyncio and trio loops in three threads at once."""

    async def opened() -> m3.Runtime:
        return await m3.Runtime.open()

    runtime = anyio.run(opened)
    replies: list[int] = []

    async def talk() -> None:
        async with m3.Agent(runtime).session() as session:
            replies.extend([(await session.run("Hello", max_tokens=4)).usage.output_tokens for _ in range(3)])

    threads = [
        threading.Thread(target=lambda backend=backend: anyio.run(talk, backend=backend))
        for backend in ("asyncio", "trio", "asyncio")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert replies == [4] * 9
    assert runtime.stats().used_pages == 0
    anyio.run(runtime.close)


@pytest.mark.parametrize(
    "ending",
    ["raise SystemExit(3)", "raise ValueError('broken')", "os.kill(os.getpid(), signal.SIGINT); await anyio.sleep(5)"],
    ids=["exit", "error", "interrupt"],
)
def test_a_program_that_ends_while_it_generates(tmp_path: Path, ending: str) -> None:
    """No hang, no crash of the interpreter, and no words but the program's own."""
    program = f"""
import os, signal, anyio
import m3agent as m3

async def main():
    runtime = await m3.Runtime.open()
    stream = m3.Agent(runtime).session().stream("Hello", max_tokens=4000)
    await anext(stream)
    {ending}

anyio.run(main)
"""
    done = run(program, tmp_path)
    assert done.returncode in {"raise SystemExit(3)": (3,)}.get(ending, (1, -signal.SIGINT, 130))
    if "SystemExit" in ending:
        assert done.stderr == ""
    else:
        assert done.stderr.splitlines()[-1].startswith(("ValueError: broken", "KeyboardInterrupt")), done.stderr
        assert "Fatal Python error" not in done.stderr
