"""The browser toolset: a real Chromium that the model sees, one picture with every answer."""

from __future__ import annotations

import asyncio
import json
import mimetypes
import os
import urllib.parse
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import anyio
import anyio.to_thread
from pydantic import Field

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.mailbox import outcome_of
from m3agent.media import Image
from m3agent.render.chromium import Chromium, check_installed
from m3agent.render.html import ADDRESS, check_viewports
from m3agent.render.network import Allowed
from m3agent.render.page import Viewport, Watch, open_context, settle, shoot, unless_crashed, watch_page
from m3agent.render.renderer import SIDE_LIMIT, short
from m3agent.tools.arguments import clip
from m3agent.tools.define import Tool, tool
from m3agent.tools.workspace.beneath import Root

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Page, Route

Answer = list[str | Image]
FILES = "http://files.localhost/"  # the root's files, served by us
FILE_LIMIT = 32 * 1024**2  # bytes
VALUE_LIMIT = 10_000  # characters of what `evaluate` shows
_FINDING = 5000  # milliseconds for an element to be there

Selector = Annotated[str, Field(description="a CSS selector")]
Pixel = Annotated[int, Field(description="in pixels of the last picture", ge=0)]


def browser(
    *,
    allow: Iterable[str] = (),
    root: str | os.PathLike[str] | None = None,
    viewport: Viewport = (1280, 800),
    seconds: float = 30.0,
) -> BrowserTools:
    """Tools to open pages, look at them and act on them: `async with browser(allow=["127.0.0.1:8000"]) as tools`.

    Every answer has the address, what went wrong in the page since the last one, and a picture. Chromium starts with
    the first page.

    Args:
        allow: hosts that pages may reach: "example.org" (ports 80 and 443), "*.example.org", "127.0.0.1:8000".
        root: a folder whose files can be opened by their path; no path or link leads out of it.
        viewport: width and height of pages and pictures.
        seconds: for one call; then the browser is ended.

    Raises MissingDependency without playwright, RenderError without a Chromium, ValueError for a viewport or host that
    is none, ToolDefinitionError for a root that is no folder.
    """
    check_viewports([viewport])
    if seconds <= 0:
        raise ToolDefinitionError(f"browser: seconds is {seconds}; it has to be above 0")
    allowed = Allowed.of(allow)
    check_installed("The browser toolset")
    return BrowserTools(allowed, None if root is None else Root(root), viewport, seconds)


