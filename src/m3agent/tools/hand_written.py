"""Tools with a hand-written JSON schema: their arguments stay JSON values, checked by jsonschema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, cast

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match  # pyright: ignore[reportUnknownVariableType]
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012, specification_with

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.tools.arguments import clip
from m3agent.tools.context import Context
from m3agent.tools.references import schema_parts
from m3agent.tools.signature import read_signature

_MAX_ERRORS = 5
_MAX_ERROR = 200  # characters of one; a message quotes the value that is wrong


class JsonArguments:
    """As `Arguments`, for a schema that was written by hand. `schema` is what the model is shown.

    Draft 2020-12, or the draft that `$schema` names. Raises ToolDefinitionError for what is no schema of an object,
    and for references that lead outside it, or nowhere.

    unchecked: formats that `validate` does not check, as `path: format`.
    """

    def __init__(self, tool: str, schema: Mapping[str, Any]) -> None:
        self._tool = tool
        whole = _copied(tool, schema)
        self.schema = {key: value for key, value in whole.items() if key != "$schema"}
        if whole.get("type") != "object":
            raise ToolDefinitionError(f'tool {tool!r}: its schema describes no object; it has to have "type": "object"')
        self.schema.setdefault("properties", {})
        kind: Any = validator_for(whole, default=Draft202012Validator)
        try:
            kind.check_schema(whole)
        except SchemaError as error:
            where = ".".join(map(str, error.absolute_path)) or "the top"
            raise ToolDefinitionError(f"tool {tool!r}: its schema is wrong at {where}: {error.message}") from error
        except RecursionError:
            raise ToolDefinitionError(f"tool {tool!r}: its schema is nested too deeply") from None
        parts = schema_parts(tool, whole, specification_with(kind.META_SCHEMA.get("$schema", ""), default=DRAFT202012))
        formats: Any = kind.FORMAT_CHECKER
        self.unchecked = tuple(
            f"{part.path or 'arguments'}: {part.schema['format']}"
            for part in parts
            if isinstance(part.schema.get("format"), str) and part.schema["format"] not in formats.checkers
        )
        # An empty registry: nothing is ever fetched for a reference.
        registry: Registry[Any] = Registry()
        self._validator: Any = kind(whole, registry=registry, format_checker=formats)

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments, unchanged. Raises ToolError whose text tells the model what is wrong."""
        values = cast("dict[str, Any]", json.loads(json.dumps(arguments)))
        try:
            errors: list[Any] = list(self._validator.iter_errors(values))
        except Unresolvable as error:  # by a keyword of a draft that `schema_parts` does not read
            raise ToolError(clip(f"{self._tool} cannot be called: its schema refers to {error.ref!r}")) from error
        if not errors:
            return values
        lines = [_line(error) for error in errors[:_MAX_ERRORS]]
        if len(errors) > _MAX_ERRORS:
            lines.append(f"and {len(errors) - _MAX_ERRORS} more")
        raise ToolError(clip(f"Invalid arguments for {self._tool}:\n" + "\n".join(lines)))


class JsonSignature:
    """How the function of such a tool is called: with the arguments, and the context where it asks for one."""

    def __init__(self, function: Callable[..., Any], tool: str) -> None:
        parameters = read_signature(function, tool, {}).parameters
        self._wants_context = len(parameters) == 2 and parameters[1].injected
        if not (len(parameters) == 1 or self._wants_context) or parameters[0].injected:
            raise ToolDefinitionError(
                f"tool {tool!r}: with a hand-written schema its function takes the arguments as one dict and, if it "
                "wants, a second parameter annotated m3agent.Context"
            )

    def bind(self, values: Mapping[str, Any], context: Context) -> tuple[list[Any], dict[str, Any]]:
        return [dict(values), *([context] if self._wants_context else [])], {}


def _line(error: Any) -> str:
    branches: Any = error.context  # of anyOf: the one that fits best says what is missing
    inner: Any = cast(Any, best_match)(branches) if branches else error
    place = ".".join(map(str, inner.absolute_path)) or "arguments"
    return f"{place}: {clip(inner.message, _MAX_ERROR)}"


def _copied(tool: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Of its own: what is checked now is what holds later, whatever the caller does with the schema."""
    try:
        return cast("dict[str, Any]", json.loads(json.dumps(dict(schema))))
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolDefinitionError(f"tool {tool!r}: its schema is no JSON: {error}") from error
