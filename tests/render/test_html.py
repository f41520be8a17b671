"""HTML to pictures, in the real Chromium."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path

import anyio
import numpy as np
import pytest

from m3agent.errors import MissingDependency, RenderError
from m3agent.render import HtmlRenderer
from m3agent.render import html as html_module
from m3agent.render.chromium import find_chromium
from m3agent.render.network import Allowed
from tests.render.site import Site, site

needs_chromium = pytest.mark.skipif(find_chromium() is None, reason="Chromium is absent")
SMALL = ((200, 100),)


@pytest.fixture(scope="module")
def served() -> Generator[tuple[Site, Site]]:
    with site() as good, site() as bad:
        yield good, bad


@pytest.fixture(scope="module")
def renderer(served: tuple[Site, Site]) -> Generator[HtmlRenderer]:
    with HtmlRenderer(SMALL, allow=[served[0].host], seconds=15) as renderer:
        yield renderer


def gone(pid: int) -> bool:
    """Whether the process ends; a zombie has ended."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@needs_chromium
def test_a_page_at_two_sizes_with_its_faults():
    code = """<!doctype html><style>body{margin:0;background:#00f;color:#fff}#wide{width:300px}</style>
    <div id=wide>wide</div><div style="width:40px;height:16px;overflow:hidden;white-space:nowrap">cut off here</div>
    <p style="position:absolute;top:0;left:0;margin:0">over it</p>
    <p style="position:absolute;left:-900px;width:100px">far away</p>
    <script>console.error("oops"); missing()</script>"""
    with HtmlRenderer(((200, 100), (400, 120))) as renderer:
        drawn = renderer.render(code)
        again = renderer.render(code)
    assert drawn.labels == ("200x100", "400x120")
    assert [image.rgb.shape for image in drawn.images] == [(100, 200, 3), (120, 400, 3)]
    assert drawn.images[0].rgb[90, 190].tolist() == [0, 0, 255]
    assert all(np.array_equal(one.rgb, two.rgb) for one, two in zip(drawn.images, again.images, strict=True))
    notes = "\n".join(drawn.notes)
    assert "console error: oops (line 5)" in notes
    assert "uncaught ReferenceError: missing is not defined" in notes
    assert "200x100: the page is 300 px wide and scrolls sideways; beyond the edge: <div#wide> “wide”" in drawn.notes
    assert "the text of <div> “cut off here” is clipped" in notes
    assert "texts overlap: “wide” and “over it”" in drawn.notes
    assert "<p> “far away” is left of or above the page and cannot be seen" in drawn.notes


@needs_chromium
def test_nothing_is_wrong_with_a_good_page(renderer: HtmlRenderer):
    drawn = renderer.render("<!doctype html><h1>Hello</h1><p>Text <b>bold</b> and <a href='#x'>a link</a>.</p>")
    assert drawn.notes == ()


@needs_chromium
def test_the_whole_page_up_to_a_limit():
    with HtmlRenderer(SMALL, full_page=True) as renderer:
        assert renderer.render("<body style='margin:0'><div style='height:700px'>").images[0].rgb.shape[:2] == (
            700,
            200,
        )
        drawn = renderer.render("<body style='margin:0'><div style='height:7000px'>")
    assert drawn.images[0].rgb.shape[:2] == (4096, 200)
    assert drawn.notes == ("the page is 7000 px high; the picture shows the first 4096",)


@needs_chromium
def test_only_the_allow_list_is_reached(renderer: HtmlRenderer, served: tuple[Site, Site]):
    good, bad = served
    drawn = renderer.render(
        f"""<img id=a src="http://{good.host}/dot.png"><img src="http://{bad.host}/dot.png">
        <img src="http://{good.host}/to/{bad.host}/redirected">
        <img src="http://{good.host}/to/localhost:{bad.server_port}/named"><img src="http://localhost:{bad.server_port}/l">
        <link rel=preconnect href="http://{bad.host}"><link rel=prefetch href="http://{good.host}/to/{bad.host}/ahead">
        <img src="data:image/gif;base64,R0lGODlhAQABAAAAACw=">
        <iframe src="http://{good.host}/to/{bad.host}/framed"></iframe><img src="file:///etc/hostname">
        <script>
        new WebSocket("ws://{bad.host}/socket");
        navigator.serviceWorker && navigator.serviceWorker.register("/worker.js").catch(() => 0);
        new Worker(URL.createObjectURL(new Blob(["fetch('http://{bad.host}/worker')"])));
        navigator.sendBeacon("http://{bad.host}/beacon");
        const slow = new XMLHttpRequest();
        slow.open("GET", "http://{good.host}/to/{bad.host}/sync", false);
        try {{ slow.send() }} catch {{}}
        document.title = "w" + a.naturalWidth;
        </script>"""
    )
    assert "/dot.png" in good.asked
    assert f"/to/{bad.host}/redirected" in good.asked
    assert bad.asked == []
    notes = "\n".join(drawn.notes)
    assert f"blocked, not in the allow-list: http://{bad.host}/dot.png" in notes
    assert f"blocked, not in the allow-list: ws://{bad.host}/socket" in notes