class BrowserTools:
    """The tools, in a fixed order, and the browser behind them. An async context manager, for any event loop."""

    def __init__(self, allowed: Allowed, root: Root | None, viewport: Viewport, seconds: float) -> None:
        self._allowed = allowed
        self._root = root
        self._viewport = viewport
        self._seconds = seconds
        self._chromium = Chromium(allowed)
        self._turn = asyncio.Lock()  # calls of one turn come side by side, and are done in their order
        self._html = ""
        self._watch = Watch(allowed, self._own)
        self._browser: Browser | None = None
        self._context: BrowserContext | None = None
        self._page: Page | None = None
        self._origin = (0, 0)  # of the last picture, in the viewport
        methods: list[Callable[..., Any]] = [self.open, self.screenshot, self.click, self.type]
        methods += [self.keys, self.scroll, self.evaluate, self.back]
        self._tools: list[Tool[..., Any]] = [tool(method) for method in methods]

    def __iter__(self) -> Iterator[Tool[..., Any]]:
        return iter(self._tools)

    def __len__(self) -> int:
        return len(self._tools)

    async def __aenter__(self) -> BrowserTools:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the browser. The next `open` would start it again."""
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._chromium.close)
        self._turn, self._browser, self._page = asyncio.Lock(), None, None

    async def open(self, url: Annotated[str, Field(description="an address, a file's path, or HTML code")]) -> Answer:
        """Open a page and look at it."""

        async def work(browser: Browser) -> Answer:
            address = self._address(url)
            page = await self._fresh_page(browser)
            response = await page.goto(address, wait_until="load", timeout=0)
            if response is not None and response.status >= 400:
                self._watch.note(f"the server answered {response.status} {response.status_text}")
            return await self._look(page)

        return await self._do(work)

    async def screenshot(
        self,
        selector: Annotated[str | None, Field(description="show only this element")] = None,
        width: Annotated[int | None, Field(ge=1, le=SIDE_LIMIT, description="change the viewport's width")] = None,
        height: Annotated[int | None, Field(ge=1, le=SIDE_LIMIT, description="change its height")] = None,
    ) -> Answer:
        """Look at the page as it is now."""

        async def work(page: Page) -> Answer:
            if width or height:
                now = page.viewport_size or {"width": self._viewport[0], "height": self._viewport[1]}
                await page.set_viewport_size({"width": width or now["width"], "height": height or now["height"]})
            return await self._look(page, selector)

        return await self._act(work)

    async def click(
        self,
        x: Pixel | None = None,
        y: Pixel | None = None,
        text: Annotated[str | None, Field(description="click what shows this text")] = None,
        selector: Selector | None = None,
    ) -> Answer:
        """Click at a place of the last picture, on a text, or on an element."""
        if (x is not None and y is not None) + (text is not None) + (selector is not None) != 1:
            raise ToolError("Give either x and y, or text, or selector.")

        async def work(page: Page) -> Answer:
            if x is not None and y is not None:
                await page.mouse.click(x + self._origin[0], y + self._origin[1])
            else:
                found = page.locator(selector) if selector is not None else page.get_by_text(text or "")
                await found.first.click(timeout=_FINDING)
            return await self._look(page)

        return await self._act(work)

    async def type(self, text: str, selector: Selector | None = None) -> Answer:
        """Type text where the focus is, or replace the text of the field that the selector names."""

        async def work(page: Page) -> Answer:
            if selector is None:
                await page.keyboard.type(text)
            else:
                await page.locator(selector).first.fill(text, timeout=_FINDING)
            return await self._look(page)

        return await self._act(work)

    async def keys(self, keys: Annotated[str, Field(description='such as "Enter", "Tab", "Control+A"')]) -> Answer:
        """Press a key or a combination of keys."""

        async def work(page: Page) -> Answer:
            await page.keyboard.press(keys)
            return await self._look(page)

        return await self._act(work)

    async def scroll(
        self,
        down: Annotated[int, Field(description="pixels; negative is up")],
        right: Annotated[int, Field(description="pixels; negative is left")] = 0,
    ) -> Answer:
        """Scroll what is in the middle of the page."""

        async def work(page: Page) -> Answer:
            size = page.viewport_size or {"width": 0, "height": 0}
            await page.mouse.move(size["width"] / 2, size["height"] / 2)
            await page.mouse.wheel(right, down)
            await asyncio.sleep(0.1)  # a wheel's effect comes with a later frame
            return await self._look(page)

        return await self._act(work)

    async def evaluate(self, expression: Annotated[str, Field(description="JavaScript")]) -> Answer:
        """Evaluate JavaScript in the page; shows its value as JSON."""

        async def work(page: Page) -> Answer:
            value = await page.evaluate(expression)
            text = json.dumps(value, ensure_ascii=False, default=str)
            return [f"value: {clip(text, VALUE_LIMIT)}\n", *await self._look(page)]

        return await self._act(work)

    async def back(self) -> Answer:
        """Go back to the page before."""

        async def work(page: Page) -> Answer:
            if await page.go_back(wait_until="load", timeout=0) is None:
                self._watch.note("there is no page before this one")
            return await self._look(page)

        return await self._act(work)

    def _address(self, url: str) -> str:
        if url.lstrip().startswith("<"):
            self._html = url
            return ADDRESS
        if "://" in url or url.startswith(("about:", "data:", "javascript:")):
            if url.startswith(FILES) or self._allowed.permits(url):
                return url
            hosts = ", ".join(dict.fromkeys(f"{host}:{port}" for host, port in self._allowed.hosts)) or "none"
            raise ToolError(f"{clip(url, 80)} is not in the allow-list. Allowed hosts: {hosts}.")
        if self._root is None:
            raise ToolError(f"{clip(url, 80)!r} is no address; write http://… or HTML code.")
        path = os.path.relpath(url, self._root.path) if os.path.isabs(url) else url
        os.close(self._root.open(url, os.O_RDONLY))  # raises for what is outside or absent
        return FILES + urllib.parse.quote(path)

    async def _own(self, route: Route) -> bool:
        """Serve the HTML that was given, and the root's files."""
        url = route.request.url.partition("#")[0]
        if url == ADDRESS and route.request.is_navigation_request():
            await route.fulfill(body=self._html, content_type="text/html; charset=utf-8")
            return True
        if not url.startswith(FILES) or self._root is None:
            return False
        path = urllib.parse.unquote(url.removeprefix(FILES).partition("?")[0])
        try:
            body = await asyncio.to_thread(_read, self._root, path)
        except (OSError, ToolError) as error:
            self._watch.note(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}")
            await route.fulfill(status=404, body="")
            return True
        await route.fulfill(body=body, content_type=mimetypes.guess_type(path)[0] or "text/plain")
        return True

    async def _fresh_page(self, browser: Browser) -> Page:
        """The page, its history kept; a new one after a crash."""
        if self._page is not None and self._browser is browser and not self._page.is_closed():
            return self._page
        self._watch = Watch(self._allowed, self._own)
        self._browser, self._context = browser, await open_context(browser, self._watch, self._viewport)
        self._page = await self._context.new_page()
        watch_page(self._page, self._watch)
        return self._page

    async def _look(self, page: Page, selector: str | None = None) -> Answer:
        await asyncio.sleep(0.05)  # what an action begins, such as leaving the page, begins a little later
        await page.wait_for_load_state("load", timeout=0)
        await settle(page)
        if selector is None:
            image, _ = await shoot(page)
            self._origin = (0, 0)
        else:
            image, self._origin = await _element(page, selector)
        title = await page.title()
        shown = "the given HTML" if page.url.startswith(ADDRESS) else page.url.replace(FILES, "")
        lines = [clip(shown, 200) + (f" “{clip(title, 80)}”" if title else "")]
        lines += [f"- {note}" for note in self._watch.take()]
        return ["\n".join(lines) + "\n", image]

    async def _act(self, work: Callable[[Page], Awaitable[Answer]]) -> Answer:
        async def on_page(browser: Browser) -> Answer:
            if self._page is None:
                raise ToolError("No page is open. Call open first.")
            if self._browser is not browser or self._page.is_closed():
                self._page = None
                raise ToolError("The browser crashed. Open the page again.")
            return await work(self._page)

        return await self._do(on_page)

    async def _do(self, work: Callable[[Browser], Awaitable[Answer]]) -> Answer:
        async def one(browser: Browser) -> Answer:
            async with self._turn:
                try:
                    async with asyncio.timeout(self._seconds):
                        return await unless_crashed(work(browser), self._watch)
                except ToolError:
                    if self._watch.crashed.is_set():
                        self._page = None
                    raise
                except (TimeoutError, asyncio.CancelledError):
                    self._page = None  # the browser is killed for it
                    raise

        from playwright.async_api import Error

        try:
            return await outcome_of(self._chromium.submit(one))
        except TimeoutError:
            raise ToolError(
                f"It took more than {self._seconds:g} s; the browser was ended. Open a page again."
            ) from None
        except Error as error:
            raise ToolError(_why(error, self._watch)) from error


