"""HTML, CSS and JavaScript to pictures with Chromium, at several viewport sizes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from m3agent.errors import RenderError
from m3agent.mailbox import outcome_of
from m3agent.media.image import Image
from m3agent.render.chromium import Chromium, check_installed
from m3agent.render.network import Allowed
from m3agent.render.page import (
    Viewport,
    Watch,
    layout_findings,
    open_context,
    settle,
    shoot,
    unless_crashed,
    watch_page,
)
from m3agent.render.renderer import SIDE_LIMIT, Rendering, check_code, short, together

if TYPE_CHECKING:
    from playwright.async_api import Browser, Page, Route

Shot = tuple[Image, list[str]]  # with its notes

PHONE_AND_DESK: tuple[Viewport, ...] = ((390, 844), (1280, 800))
ELEMENT_LIMIT = 50_000
# Served by us and found nowhere else; a host below localhost counts as secure, so a page may use all there is.
ADDRESS = "http://page.localhost/"


class HtmlRenderer:
    """A page in, its pictures at each viewport out, with notes: errors, blocked requests, faults of the layout.

    The page is one HTML text with its CSS and JavaScript; `data:` addresses work, anything else is fetched from hosts
    in `allow` alone. Every picture is of a fresh page with one pixel a CSS pixel, animations off, locale en-US and
    time zone UTC. Chromium starts with the first render and ends with `close` (or `with`), when the renderer is
    collected, and when the interpreter exits.

    Args:
        viewports: (width, height) each; the first one's picture is what checks judge.
        full_page: the whole height of the page instead of the first screen, up to 4096 pixels.
        allow: hosts that the page may reach: "example.org" (ports 80 and 443), "*.example.org", "127.0.0.1:8000".
        seconds: for one render, all viewports together.

    Raises:
        ValueError: a viewport or host that is none.
        MissingDependency: playwright is not installed. RenderError: no Chromium is found.
    """

    language = "HTML"

    def __init__(
        self,
        viewports: Sequence[Viewport] = PHONE_AND_DESK,
        *,
        full_page: bool = False,
        allow: Iterable[str] = (),
        seconds: float = 20.0,
    ) -> None:
        check_viewports(viewports)
        check_installed("Rendering HTML")
        self.viewports = tuple(viewports)
        self.full_page = full_page
        self.seconds = seconds
        self._allowed = Allowed.of(allow)
        self._chromium = Chromium(self._allowed)

    def __enter__(self) -> HtmlRenderer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the browser. Another render would start it again."""
        self._chromium.close()

    def render(self, code: str, viewports: Sequence[Viewport] | None = None) -> Rendering:
        """The pictures, in the order of the viewports, which may be others than the renderer's own.

        Blocks for some 100 ms a viewport.

        Raises:
            RenderError: the page takes too long, has too many elements, crashes the browser, leaves its address, or
                opens a dialog, a window or a download.
        """
        return self._submit(code, viewports).result()

    async def render_async(self, code: str, viewports: Sequence[Viewport] | None = None) -> Rendering:
        """`render` for any event loop; cancelled, it kills the browser, and the next render starts a new one."""
        return await outcome_of(self._submit(code, viewports))

    def _submit(self, code: str, viewports: Sequence[Viewport] | None) -> Future[Rendering]:
        check_code(code)
        chosen = self.viewports if viewports is None else tuple(viewports)
        check_viewports(chosen)
        return self._chromium.submit(lambda browser: self._rendered(browser, code, chosen))

    async def _rendered(self, browser: Browser, code: str, viewports: Sequence[Viewport]) -> Rendering:
        try:
            async with asyncio.timeout(self.seconds):
                return together([await self._at(browser, code, viewport) for viewport in viewports])
        except TimeoutError:
            reason = f"the page takes more than {self.seconds:g} seconds: does a script run on for ever?"
            raise TooSlow(reason) from None

    async def _at(self, browser: Browser, code: str, viewport: Viewport) -> Rendering:
        async def own(route: Route) -> bool:
            request = route.request
            if not request.is_navigation_request() or request.frame.parent_frame is not None:
                return False
            if request.url.partition("#")[0] != ADDRESS:
                watch.stopped.append(f"the page went to another address ({short(request.url, 80)})")
                return False
            if not loaded:
                loaded.append(True)
                await route.fulfill(body=code, content_type="text/html; charset=utf-8")
                return True
            watch.stopped.append("the page loaded itself again")
            return False

        loaded: list[bool] = []
        watch = Watch(self._allowed, own)
        context = await open_context(browser, watch, viewport)
        page = await context.new_page()
        watch_page(page, watch)
        try:
            image, notes = await unless_crashed(self._shot(page, watch), watch)
        finally:
            task = asyncio.current_task()
            if task is None or not task.cancelling():  # else the browser is killed: a page that spins cannot be closed
                await context.close()
        label = f"{viewport[0]}x{viewport[1]}"
        return Rendering((image,), tuple(notes), (label,))

    async def _shot(self, page: Page, watch: Watch) -> Shot:
        from playwright.async_api import Error

        try:
            await page.goto(ADDRESS, wait_until="load", timeout=0)
            count = int(await page.evaluate("document.getElementsByTagName('*').length"))
            if count > ELEMENT_LIMIT:
                raise RenderError(f"the page has {count} elements; at most {ELEMENT_LIMIT} are rendered")
            await settle(page)
            findings = await layout_findings(page)
            image, cut = await shoot(page, full_page=self.full_page)
        except Error as error:
            if watch.stopped:  # that is why
                raise RenderError(f"{watch.stopped[0]}; leave that out") from error
            raise
        if watch.stopped:
            raise RenderError(f"{watch.stopped[0]}; leave that out")
        if page.url.partition("#")[0] != ADDRESS:
            raise RenderError(f"the page went to another address ({short(page.url, 80)}); leave that out")
        return image, [*watch.notes, *findings, *([cut] if cut else [])]


class TooSlow(RenderError, TimeoutError):
    """Over the time: the browser is killed, since a page that spins cannot be closed."""


def check_viewports(viewports: Sequence[Viewport]) -> None:
    """Raises ValueError for none, and for sides under 1 or over 4096 pixels."""
    if not viewports or not all(1 <= side <= SIDE_LIMIT for viewport in viewports for side in viewport):
        raise ValueError(f"viewports are {viewports!r}: each is (width, height), of 1 to {SIDE_LIMIT} pixels")
