"""The film strip: one HTML page that holds a whole refinement, pictures included, and loads nothing from elsewhere."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path

import jinja2

from m3agent.loops.record import Refinement
from m3agent.media.image import Image

_ENDINGS = {
    "passed": "all checks passed",
    "answered": "the model was done",
    "no gain": "no better draft any more",
    "rounds": "rounds used up",
    "tokens": "tokens used up",
    "seconds": "time used up",
}


def film_strip(
    refinement: Refinement,
    *,
    goal: str,
    target: Image | None = None,
    title: str = "Film strip",
    facts: Mapping[str, str] | None = None,
) -> str:
    """The page as text: the target, then each draft with its render, difference, score, code, tokens and seconds.

    Args:
        goal: what was asked for, in words.
        target: shown first, if there is one.
        facts: further short figures for the top of the page, such as the model's name.
    """
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    return page.from_string(Path(__file__).with_name("report.html").read_text("utf-8")).render(
        title=title,
        goal=goal,
        target=target,
        facts=dict(facts or {}),
        steps=refinement.steps,
        best=refinement.best,
        stopped=_ENDINGS.get(refinement.stopped, refinement.stopped),
        text=refinement.text,
        compared=any(step.difference is not None for step in refinement.steps),
        judged=not refinement.steps or any(step.checks for step in refinement.steps),  # else a score says nothing
        address=_address,
        percent=percent,
    )


def percent(score: float) -> str:
    """A score as text, rounded down: "100%" is said of a perfect score alone."""
    return "100%" if score >= 1 else f"{int(score * 1000) / 10:.1f}%"


def _address(image: Image) -> str:
    return "data:image/png;base64," + base64.b64encode(image.to_png()).decode("ascii")
