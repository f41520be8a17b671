"""`m3agent chat`: a conversation in the terminal, with pictures, and the render tool for a model that draws."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from anyio.from_thread import BlockingPortal, start_blocking_portal
from rich.console import Console

from m3agent.agent import Agent
from m3agent.cli.loading import opened
from m3agent.cli.screen import Screen
from m3agent.content import Content
from m3agent.errors import M3Error
from m3agent.events import Done, Event, ToolResultEvent
from m3agent.loops import SvgRenderer, render_tool
from m3agent.media.image import Image
from m3agent.session import Session

HELP = "/image FILE shows a picture with the next message, /quit ends; Ctrl-C stops an answer."


@dataclass
class Chat:
    """The terminal is read in the main thread, so that Ctrl-C works; the model runs behind a portal."""

    console: Console
    model: str | None
    images: list[str]
    _pending: list[Content] = field(default_factory=list[Content])

    def run(self) -> None:
        for path in self.images:
            self._attach(path)
        with (
            start_blocking_portal() as portal,
            portal.wrap_async_context_manager(opened(self.console, self.model)) as runtime,
            portal.wrap_async_context_manager(Agent(runtime, tools=[render_tool(SvgRenderer())]).session()) as session,
        ):
            self.console.print(HELP, style="dim")
            while (line := self._read()) is not None:
                try:
                    self._obey(line, portal, session)
                except M3Error as error:
                    self.console.print(f"{error}", style="red", markup=False)

    def _read(self) -> str | None:
        """The next line; None at its end."""
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            self.console.print()
            return None
        return None if line in ("/quit", "/exit") else line

    def _obey(self, line: str, portal: BlockingPortal, session: Session) -> None:
        command, _, name = line.partition(" ")
        if command == "/image" and name.strip():
            self._attach(name.strip())
        elif line.startswith("/"):
            self.console.print(HELP, style="dim")
        elif line:
            parts, self._pending = [line, *self._pending], []
            answer = portal.start_task_soon(self._answer, session, parts)
            try:
                answer.result()
            except KeyboardInterrupt:
                answer.cancel()
                self.console.print("\n(stopped)", style="dim")

    def _attach(self, name: str) -> None:
        image = Image(os.path.expanduser(name)).load()
        self._pending.append(image)
        Screen(self.console).pictures({name: image})

    async def _answer(self, session: Session, parts: list[Content]) -> None:
        screen = Screen(self.console)
        async with session.stream(*parts) as stream:
            async for event in stream:
                self._show(screen, event)

    def _show(self, screen: Screen, event: Event) -> None:
        screen.event(event)
        if isinstance(event, ToolResultEvent):
            for part in event.result.parts:
                if isinstance(part, Image):
                    screen.pictures({"result": part})
            if event.result.text:
                self.console.print(event.result.text, style="red" if event.result.error else "", markup=False)
        elif isinstance(event, Done):
            self.console.print(f"\n{event.reply.usage}", style="dim", markup=False)
