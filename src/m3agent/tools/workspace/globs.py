"""Patterns for paths: `*`, `?` and `[…]` inside a name, `**` for any directories, `{a,b}` for alternatives."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable

from m3agent.errors import ToolError

_MAX_ALTERNATIVES = 100


def path_filter(pattern: str) -> Callable[[str], bool]:
    """Whether a path (with "/", from the root) fits. A pattern without "/" is one for names, in any directory.

    Takes time in proportion to pattern and path, whatever the pattern. Raises ToolError for patterns that cannot fit.
    """
    if pattern.startswith(("/", "~")) or "\\" in pattern or ".." in pattern.split("/"):
        raise ToolError(f"The pattern {pattern!r} leads outside the workspace. Use one like '**/*.py' or 'src/*'.")
    choices = [_components(choice) for choice in _alternatives(pattern)]
    return lambda path: any(_fits(path.split("/"), components) for components in choices)


def _components(pattern: str) -> list[str]:
    parts = [part for part in pattern.split("/") if part not in ("", ".")]
    return parts if "/" in pattern else ["**", *parts]


def _alternatives(pattern: str) -> list[str]:
    """`{a,b}` spelled out, innermost first."""
    waiting, done = [pattern], list[str]()
    while waiting:
        text = waiting.pop()
        if (group := re.search(r"\{([^{}]*)\}", text)) is None:
            done.append(text)
        else:
            waiting += [text[: group.start()] + choice + text[group.end() :] for choice in group[1].split(",")]
        if len(waiting) + len(done) > _MAX_ALTERNATIVES:
            raise ToolError(f"The pattern has more than {_MAX_ALTERNATIVES} alternatives.")
    return done


def _fits(names: list[str], pattern: list[str]) -> bool:
    """All ways through the pattern at once: the set of places in it that the names so far can have led to."""
    places = _skipping({0}, pattern)
    for name in names:
        places = _skipping({place for before in places for place in _after(name, before, pattern)}, pattern)
    return len(pattern) in places


def _after(name: str, place: int, pattern: list[str]) -> list[int]:
    if place == len(pattern):
        return []
    if pattern[place] == "**":
        return [place]
    return [place + 1] if fnmatch.fnmatchcase(name, pattern[place]) else []


def _skipping(places: set[int], pattern: list[str]) -> set[int]:
    """`**` may stand for no directory at all."""
    reached = set(places)
    for place in range(len(pattern)):
        if place in reached and pattern[place] == "**":
            reached.add(place + 1)
    return reached
