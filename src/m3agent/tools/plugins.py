"""Toolsets of other packages, found by their entry points in the group "m3agent.toolsets"."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, cast

from m3agent.errors import ToolsetError
from m3agent.tools.define import Tool

GROUP = "m3agent.toolsets"


@dataclass(frozen=True)
class InstalledToolset:
    """One toolset that an installed package offers; nothing of it is imported yet."""

    name: str
    package: str
    version: str
    entry: EntryPoint

    def __str__(self) -> str:
        return f"{self.name} ({self.package} {self.version})"


def toolsets() -> list[InstalledToolset]:
    """The toolsets that installed packages offer, by name. Imports none of them."""
    found = [_installed(entry) for entry in entry_points(group=GROUP)]
    return sorted(found, key=lambda toolset: (toolset.name, toolset.package))


def toolset(name: str, **options: Any) -> Any:
    """The toolset `name` of an installed package, made with `options`.

    What comes back is what the package makes: a list of Tool, or an iterable of Tool that is a context manager too,
    for `async with`. Raises ToolsetError, which names the package, when there is none of this name or more than one,
    when it cannot be imported, when it does not take these options, or when it is no toolset.
    """
    installed = _find(name)
    where = f"toolset {name!r} of package {installed.package} {installed.version}"
    try:
        make = installed.entry.load()
    except Exception as error:
        raise ToolsetError(f"{where} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(make):
        raise ToolsetError(f"{where}: {installed.entry.value} is not a function; it has to make the tools")
    _check_options(where, make, options)
    made = make(**options)
    _check_made(where, made)
    return made


def _installed(entry: EntryPoint) -> InstalledToolset:
    if entry.dist is None:
        return InstalledToolset(entry.name, "unknown", "", entry)
    return InstalledToolset(entry.name, entry.dist.name, entry.dist.version, entry)


def _find(name: str) -> InstalledToolset:
    everything = toolsets()
    found = [toolset for toolset in everything if toolset.name == name]
    if not found:
        there = ", ".join(map(str, everything)) or "none"
        raise ToolsetError(f"no installed package offers a toolset {name!r}. Installed toolsets: {there}")
    if len(found) > 1:
        packages = " and ".join(toolset.package for toolset in found)
        raise ToolsetError(f"the packages {packages} both offer a toolset {name!r}; uninstall one of them")
    return found[0]


def _check_options(where: str, make: Any, options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(make)
    except (TypeError, ValueError):
        return  # no signature that could be read: the call itself will tell
    try:
        signature.bind(**options)
    except TypeError as error:
        takes = ", ".join(str(parameter) for parameter in signature.parameters.values()) or "none"
        raise ToolsetError(f"{where}: {error}. Its options: {takes}") from None


def _check_made(where: str, made: Any) -> None:
    if isinstance(made, list | tuple):
        for item in cast("list[object]", made):
            if not isinstance(item, Tool):
                kind = type(item).__name__
                raise ToolsetError(f"{where} made a {kind} where a Tool was expected: use @m3agent.tool")
    elif not isinstance(made, Iterable):
        raise ToolsetError(f"{where} made a {type(made).__name__}, which is no list of Tool")
