"""Tools of ours, served over stdio when this file is the program."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Literal

import anyio
import numpy as np
from PIL import Image as Pil

import m3agent as m3


@m3.tool
def add(numbers: list[int]) -> int:
    """Add numbers."""
    return sum(numbers)


@m3.tool
def noise() -> str:
    """Print things."""
    print("this would end the protocol")
    os.system("echo and this too")
    return "quiet"


@m3.tool
def refuse() -> str:
    """Never works."""
    raise m3.ToolError("not today")


@m3.tool
def picture(colour: Literal["red", "blue"]) -> list[Any]:
    """A picture of one colour."""
    return [f"It is {colour}:", Pil.new("RGB", (7, 5), colour)]


@m3.tool
def film() -> m3.Video:
    """Two frames."""
    return m3.Video([np.zeros((4, 6, 3), np.uint8), np.full((4, 6, 3), 255, np.uint8)], frame_rate=2, fps=2)


@m3.tool
async def steps(context: m3.Context) -> str:
    """Tell how far it is."""
    for value in ("first", 0.5, {"a": 1}, {"progress": 4, "total": 5, "message": "four"}):
        await context.progress(value)
    return "done"


@m3.tool
async def wait(folder: str) -> str:
    """Wait for ever."""
    Path(folder, "began").touch()
    try:
        await anyio.sleep_forever()
    finally:
        Path(folder, "ended").touch()
    return "never"


@m3.tool
def wait_in_thread(folder: str, context: m3.Context) -> str:
    """Wait for ever, in a thread."""
    Path(folder, "began").touch()
    while not context.cancelled:
        time.sleep(0.01)
    Path(folder, "ended").touch()
    return "never"


TOOLS = [add, noise, refuse, picture, film, steps, wait, wait_in_thread]

if __name__ == "__main__":
    # under trio: the other event loop than that of most servers
    anyio.run(lambda: m3.tools.serve_mcp(TOOLS, name="ours", instructions="Use them."), backend="trio")
