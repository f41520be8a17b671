"""For the tests of tools that start programs: who is alive, who was left behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil

import m3agent as m3
from m3agent.tools.execute import call_tool


async def call(tools: list[m3.Tool[..., Any]], text: str) -> list[Any]:
    """Call the toolset's one tool as a session does."""
    (tool,) = tools
    (argument,) = tool.parameters["required"]
    return await call_tool({tool.name: tool}, tool.name, {argument: text}, m3.Context(tool.name, "call_1"))


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be collected by init does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def read_pids(file: Path, count: int) -> list[int]:
    """Wait until `count` process ids are in the file, one a line."""
    end = time.monotonic() + 10
    while True:
        lines = file.read_text().splitlines() if file.exists() else []
        if len(lines) >= count and all(lines):
            return [int(line) for line in lines]
        assert time.monotonic() < end, f"{file} has {lines}"
        time.sleep(0.01)


async def eventually(true: Callable[[], bool]) -> None:
    """For what the thread of a call does after it has answered, such as letting go of the toolset."""
    with anyio.fail_after(10):
        while not true():
            await anyio.sleep(0.01)


def descriptors() -> int:
    """How many are open, without those of toolsets that earlier tests left in cycles."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def children() -> list[psutil.Process]:
    """Child processes, also those that have ended and were not waited for; none of toolsets that are forgotten."""
    gc.collect()
    return psutil.Process().children()
