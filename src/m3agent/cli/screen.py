"""What a run looks like in a terminal: tokens as they come, and pictures as coloured half blocks."""

from __future__ import annotations

import numpy as np
import PIL.Image
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m3agent.events import CallArguments, CallFinished, CallStarted, Event, TextDelta, ThinkingDelta
from m3agent.loops.record import Step
from m3agent.loops.report import percent
from m3agent.media.image import Image

COLUMNS = 32  # of characters a picture is wide; a character is two pixels high


class Screen:
    """Prints events. The console may be a terminal or a file; pictures are shown in a terminal only."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def event(self, event: Event) -> None:
        """A piece of text, thinking, or a call that is being written."""
        if isinstance(event, TextDelta):
            self._write(event.text, "")
        elif isinstance(event, ThinkingDelta):
            self._write(event.text, "italic dim")
        elif isinstance(event, CallStarted):
            self._write(f"\n[{event.name}]\n", "bold")
        elif isinstance(event, CallArguments):
            self._write(event.text, "cyan")
        elif isinstance(event, CallFinished):
            self._write("\n", "")

    def step(self, step: Step, target: Image) -> None:
        """What came of a draft: its picture beside the target, its score and cost."""
        if step.image is not None:
            self.pictures({"target": target, f"draft {step.index + 1}": step.image, "difference": step.difference})
        notes = [verdict.note or verdict.name for verdict in step.checks] or [step.error or ""]
        cost = f"{step.tokens} tokens, {step.seconds:.1f} s"
        line = Text.assemble(
            (f"draft {step.index + 1}  ", "bold"),
            (percent(step.score), "bold green" if step.passed else "bold yellow"),
            f"  {'; '.join(notes)}  ({cost})",
        )
        self.console.print(line)

    def pictures(self, pictures: dict[str, Image | None]) -> None:
        """Pictures side by side under their names, as many as the terminal is wide enough for."""
        shown = [(name, image) for name, image in pictures.items() if image is not None]
        shown = shown[: max(1, self.console.width // (COLUMNS + 2))]
        if not self.console.is_terminal:
            return
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for name, _ in shown:
            table.add_column(Text(name))
        table.add_row(*(half_blocks(image) for _, image in shown))
        self.console.print(table)

    def _write(self, text: str, style: str) -> None:
        self.console.print(Text(text, style=style), end="", soft_wrap=True)


def half_blocks(image: Image, columns: int = COLUMNS) -> Text:
    """The picture as text: each character shows an upper pixel as its ink and a lower one as its ground."""
    rows = max(1, round(columns * image.height / image.width / 2))
    small = PIL.Image.fromarray(image.rgb).resize((columns, 2 * rows), PIL.Image.Resampling.BOX)
    pixels = np.asarray(small)  # [2 · rows, columns, 3]
    text = Text()
    for y in range(0, 2 * rows, 2):
        for upper, lower in zip(pixels[y], pixels[y + 1], strict=True):
            text.append("▀", style=f"{_hex(upper)} on {_hex(lower)}")
        text.append("\n")
    text.rstrip()
    return text


def _hex(pixel: np.ndarray) -> str:
    return "#{:02x}{:02x}{:02x}".format(*pixel)
