"""When a loop ends: good enough, no gain any more, or a budget spent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from m3agent.loops.record import Step

StopRule = Callable[[Sequence[Step]], "str | None"]


@dataclass(frozen=True)
class Stop:
    """Asked after each step; the reason to stop, or None to go on. Any function of that shape can take its place.

    Args:
        passing: stop at the first picture that every check accepts.
        patience: stop after this many steps in a row without a better score.
        tokens: stop when the steps generated at least this many tokens.
        seconds: stop when the steps took at least this long, in wall time.
    """

    passing: bool = True
    patience: int | None = None
    tokens: int | None = None
    seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("patience", "tokens", "seconds"):
            limit = getattr(self, name)
            if limit is not None and limit <= 0:
                raise ValueError(f"{name} is {limit}; give a number above 0, or None for no limit")

    def __call__(self, steps: Sequence[Step]) -> str | None:
        if not steps:
            return None
        if self.passing and steps[-1].passed:
            return "passed"
        if self.patience is not None and _steps_without_gain(steps) >= self.patience:
            return "no gain"
        if self.tokens is not None and sum(step.tokens for step in steps) >= self.tokens:
            return "tokens"
        if self.seconds is not None and sum(step.seconds for step in steps) >= self.seconds:
            return "seconds"
        return None


def _steps_without_gain(steps: Sequence[Step]) -> int:
    scores = [step.score for step in steps]
    return len(scores) - 1 - scores.index(max(scores))
