"""A server over HTTP inside the test, which keeps the Authorization headers that it sees."""

from __future__ import annotations

import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

import m3agent as m3


@m3.tool
def hello() -> str:
    """Greet."""
    return "hello"


@asynccontextmanager
async def serving(tools: Any = (hello,)) -> AsyncIterator[tuple[str, set[str | None]]]:
    seen = set[str | None]()
    app: Any = None

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            seen.add(next((value.decode() for key, value in scope["headers"] if key == b"authorization"), None))
        await app(scope, receive, send)

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        config = uvicorn.Config(watched, log_config=None, ws="none", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)

        def run() -> None:
            nonlocal app
            app = m3.tools.mcp_app(tools)  # here, where no other event loop runs: the app belongs to uvicorn's
            server.run([listening])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            with anyio.fail_after(30):
                while not server.started:
                    await anyio.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/mcp", seen
        finally:
            server.should_exit = True
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(thread.join)
