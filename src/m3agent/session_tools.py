"""`SessionTools`: the tools of a session, and what its model knows of them.

The definitions at the front of the prompt never change once they are in the log. What comes or goes later is news, told
in a user's message. Both stand in the messages, so a session that is made from messages has the same prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from typing import Any

from m3agent.chat import tool_json
from m3agent.content import Message, ToolChange
from m3agent.errors import ToolDefinitionError
from m3agent.tools import Tool

Definition = dict[str, Any]


class SessionTools:
    """by_name: the tools that can be called. news: what the model has yet to be told."""

    def __init__(self, tools: Iterable[Tool[..., Any]], messages: Items[Message]) -> None:
        """messages: where the session goes on from. Tools that are gone there stay so until they are added again."""
        given, gone = list(tools), _gone(messages)
        self.by_name = {tool.name: tool for tool in given if tool.name not in gone}
        self.news: list[ToolChange] = []
        self._head = _head(messages, given) if messages else None
        self._known: Mapping[str, Definition] = {}
        self.reread(messages)

    @property
    def definitions(self) -> list[Definition]:
        return [tool.definition for tool in self.by_name.values()]

    @property
    def head(self) -> tuple[Definition, ...]:
        """The definitions at the front of the prompt."""
        return tuple(self.definitions) if self._head is None else self._head

    def add(self, tool: Tool[..., Any]) -> None:
        """Raises ToolDefinitionError for a name that is taken."""
        if tool.name in self.by_name:
            raise ToolDefinitionError(f"there is a tool {tool.name!r} already; give one of them another name")
        self.by_name[tool.name] = tool
        self._compare()

    def remove(self, name: str) -> None:
        """Raises ToolDefinitionError for a name that no tool has."""
        if name not in self.by_name:
            there = ", ".join(self.by_name) or "none"
            raise ToolDefinitionError(f"there is no tool {name!r} to remove; there are: {there}")
        del self.by_name[name]
        self._compare()

    def told(self, changes: Iterable[ToolChange]) -> None:
        """The head, and these changes, are in the log now."""
        if self._head is None:
            self._head = tuple(self.definitions)
            self._known = {definition["name"]: definition for definition in self._head}
        self._known = _after(self._known, changes)
        self._compare()

    def reread(self, messages: Items[Message]) -> None:
        """The model knows what these messages say, and no more."""
        known = {definition["name"]: definition for definition in self._head or ()}
        self._known = _after(known, _changes(messages))
        self._compare()

    def copy(self) -> SessionTools:
        other = SessionTools(self.by_name.values(), ())
        other.news, other._head, other._known = list(self.news), self._head, self._known
        return other

    def _compare(self) -> None:
        self.news = [] if self._head is None else _news(self._known, self.definitions)


def _news(known: Mapping[str, Definition], tools: Items[Definition]) -> list[ToolChange]:
    """What has to be told to one who knows `known`; a tool that has become another one goes, and comes."""
    now = {tool["name"]: tool for tool in tools}
    same = {name for name in known if name in now and tool_json(known[name]) == tool_json(now[name])}
    removed = tuple(name for name in known if name not in same)
    added = tuple(definition for name, definition in now.items() if name not in same)
    changes = [ToolChange(removed=removed)] if removed else []
    return [*changes, ToolChange(added=added)] if added else changes


def _after(known: Mapping[str, Definition], changes: Iterable[ToolChange]) -> Mapping[str, Definition]:
    found = dict(known)
    for change in changes:
        found |= {definition["name"]: definition for definition in change.added}
        for name in change.removed:
            found.pop(name, None)
    return found


def _head(messages: Items[Message], tools: Iterable[Tool[..., Any]]) -> tuple[Definition, ...]:
    """Messages that do not say it (put together by hand, or the end of others) are taken to have had those of `tools`
    in front that are not news in them.
    """
    if messages[0].head_tools is not None:
        return messages[0].head_tools
    first: dict[str, bool] = {}  # by name: whether the first news of it was that it came
    for change in _changes(messages):
        for definition in change.added:
            first.setdefault(definition["name"], True)
        for name in change.removed:
            first.setdefault(name, False)
    return tuple(tool.definition for tool in tools if not first.get(tool.name, False))


def _gone(messages: Items[Message]) -> set[str]:
    gone: set[str] = set()
    for change in _changes(messages):
        gone -= {definition["name"] for definition in change.added}
        gone |= set(change.removed)
    return gone


def _changes(messages: Items[Message]) -> Iterator[ToolChange]:
    for message in messages:
        yield from (part for part in message.parts if isinstance(part, ToolChange))
