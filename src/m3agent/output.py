"""`Output`: the type that a run's answer has to have: its JSON schema, what the model is told, the reading of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from typing_extensions import TypeVar

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.tools.arguments import clip
from m3agent.tools.schema import shown_schema
from m3agent.tools.signature import type_name

T = TypeVar("T", default=Any)

ATTEMPTS = 3  # answers at most, for what the schema cannot say


@dataclass(frozen=True)
class Output(Generic[T]):
    """Made by `output_of`. `schema` is a JSON schema of the whole type, references inside it."""

    adapter: TypeAdapter[T]
    schema: dict[str, Any]

    @property
    def request(self) -> str:
        """What is added to the user's message."""
        shown = {key: value for key, value in self.schema.items() if key != "title"}
        return f"\n\nAnswer with JSON that fits this schema, and nothing else:\n{json.dumps(shown, ensure_ascii=False)}"

    def read(self, text: str) -> T:
        """The answer's value. Raises ToolError, with a text for the model, for one that does not validate."""
        try:
            return self.adapter.validate_json(text)
        except ValidationError as error:
            raise ToolError(clip(f"The answer does not fit: {error}\nAnswer again, with JSON alone.")) from error


@lru_cache(maxsize=64)
def _cached(kind: Any) -> Output[Any]:
    return _make(kind)


def output_of(kind: Any) -> Output[Any]:
    """For anything that pydantic has a schema for: a model, dataclass, TypedDict, `list[…]`, Literal, int, ….

    Raises ToolDefinitionError for a type without a JSON schema.
    """
    try:
        return _cached(kind)
    except TypeError:  # a type that cannot be hashed
        return _make(kind)


def _make(kind: Any) -> Output[Any]:
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        schema = adapter.json_schema()
    except (PydanticUserError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise ToolDefinitionError(f"output={type_name(kind)}: there is no JSON schema for it: {reason}") from error
    # As the parameters of a tool are shown: definitions in place, no titles.
    inside = shown_schema({"properties": {"answer": schema}, "$defs": schema.get("$defs", {})})
    answer: dict[str, Any] = inside["properties"]["answer"]
    answer.pop("$defs", None)
    return Output(adapter, {**answer, **({"$defs": inside["$defs"]} if "$defs" in inside else {})})
