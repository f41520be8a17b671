"""Media as plain data: base64, and what makes `Image` and `Video` usable as fields of pydantic models."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from pydantic_core import CoreSchema, core_schema

from m3agent.errors import MediaError


def to_base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def from_base64(text: Any, error: type[MediaError]) -> bytes:
    """The bytes of `text`; raises `error` when it is not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as problem:
        raise error(f'the entry "data" is not base64: {problem}') from None


def read_limit(data: Mapping[str, Any], name: str, default: int, error: type[MediaError]) -> int:
    """The whole number data[name], or `default`; raises `error` when it is anything else."""
    limit = data.get(name, default)
    if not isinstance(limit, int) or limit < 1:
        raise error(f"the entry {name!r} must be a positive whole number, not {limit!r}")
    return limit


def field_schema(cls: Any) -> CoreSchema:
    """A pydantic schema of a class with `to_json` and `from_json`.

    Instances pass as they are; JSON has the object of `to_json`, and a dict of that kind is read too.
    """

    def read(data: dict[str, Any]) -> Any:
        try:
            return cls.from_json(data)
        except MediaError as error:
            raise ValueError(str(error)) from error

    plain = core_schema.dict_schema(core_schema.str_schema(), core_schema.any_schema())
    from_plain = core_schema.no_info_after_validator_function(read, plain)
    return core_schema.json_or_python_schema(
        json_schema=from_plain,
        python_schema=core_schema.union_schema([core_schema.is_instance_schema(cls), from_plain]),
        serialization=core_schema.plain_serializer_function_ser_schema(cls.to_json, when_used="json"),
    )
