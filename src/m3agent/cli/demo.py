"""`m3agent demo`: a picture, its drawing in a few drafts, and the film strip of how it came about."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import anyio
from rich.console import Console

from m3agent.agent import Agent
from m3agent.cli.loading import opened
from m3agent.cli.screen import Screen
from m3agent.errors import M3Error
from m3agent.events import Event
from m3agent.loops import PixelMatch, Refinement, Step, SvgRenderer, film_strip, refine
from m3agent.media.image import Image
from m3agent.render.renderer import on_canvas

CANVAS = (224, 224)
GOAL = "Draw this picture."  # m3-nano was trained on these words
SCENES = Path(__file__).parent.parent / "demo_scenes"


@dataclass
class Demo:
    """One run of the demo. Raises M3Error, with a line for the user, for whatever can be mended."""

    console: Console
    image: str | None
    out: Path
    seed: int
    rounds: int
    model: str | None

    def run(self) -> None:
        renderer = SvgRenderer(CANVAS)
        _check_writable(self.out)  # before the minutes of work, not after
        target = self._target(renderer)
        screen = Screen(self.console)
        screen.pictures({"target": target})
        result, facts = anyio.run(self._draw, renderer, target, screen)
        report = self.out / "report.html"
        page = film_strip(result, goal=GOAL, target=target, title="m3agent demo", facts=facts)
        _write(report, page)
        self._summary(result, report)

    def _target(self, renderer: SvgRenderer) -> Image:
        if self.image is not None:
            return on_canvas(Image(self.image).load(), CANVAS)
        scenes = sorted(SCENES.glob("*.svg"))
        return renderer.render(scenes[self.seed % len(scenes)].read_text("utf-8"))

    async def _draw(self, renderer: SvgRenderer, target: Image, screen: Screen) -> tuple[Refinement, dict[str, str]]:
        def show(event: Event | Step) -> None:
            if isinstance(event, Step):
                screen.step(event, target)
            else:
                screen.event(event)

        async with opened(self.console, self.model) as runtime:
            async with Agent(runtime).session() as session:
                checks = [PixelMatch(target, within=0.01)]
                goal = [GOAL, target]
                result = await refine(
                    session, goal, render=renderer, checks=checks, max_rounds=self.rounds, attempts=4, on_event=show
                )
            speed = f"{result.usage.tokens_per_second:.0f}"
            return result, {"tokens/s": speed, "model": self.model or "m3-nano"}

    def _summary(self, result: Refinement, report: Path) -> None:
        best = result.best
        if best is None:
            self.console.print("No draft could be rendered.")
        else:
            outcome = "matches the picture" if best.passed else "comes closest"
            self.console.print(f"Draft {best.index + 1} of {len(result.steps)} {outcome}. {result.usage}")
        self.console.print(f"Film strip: {report}", markup=False, soft_wrap=True)


def _write(report: Path, page: str) -> None:
    """Whole or not at all: an older film strip stays until the new one is there."""
    part = report.with_name(report.name + ".part")
    try:
        part.write_text(page, encoding="utf-8")
        part.replace(report)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise M3Error(f"cannot write {report}: {error.strerror or error}; choose another folder with --out") from None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if (folder / "report.html").is_dir():
            raise IsADirectoryError("report.html is a folder")
    except OSError as error:
        raise M3Error(f"cannot write to {folder}: {error.strerror or error}; choose another with --out") from None
