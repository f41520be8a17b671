"""`RunOptions`: what a run can be told, for every way of starting one; `Limits`: where it ends at the latest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from m3agent.runtime import Sampling


class RunOptions(TypedDict, total=False):
    """Options of one run, the same for `run`, `stream` and `run_sync`. None, or none given, takes the agent's own.

    max_turns: the limit on model turns.
    max_tokens: the limit on generated tokens over all turns.
    sampling: how the next token is chosen.

    A limit that is reached is no error: `reply.stop` says so, and the session can go on.
    """

    max_turns: int | None
    max_tokens: int | None
    sampling: Sampling | None


def merged(defaults: RunOptions, options: Mapping[str, Any]) -> RunOptions:
    """The options of a run that was told `options`. Raises TypeError, which names options that do not exist."""
    unknown = [name for name in options if name not in RunOptions.__annotations__]
    if unknown:
        known = ", ".join(RunOptions.__annotations__)
        raise TypeError(f"a run has no option {', '.join(map(repr, unknown))}; there are: {known}")
    given = {name: value for name, value in options.items() if value is not None}
    return RunOptions(**{**defaults, **given})  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True)
class Limits:
    """Of one run: model turns, and generated tokens over all turns."""

    turns: int
    tokens: int | None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.turns}")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.tokens}")
