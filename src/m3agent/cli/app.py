"""The commands and their options. What can be mended by the user ends in one line and exit code 2."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from m3agent.cli.cache import cache
from m3agent.cli.errors import plain_errors

app = typer.Typer(
    help="A natively multimodal agent inside a Python program.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(cache, name="cache")

Model = Annotated[
    str | None, typer.Option(help="A checkpoint folder or hub id; without it the embedded m3-nano.", metavar="FOLDER")
]


@app.command()
def demo(
    image: Annotated[
        str | None, typer.Option(help="A picture to draw; without it a scene of the demo's own.", metavar="FILE")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for report.html.")] = Path("demo-out"),
    seed: Annotated[int, typer.Option(help="Which of the demo's scenes.", min=0)] = 0,
    rounds: Annotated[int, typer.Option(help="The most drafts.", min=1)] = 10,
    model: Model = None,
) -> None:
    """Look at a picture, write SVG for it, look at the render, correct it; keep a film strip of all drafts."""
    from m3agent.cli.demo import Demo

    with plain_errors():
        Demo(Console(highlight=False), image, out, seed, rounds, model).run()


@app.command()
def chat(
    model: Model = None,
    image: Annotated[
        list[str] | None, typer.Option(help="A picture for the first message; may be repeated.", metavar="FILE")
    ] = None,
) -> None:
    """Talk with the model; pictures by /image FILE, /quit or Ctrl-D to end, Ctrl-C to stop an answer."""
    from m3agent.cli.chat import Chat

    with plain_errors():
        Chat(Console(highlight=False), model, image or []).run()


@app.command()
def doctor() -> None:
    """Tell what is installed, what this machine can run, and how to get what is missing (exit code 1)."""
    from m3agent.cli.doctor import show

    raise typer.Exit(0 if show(Console(highlight=False)) else 1)


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="Print it once, not again and again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print once, as JSON.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.1)] = 1.0,
) -> None:
    """Watch the runtimes that programs opened with Runtime.open(monitor=True): requests, speed, cache, sequences."""
    from m3agent.cli.top import show

    with plain_errors():
        show(Console(highlight=False), once=once, as_json=as_json, seconds=every)
