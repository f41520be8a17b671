"""What a loop remembers: every step with its code, picture and score, and which of them is the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from m3agent.media.image import Image
from m3agent.render import Rendering

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage


@dataclass(frozen=True)
class Verdict:
    """What one check says of one picture. `score` is 0 (nothing right) to 1 (all of it)."""

    name: str
    score: float
    passed: bool
    note: str = ""
    difference: Image | None = None


@dataclass(frozen=True)
class Step:
    """One round: the code the model wrote, what came of it, and what it cost.

    Attributes:
        index: 0 for the first draft.
        attempt: 0 for the first; see `refine`.
        code: as the model wrote it.
        image: the render, the first of several; None when it failed, with the reason in `error`.
        score: the mean over all checks, 0 to 1; 0 for a failed render, 1 without checks.
        difference: where the picture departs from the target, if a check compares with one.
        tokens: generated since the step before, the model's words around the call included.
        seconds: wall time since the step before, generation and rendering together.
        rendering: all pictures with their labels, and the renderer's notes; None when it failed.
    """

    index: int
    attempt: int
    code: str
    image: Image | None
    error: str | None
    score: float
    checks: tuple[Verdict, ...]
    tokens: int
    seconds: float
    rendering: Rendering | None = None

    @property
    def pictures(self) -> list[tuple[str, Image]]:
        """All pictures of the step, each with its label, which is empty for the one of a renderer that draws one."""
        if self.rendering is None:
            return [] if self.image is None else [("", self.image)]
        labels = self.rendering.labels or ("",) * len(self.rendering.images)
        return list(zip(labels, self.rendering.images, strict=True))

    @property
    def notes(self) -> tuple[str, ...]:
        """What the renderer had to say, such as console errors."""
        return self.rendering.notes if self.rendering is not None else ()

    @property
    def difference(self) -> Image | None:
        return next((verdict.difference for verdict in self.checks if verdict.difference is not None), None)

    @property
    def passed(self) -> bool:
        """A picture that every check accepts. Without checks nothing can be accepted, so False."""
        return self.image is not None and bool(self.checks) and all(verdict.passed for verdict in self.checks)


@dataclass(frozen=True)
class Refinement:
    """What came of a whole loop.

    Attributes:
        best: the step with the highest score, not the last one; None when nothing could be rendered.
        steps: all of them, in order.
        stopped: "passed", "no gain", "tokens", "seconds", "rounds", "answered" (the model ended by itself), or what
            a stopping rule of one's own said.
        text: the model's closing words, when it came to them.
        usage: of all model calls of the loop together.
    """

    best: Step | None
    steps: tuple[Step, ...]
    stopped: str
    text: str
    usage: Usage


def best_of(steps: Sequence[Step]) -> Step | None:
    """The step with the highest score among those with a picture; of equals the first (without checks: the last)."""
    drawn = [step for step in steps if step.image is not None]
    if not drawn:
        return None
    if not any(step.checks for step in drawn):
        return drawn[-1]
    return max(drawn, key=lambda step: (step.passed, step.score, -step.index))
