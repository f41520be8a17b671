"""Opening a model with a progress bar."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from m3agent.runtime import Runtime


@asynccontextmanager
async def opened(console: Console, model: str | None) -> AsyncIterator[Runtime]:
    """The runtime of a checkpoint folder or hub id; None is the embedded m3-nano. Closed at the end."""
    name = "m3-nano" if model is None else model
    columns = (TextColumn("loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(name, total=None)

        def show(done: int, total: int, _tensor: str) -> None:
            progress.update(task, completed=done, total=total)

        runtime = await Runtime.open(model, progress=show)
    async with runtime:
        yield runtime
