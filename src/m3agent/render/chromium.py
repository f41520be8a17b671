"""A Chromium of our own, in a thread with an event loop of its own.

Playwright is bound to asyncio and to one loop; renderers and tools are used from any thread and any event loop. So
the browser belongs to one thread, which starts with the first piece of work and ends with `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from m3agent.errors import MissingDependency, RenderError
from m3agent.render.network import Allowed

if TYPE_CHECKING:
    from playwright.async_api import Browser, Playwright

Result = TypeVar("Result")
VARIABLE = "M3AGENT_CHROMIUM"  # the binary, where PATH does not have it
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
STARTING = 30.0  # seconds
ENDING = 5.0

_ARGUMENTS = [
    "--disable-gpu",
    "--disable-lcd-text",
    "--font-render-hinting=none",
    "--force-color-profile=srgb",
    "--disable-quic",
    "--disable-background-networking",
    "--dns-prefetch-disable",
    "--webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    # The last such flag counts: what playwright's own has has to be in it.
    "--disable-features=LocalNetworkAccessChecks,Translate,MediaRouter,OptimizationHints,HttpsUpgrades,PaintHolding,"
    "HttpsFirstBalancedModeAutoEnable,ThirdPartyStoragePartitioning,AvoidCorsURLLoaderRestartOnRedirect,"
    "AvoidUnnecessaryBeforeUnloadCheckSync,DestroyProfileOnBrowserClose,LensOverlay,NetworkTimeServiceQuerying",
]


def find_chromium() -> str | None:
    """The path of the Chromium that would be used: of M3AGENT_CHROMIUM, else the first on PATH; None if absent."""
    named = os.environ.get(VARIABLE)
    if named:
        return shutil.which(named)
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def check_installed(purpose: str) -> None:
    """Raises MissingDependency without playwright, RenderError without a Chromium."""
    if find_spec("playwright") is None:
        raise MissingDependency("playwright", "browser", purpose)
    if find_chromium() is None:
        raise RenderError(f"no Chromium is found: install it (Debian: chromium), or name its binary in {VARIABLE}")


@dataclass
class _State:
    """What the thread and its owner share. It does not refer to the owner, so that the owner can be collected."""

    allowed: Allowed
    loop: asyncio.AbstractEventLoop | None = None
    thread: threading.Thread | None = None
    leave: asyncio.Event | None = None
    ready: Future[None] = field(default_factory=Future[None])
    pid: int | None = None  # of the browser process, which leads a group of its own
    playwright: Playwright | None = None
    browser: Browser | None = None
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)


class Chromium:
    """`submit` runs a coroutine function with the browser. A browser that crashed is started again for the next one.

    Ends with `close`, when it is collected, and when the interpreter exits.
    """

    def __init__(self, allowed: Allowed) -> None:
        self._allowed = allowed
        self._lock = threading.Lock()
        self._state: _State | None = None
        self._finish: Callable[[], Any] = lambda: None

    @property
    def pid(self) -> int | None:
        """The browser's process, while there is one."""
        return self._state.pid if self._state is not None else None

    def submit(self, work: Callable[[Browser], Awaitable[Result]]) -> Future[Result]:
        """Run `work(browser)` in the thread. The future's `cancel` cancels it there, and the browser is killed.

        The future raises RenderError when the browser does not start or crashes, and what `work` raises.
        """
        with self._lock:
            if self._state is None:
                self._state = state = _State(self._allowed)
                run = contextvars.Context().run  # empty: the caller's context names the loop it runs under
                state.thread = threading.Thread(target=run, args=(_run, state), name="m3agent-chromium", daemon=True)
                state.thread.start()
                self._finish = weakref.finalize(self, _end, state)
            state = self._state
        state.ready.result(STARTING)
        assert state.loop is not None
        return asyncio.run_coroutine_threadsafe(_work(state, work), state.loop)

    def close(self) -> None:
        """End the browser and its thread; a later `submit` starts them again. Blocks for some 100 ms."""
        with self._lock:
            self._state = None
            self._finish()


def _run(state: _State) -> None:
    async def live() -> None:
        state.loop, state.leave = asyncio.get_running_loop(), asyncio.Event()
        # What a page leaves undone when its browser dies is no news to anyone.
        state.loop.set_exception_handler(lambda _loop, _context: None)
        state.ready.set_result(None)
        await state.leave.wait()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await _stop(state)
        await asyncio.wait(others, timeout=1) if others else None

    asyncio.run(live())


def _end(state: _State) -> None:
    if state.loop is None or state.leave is None or state.thread is None:
        return
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        state.loop.call_soon_threadsafe(state.leave.set)
    if state.thread is not threading.current_thread():
        state.thread.join(ENDING)
    _kill(state)


async def _work(state: _State, work: Callable[[Browser], Awaitable[Result]]) -> Result:
    from playwright.async_api import Error

    browser = await _started(state)
    try:
        return await work(browser)
    except (asyncio.CancelledError, TimeoutError):
        _kill(state)  # a page that spins does not let itself be closed
        raise
    except Error as error:
        if not browser.is_connected() or "crashed" in str(error) or "has been closed" in str(error):
            _kill(state)
            raise RenderError("the browser crashed") from error
        raise


async def _started(state: _State) -> Browser:
    from playwright.async_api import Error, async_playwright

    async with state.starting:
        if state.browser is not None and state.pid is not None and await _answers(state.browser):
            return state.browser
        await _stop(state)
        root = hasattr(os, "geteuid") and os.geteuid() == 0  # Chromium's own sandbox refuses to run as root
        try:
            async with asyncio.timeout(STARTING):
                state.playwright = await async_playwright().start()
                state.browser = await state.playwright.chromium.launch(
                    executable_path=find_chromium(),
                    args=[*_ARGUMENTS, f"--host-resolver-rules={state.allowed.resolver_rules()}"],
                    chromium_sandbox=not root,
                    handle_sigint=False,
                    handle_sigterm=False,
                    handle_sighup=False,
                )
                session = await state.browser.new_browser_cdp_session()
                found = await session.send("SystemInfo.getProcessInfo")
                await session.detach()
        except (Error, TimeoutError, OSError) as error:
            await _stop(state)
            raise RenderError(f"Chromium does not start: {str(error).strip().splitlines()[0]}") from error
        state.pid = next(int(process["id"]) for process in found["processInfo"] if process["type"] == "browser")
        return state.browser


async def _answers(browser: Browser) -> bool:
    """Whether the browser is alive; that it died is known a moment later only."""
    with contextlib.suppress(Exception):
        async with asyncio.timeout(ENDING):
            await (await browser.new_browser_cdp_session()).detach()
            return True
    return False


async def _stop(state: _State) -> None:
    """Browser and driver end; what does not end in time is killed."""
    steps: list[Callable[[], Coroutine[Any, Any, None]]] = []
    if state.browser is not None and state.pid is not None:
        steps.append(state.browser.close)
    if state.playwright is not None:
        steps.append(state.playwright.stop)
    for step in steps:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ENDING / 2):
                await step()
    _kill(state)
    state.browser = state.playwright = None


def _kill(state: _State) -> None:
    pid, state.pid = state.pid, None
    if pid is not None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == pid:
                os.killpg(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGKILL)