ENDINGS = {
    "<script>alert('hi')</script>": r"opened a dialog \(alert: 'hi'\)",
    "<script>window.open('about:blank')</script>": "opened another window",
    "<script>location = 'http://example.invalid/'</script>": "went to another address",
    "<script>setTimeout(() => location = 'about:blank')</script>": "went to another address",
    "<script>location.reload()</script>": "loaded itself again",
    "<a id=a download=x href='data:text/plain,x'>x</a><script>a.click()</script>": "started a download",
    "<body><script>for (let i = 6e4; i; i--) document.body.append(document.createElement('i'))</script>": "elements",
    "  ": "the code is empty",
}


@needs_chromium
@pytest.mark.parametrize("code", ENDINGS)
def test_what_a_page_may_not_do(renderer: HtmlRenderer, code: str):
    with pytest.raises(RenderError, match=ENDINGS[code]):
        renderer.render(code)
    assert renderer.render("<p>fine").notes == ()


@needs_chromium
def test_a_script_that_never_ends_and_a_browser_that_dies():
    with HtmlRenderer(SMALL, seconds=2) as renderer:
        with pytest.raises(RenderError, match="more than 2 seconds"):
            renderer.render("<script>for (;;) {}</script>")
        renderer.seconds = 15
        renderer.render("<p>fine")
        first = renderer._chromium.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        assert gone(first)
        assert renderer.render("<p>fine").notes == ()
        second = renderer._chromium.pid
        assert second not in (None, first)
    assert gone(second or 0)


@needs_chromium
@pytest.mark.anyio
async def test_cancelled_the_browser_is_killed():
    with HtmlRenderer(SMALL) as renderer:
        await renderer.render_async("<p>fine")
        pid = renderer._chromium.pid
        assert pid is not None
        with anyio.move_on_after(0.5) as scope:
            await renderer.render_async("<script>for (;;) {}</script>")
        assert scope.cancelled_caught
        assert await anyio.to_thread.run_sync(gone, pid)
        assert (await renderer.render_async("<p>fine")).notes == ()


@needs_chromium
def test_ends_when_collected_and_with_the_interpreter():
    renderer = HtmlRenderer(SMALL)
    renderer.render("<p>fine")
    pid = renderer._chromium.pid
    del renderer
    gc.collect()
    assert gone(pid or 0)
    program = (
        "from m3agent.render import HtmlRenderer\n"
        "r = HtmlRenderer(((50, 50),)); r.render('<p>x'); print(r._chromium.pid)"
    )
    source = str(Path(html_module.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert gone(int(done.stdout))


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("M3AGENT_CHROMIUM", "/nowhere/chromium")
    with pytest.raises(RenderError, match="no Chromium is found"):
        HtmlRenderer()
    nothing: Callable[[str], None] = lambda name: None  # noqa: E731
    monkeypatch.setattr("m3agent.render.chromium.find_spec", nothing)
    with pytest.raises(MissingDependency, match=r"m3agent\[browser\]"):
        HtmlRenderer()


def test_allow_list():
    allowed = Allowed.of(["Example.org", "*.cdn.example", "http://127.0.0.1:8000", "[::1]:90"])
    for url in ("https://example.org/x", "http://a.cdn.example/", "ws://127.0.0.1:8000/s", "http://[::1]:90/"):
        assert allowed.permits(url), url
    for url in (
        "http://example.org:81/",
        "http://cdn.example/",
        "http://127.0.0.1/",
        "file:///example.org",
        "http://x@",
    ):
        assert not allowed.permits(url), url
    for entry in ("", "http://example.org/path", "a b", "*"):
        with pytest.raises(ValueError, match="is no host"):
            Allowed.of([entry])
    with pytest.raises(ValueError, match="list of hosts"):
        Allowed.of("example.org")
    with pytest.raises(ValueError, match="viewports are"):
        HtmlRenderer(((0, 5),))
