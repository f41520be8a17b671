"""A page that is watched: what it may load, what went wrong in it, and what it looks like."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import PIL.Image

from m3agent.errors import RenderError
from m3agent.media.image import Image
from m3agent.render.network import Allowed
from m3agent.render.renderer import SIDE_LIMIT, short

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Dialog, Page, Route, WebSocketRoute

Result = TypeVar("Result")
Viewport = tuple[int, int]  # width, height in CSS pixels, which are the picture's

NOTES = 12  # at most, of one page
_LAYOUT = Path(__file__).with_name("layout.js")
_INSIDE = ("data:", "blob:", "about:")
_FONTS = "Promise.race([document.fonts.ready.then(() => 0), new Promise(done => setTimeout(done, 3000))])"
_PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"


@dataclass
class Watch:
    """What happened in a browser context. `notes` are for the model, `stopped` is what no page may do."""

    allowed: Allowed
    own: Callable[[Route], Awaitable[bool]]  # fulfils what is ours to serve, and says whether it was
    notes: list[str] = field(default_factory=list[str])
    stopped: list[str] = field(default_factory=list[str])
    crashed: asyncio.Event = field(default_factory=asyncio.Event)

    def note(self, text: str) -> None:
        line = short(text)
        if line not in self.notes and len(self.notes) < NOTES:
            self.notes.append(line)

    def take(self) -> list[str]:
        """The notes since the last time; stopped things first."""
        taken = [*self.stopped, *self.notes]
        self.stopped.clear()
        self.notes.clear()
        return taken


async def open_context(browser: Browser, watch: Watch, viewport: Viewport) -> BrowserContext:
    """A context that shares nothing with others, looks the same everywhere, and reaches the allow-list alone."""
    width, height = viewport
    context = await browser.new_context(
        viewport={"width": width, "height": height},
        device_scale_factor=1,
        locale="en-US",
        timezone_id="UTC",
        color_scheme="light",
        reduced_motion="reduce",
        service_workers="block",
        accept_downloads=False,
    )

    async def route(route: Route) -> None:
        url = route.request.url
        if url.startswith(_INSIDE) or watch.allowed.permits(url):
            await route.continue_()
        elif not await watch.own(route):
            if not url.endswith("/favicon.ico"):
                watch.note(f"blocked, not in the allow-list: {short(url, 120)}")
            await route.abort("blockedbyclient")

    async def socket(socket: WebSocketRoute) -> None:
        if watch.allowed.permits(socket.url):
            socket.connect_to_server()
        else:
            watch.note(f"blocked, not in the allow-list: {short(socket.url, 120)}")
            await socket.close(code=1008, reason="blocked")

    await context.route("**/*", route)
    await context.route_web_socket("**/*", socket)
    return context


def watch_page(page: Page, watch: Watch) -> None:
    """Collect console errors, exceptions, failed requests, dialogs, popups and downloads."""

    async def dialog(dialog: Dialog) -> None:
        watch.stopped.append(f"the page opened a dialog ({dialog.type}: {short(dialog.message, 60)!r})")
        await dialog.dismiss()

    async def popup(other: Page) -> None:
        watch.stopped.append(f"the page opened another window ({short(other.url, 80)})")
        await other.close()

    def said(message: Any) -> None:
        # What was blocked has a note of its own.
        if message.type in ("error", "assert") and "ERR_BLOCKED_BY_CLIENT" not in message.text:
            line = message.location.get("lineNumber")
            watch.note(f"console error: {message.text}" + (f" (line {line + 1})" if line else ""))

    def failed(request: Any) -> None:
        if "ERR_BLOCKED_BY_CLIENT" not in (request.failure or "") and "ERR_ABORTED" not in (request.failure or ""):
            watch.note(f"request failed ({request.failure}): {short(request.url, 120)}")

    page.on("dialog", dialog)
    page.on("popup", popup)
    page.on("console", said)
    page.on("pageerror", lambda error: watch.note(f"uncaught {error.name}: {error.message}"))
    page.on("requestfailed", failed)
    page.on("download", lambda download: watch.stopped.append("the page started a download"))
    page.on("crash", lambda _: watch.crashed.set())


async def settle(page: Page) -> None:
    """Wait for fonts and for what has been laid out to be painted."""
    await page.evaluate(_FONTS)
    await page.evaluate(_PAINTED)


async def layout_findings(page: Page, limit: int = 6) -> list[str]:
    """What overflows, lies outside, overlaps or is clipped, as short sentences."""
    source = await asyncio.to_thread(_LAYOUT.read_text, "utf-8")
    return [str(line) for line in await page.evaluate(source, limit)]


async def shoot(page: Page, *, full_page: bool = False) -> tuple[Image, str | None]:
    """The picture, one pixel a CSS pixel, and what of a full page did not fit into it, if anything."""
    options: dict[str, Any] = {"animations": "disabled", "caret": "hide", "scale": "css"}
    cut = None
    if full_page:
        height = int(await page.evaluate("Math.max(document.documentElement.scrollHeight, innerHeight)"))
        width = page.viewport_size["width"] if page.viewport_size else SIDE_LIMIT
        if height > SIDE_LIMIT:
            cut = f"the page is {height} px high; the picture shows the first {SIDE_LIMIT}"
        options |= {"clip": {"x": 0, "y": 0, "width": width, "height": min(height, SIDE_LIMIT)}, "full_page": True}
    png = await page.screenshot(**options)
    with PIL.Image.open(io.BytesIO(png)) as picture:
        return Image(picture.convert("RGB")), cut


async def unless_crashed(work: Awaitable[Result], watch: Watch) -> Result:
    """The outcome of work on a page. Raises RenderError when the page crashes: its calls would wait for ever."""
    watch.crashed.clear()
    doing, crash = asyncio.ensure_future(work), asyncio.ensure_future(watch.crashed.wait())
    try:
        await asyncio.wait({doing, crash}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise RenderError("the page crashed: it takes too much memory")
        return doing.result()
    finally:
        for task in (doing, crash):
            task.cancel()
        await asyncio.wait({doing, crash}, timeout=2)
