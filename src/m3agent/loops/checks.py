"""How a picture is judged: against a target, pixel by pixel, or by a rule of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import SupportsFloat

import numpy as np

from m3agent.loops.record import Verdict
from m3agent.media.image import Image

Check = Callable[[Image], "Verdict | bool | float"]

TOLERANCE = 16  # of 255, in any channel: below it lies what anti-aliasing and rounding make of the same drawing


@dataclass(frozen=True)
class PixelMatch:
    """The share of pixels as in the target. A pixel differs when any channel differs by more than 16 of 255.

    Args:
        target: the picture to arrive at.
        within: the share of differing pixels that is good enough; 0.01 is one percent.
    """

    target: Image
    within: float = 0.01

    def __call__(self, image: Image) -> Verdict:
        mine, theirs = image.rgb, self.target.rgb  # [height, width, 3] uint8
        if mine.shape != theirs.shape:
            sizes = f"{mine.shape[1]}x{mine.shape[0]} pixels, the target {theirs.shape[1]}x{theirs.shape[0]}"
            return Verdict("pixels", 0.0, False, f"the render has {sizes}")
        differs = np.abs(mine.astype(np.int16) - theirs.astype(np.int16)).max(axis=2) > TOLERANCE  # [height, width]
        share = float(differs.mean())
        note = f"{share:.2%} of the pixels differ"
        return Verdict("pixels", 1.0 - share, share <= self.within, note, _marked(mine, differs))


def judge(checks: Sequence[Check], image: Image) -> tuple[Verdict, ...]:
    """Every check's verdict. A rule may return a bool, or a score from 0 to 1 that passes at 1.

    Raises:
        TypeError, ValueError: a rule returned something else. What a rule raises itself comes through.
    """
    return tuple(_verdict(check, check(image)) for check in checks)


def _verdict(check: Check, result: object) -> Verdict:
    if isinstance(result, Verdict):
        return result
    name = str(getattr(check, "__name__", type(check).__name__))
    if not isinstance(result, SupportsFloat):
        raise TypeError(f"check {name!r} returned {type(result).__name__}; return a bool, a score or a Verdict")
    score = float(result)
    if not 0.0 <= score <= 1.0:  # NaN fails it too
        raise ValueError(f"check {name!r} returned {score}; a score is between 0 and 1")
    return Verdict(name, score, score >= 1.0)


def _marked(rgb: np.ndarray, differs: np.ndarray) -> Image:
    """The render, faded to light grey, with every differing pixel in red."""
    grey = 255 - (255 - rgb.mean(axis=2)) * 0.25
    marked = np.repeat(grey[:, :, None], 3, axis=2).astype(np.uint8)
    marked[differs] = (220, 38, 38)
    return Image(marked)
