"""`Meter`: the last steps of a runtime, and what they come to by the second."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from statistics import median

WINDOW = 10.0  # seconds
STEPS = 4096  # at most


@dataclass(frozen=True)
class StepTime:
    """One step. began: by `time.perf_counter`; seconds; prompt: tokens of prompts; said: tokens generated; flops."""

    began: float
    seconds: float
    prompt: int
    said: int
    flops: int


@dataclass(frozen=True)
class Rates:
    """Over the last ten seconds, by the time in which steps ran: tokens and operations a second, the median step in
    seconds, and the share of the time in which steps ran. All 0 where none did.
    """

    output_tokens_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    flops_per_second: float = 0.0
    step_seconds: float = 0.0
    busy: float = 0.0


class Meter:
    """The worker learns; anybody may ask."""

    def __init__(self) -> None:
        self._steps: deque[StepTime] = deque(maxlen=STEPS)

    def learn(self, step: StepTime) -> None:
        self._steps.append(step)

    def rates(self, now: float | None = None) -> Rates:
        now = time.perf_counter() if now is None else now
        recent = [step for step in list(self._steps) if step.began >= now - WINDOW]
        seconds = sum(step.seconds for step in recent)
        if not seconds:
            return Rates()
        span = min(WINDOW, now - recent[0].began) or seconds
        return Rates(
            sum(step.said for step in recent) / seconds,
            sum(step.prompt for step in recent) / seconds,
            sum(step.flops for step in recent) / seconds,
            median(step.seconds for step in recent),
            min(1.0, seconds / span),
        )
