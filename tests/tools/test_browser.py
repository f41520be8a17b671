"""The browser and render toolsets, in the real Chromium."""

import os
import signal
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import anyio
import pytest

from m3agent.errors import ToolError
from m3agent.media import Image
from m3agent.render.chromium import find_chromium
from m3agent.tools import BrowserTools, Context, browser, render
from m3agent.tools.execute import call_tool
from tests.render.site import Site, site

pytestmark = [
    pytest.mark.skipif(find_chromium() is None, reason="Chromium is absent"),
    pytest.mark.anyio,
]

TARGET = """<!doctype html><title>Target</title><body style="margin:0">
<button id=hit style="position:absolute;left:203px;top:117px;width:10px;height:10px;padding:0;border:0;background:red"
  onclick="document.body.style.background='lime'; document.title='hit'"></button>
<div id=panel style="position:absolute;left:50px;top:60px;width:200px;height:80px;background:#eee;z-index:-1"></div>
<input id=name style="position:absolute;top:180px" onchange="document.title='is ' + this.value">
<div style="height:2000px"></div>"""


@pytest.fixture(scope="module")
def served() -> Generator[Site]:
    with site() as server:
        yield server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    (root / "in").mkdir()
    (root / "in" / "a page.html").write_text(
        "<link rel=stylesheet href=style.css><h1>Of a file</h1><img src=../../x.png>"
    )
    (root / "in" / "style.css").write_text("body { background: rgb(0, 0, 255) }")
    (root / "out.html").symlink_to("/etc/hostname")
    return root


@pytest.fixture
async def tools(served: Site, folder: Path) -> AsyncGenerator[BrowserTools]:
    async with browser(allow=[served.host], root=folder, viewport=(320, 240), seconds=15) as tools:
        yield tools


async def call(tools: Any, name: str, **arguments: Any) -> tuple[str, Image | None]:
    """The answer's text and its picture."""
    try:
        parts = await call_tool({tool.name: tool for tool in tools}, name, arguments, Context(name, "1"))
    except ToolError as error:
        return str(error), None
    text = "".join(part for part in parts if isinstance(part, str))
    return text, next((part for part in parts if isinstance(part, Image)), None)


async def test_acting_on_a_page(tools: BrowserTools):
    text, picture = await call(tools, "open", url=TARGET)
    assert text.startswith("the given HTML “Target”")
    assert picture is not None
    assert picture.rgb.shape == (240, 320, 3)
    rows, columns = (picture.rgb == [255, 0, 0]).all(axis=2).nonzero()
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (117, 126, 203, 212)
    for x, y in ((202, 120), (213, 120), (207, 116), (207, 127)):  # just beside it
        assert "hit" not in (await call(tools, "click", x=x, y=y))[0]
    text, picture = await call(tools, "click", x=212, y=126)
    assert "“hit”" in text
    assert picture is not None
    assert picture.rgb[5, 5].tolist() == [0, 255, 0]

    await call(tools, "evaluate", expression="document.title = ''")
    _, picture = await call(tools, "screenshot", selector="#panel")
    assert picture is not None
    assert picture.rgb.shape == (80, 200, 3)
    rows, columns = (picture.rgb == [255, 0, 0]).all(axis=2).nonzero()
    assert "“hit”" in (await call(tools, "click", x=int(columns.min()), y=int(rows.min())))[0]

    await call(tools, "type", text="Ann", selector="#name")
    await call(tools, "type", text="a")
    assert "“is Anna”" in (await call(tools, "keys", keys="Enter"))[0]
    assert (
        "value: 300\n"
        in (await call(tools, "scroll", down=300))[0] + (await call(tools, "evaluate", expression="scrollY"))[0]
    )
    _, picture = await call(tools, "screenshot", width=400)
    assert picture is not None
    assert picture.rgb.shape == (240, 400, 3)


async def test_what_may_be_opened(tools: BrowserTools, served: Site, folder: Path):
    for url in ("in/a page.html", str(folder / "in" / "a page.html")):
        text, picture = await call(tools, "open", url=url)
        assert picture is not None
        assert picture.rgb[200, 200].tolist() == [0, 0, 255], text
    text, _ = await call(tools, "open", url=f"http://{served.host}/")
    assert text == f"http://{served.host}/ “t”\n"
    assert "“t”" not in (await call(tools, "back"))[0]
    assert "the server answered 404" in (await call(tools, "open", url=f"http://{served.host}/missing"))[0]
    for url in (
        "http://127.0.0.1:9/",
        "file:///etc/hostname",
        "../x",
        "/etc/hostname",
        "out.html",
        "javascript:1",
        "no",
    ):
        text, picture = await call(tools, "open", url=url)
        assert picture is None, url
        assert len(text) < 200


async def test_what_goes_wrong(tools: BrowserTools):
    assert "No page is open" in (await call(tools, "back"))[0]
    text, _ = await call(
        tools, "open", url="<button onclick='alert(1); window.open(); console.error(7); x()'>Go</button>"
    )
    text, picture = await call(tools, "click", text="Go")
    assert picture is not None
    for note in ("opened a dialog (alert: '1')", "opened another window", "console error: 7", "x is not defined"):
        assert note in text
    assert "Give either" in (await call(tools, "click"))[0]
    assert "boom" in (await call(tools, "evaluate", expression="(() => { throw new Error('boom') })()"))[0]
    assert "Unknown key" in (await call(tools, "keys", keys="NoKey"))[0]

    pid = tools._chromium.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert "rash" in (await call(tools, "screenshot"))[0]
    assert "“Target”" in (await call(tools, "open", url=TARGET))[0]
    tools._seconds = 1
    assert "more than 1 s" in (await call(tools, "evaluate", expression="(() => { for (;;); })()"))[0]
    tools._seconds = 15
    assert "“Target”" in (await call(tools, "open", url=TARGET))[0]


async def test_a_browser_killed_in_the_middle_of_a_call(tools: BrowserTools):
    await call(tools, "open", url=TARGET)
    pid = tools._chromium.pid
    assert pid is not None
    answers: list[str] = []

    async def wait() -> None:
        answers.append((await call(tools, "evaluate", expression="new Promise(() => {})"))[0])

    with anyio.fail_after(10):  # less than the toolset's own limit
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
    assert "rash" in answers[0]
    assert "Open the page again" in (await call(tools, "screenshot"))[0]  # the model is told what to do
    assert "“Target”" in (await call(tools, "open", url=TARGET))[0]
    assert tools._chromium.pid != pid


async def test_render_tools():
    tools = render(size=(64, 32), viewport=(100, 80))
    _, picture = await call(tools, "render_svg", code="<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 2 1'/>")
    assert picture is not None
    assert picture.rgb.shape == (32, 64, 3)
    text, picture = await call(tools, "render_html", code="<script>no()</script><p>x", width=50)
    assert picture is not None
    assert picture.rgb.shape == (80, 50, 3)
    assert text == "\nNotes:\n- uncaught ReferenceError: no is not defined"
    assert "the code is empty" in (await call(tools, "render_html", code=" "))[0]