async def _element(page: Page, selector: str) -> tuple[Image, tuple[int, int]]:
    """The element's picture, cut out of the viewport's, and its place there: both in whole pixels."""
    found = page.locator(selector).first
    await found.scroll_into_view_if_needed(timeout=_FINDING)
    box = await found.bounding_box()
    whole, _ = await shoot(page)
    height, width = whole.rgb.shape[:2]
    if box is not None:
        left, top = max(0, int(box["x"])), max(0, int(box["y"]))
        right, bottom = min(width, round(box["x"] + box["width"])), min(height, round(box["y"] + box["height"]))
        if right > left and bottom > top:
            return Image(whole.rgb[top:bottom, left:right].copy()), (left, top)
    raise ToolError(f"{clip(selector, 80)} is on the page but cannot be seen.")


def _read(root: Root, path: str) -> bytes:
    with os.fdopen(root.open(path, os.O_RDONLY), "rb") as file:
        data = file.read(FILE_LIMIT + 1)
    if len(data) > FILE_LIMIT:
        raise ToolError(f"it is over {FILE_LIMIT // 1024**2} MiB")
    return data


def _why(error: Exception, watch: Watch) -> str:
    """Playwright's message without the log of its attempts; what was blocked comes first, being the cause."""
    line = short(str(error).partition("Call log:")[0], 300)
    for method in ("Page.", "Locator.", "Mouse.", "Keyboard."):
        if line.startswith(method):
            line = line.partition(": ")[2]
    with suppress(IndexError):
        line = f"{watch.take()[0]} ({line})"
    return line
