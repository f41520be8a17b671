"""Parameters → a pydantic model that turns what the model wrote into the declared Python types, or says what is wrong.

Only pydantic's public API is used (create_model, validation from JSON, JSON schema).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.json_schema import PydanticJsonSchemaWarning
from pydantic_core import PydanticSerializationError, to_jsonable_python

from m3agent.errors import ToolDefinitionError, ToolError
from m3agent.media import Image, Video
from m3agent.tools.schema import shown_schema
from m3agent.tools.signature import Parameter, type_name

_CONFIG = ConfigDict(extra="forbid", val_json_bytes="base64", ser_json_bytes="base64")
_MAX_ERRORS = 5
MAX_TEXT = 800  # characters of an error that the model reads


class Arguments:
    """Validates the arguments of one tool. `schema` is what the model is shown."""

    unchecked: tuple[str, ...] = ()  # pydantic checks the types themselves

    def __init__(self, tool: str, parameters: Sequence[Parameter], descriptions: Mapping[str, str]) -> None:
        self._tool = tool
        # Fields are numbered and carry the real name as alias, so that no parameter name can clash with pydantic's own.
        self._names = {f"arg{index}": parameter.name for index, parameter in enumerate(parameters)}
        self._model = self._build(parameters, descriptions)
        self.schema = shown_schema(self._model.model_json_schema())

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """JSON values → the declared Python types, by parameter name; absent ones stay absent.

        Raises ToolError whose text tells the model what is wrong.
        """
        try:
            # As JSON, not as Python objects: only then do strings become bytes, dates, enum members, tuples.
            values = self._model.model_validate_json(json.dumps(arguments))
        except ValidationError as error:
            raise ToolError(self._explain(error)) from error
        return {self._names[field]: getattr(values, field) for field in values.model_fields_set}

    def _build(self, parameters: Sequence[Parameter], descriptions: Mapping[str, str]) -> type[BaseModel]:
        fields: dict[str, Any] = {}
        for field, parameter in zip(self._names, parameters, strict=True):
            definition = _field(self._tool, parameter, descriptions.get(parameter.name, ""))
            _check_field(self._tool, parameter, definition)
            fields[field] = definition
        return create_model("Arguments", __config__=_CONFIG, **fields)

    def _explain(self, error: ValidationError) -> str:
        found = error.errors(include_url=False, include_input=False, include_context=False)
        lines: list[str] = []
        for problem in found[:_MAX_ERRORS]:
            place = ".".join(str(part) for part in problem["loc"]) or "arguments"
            if problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
                lines.append(
                    f"{place}: there is no such parameter (there are: {', '.join(self._names.values()) or 'none'})"
                )
            else:
                lines.append(f"{place}: {problem['msg']}")
        if len(found) > _MAX_ERRORS:
            lines.append(f"and {len(found) - _MAX_ERRORS} more")
        return clip(f"Invalid arguments for {self._tool}:\n" + "\n".join(lines))


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters, with a mark where something was cut."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _field(tool: str, parameter: Parameter, description: str) -> tuple[Any, Any]:
    if _mentions_media(parameter.hint):
        raise ToolDefinitionError(
            f"tool {tool!r}, parameter {parameter.name!r}: a model cannot write a picture or film; take a path"
        )
    options: dict[str, Any] = {"alias": parameter.name}
    if description:
        options["description"] = description
    if not parameter.required:
        # The function's own default is used for an absent argument; this one only makes the field optional.
        options["default_factory"] = lambda: None
        options["json_schema_extra"] = _default_extra(parameter)
    return (parameter.hint, Field(**options))


def _default_extra(parameter: Parameter) -> dict[str, Any]:
    if parameter.variadic or parameter.default is None:
        return {}
    try:
        default = to_jsonable_python(parameter.default, bytes_mode="base64", by_alias=True)
        json.dumps(default, allow_nan=False)
    except (PydanticSerializationError, TypeError, ValueError):
        return {}  # no JSON value: the parameter is optional all the same
    return {"default": default}


def _check_field(tool: str, parameter: Parameter, definition: tuple[Any, Any]) -> None:
    """Build the one field alone, so that an error can name its parameter."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", PydanticJsonSchemaWarning)
            create_model("Arguments", __config__=_CONFIG, arg=definition).model_json_schema()
    except (PydanticUserError, PydanticInvalidForJsonSchema, PydanticJsonSchemaWarning, TypeError, NameError) as error:
        reason = str(error).partition("\n")[0]
        raise ToolDefinitionError(
            f"tool {tool!r}, parameter {parameter.name!r}: {type_name(parameter.hint)} has no JSON form: {reason}"
        ) from error


def _mentions_media(hint: Any) -> bool:
    return hint in (Image, Video) or any(_mentions_media(part) for part in get_args(hint))
