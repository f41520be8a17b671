"""Reading one section of a config.json: typed fields, with the dotted name in every refusal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from m3agent.errors import ConfigError


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it stands (`path`, empty at the top). False when the object is empty or absent."""

    raw: Mapping[str, Any]
    path: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.raw, Mapping):
            raise ConfigError(self.path or "config.json", f"an object is needed, not {_kind(self.raw)}")

    def __bool__(self) -> bool:
        return bool(self.raw)

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def section(self, key: str, required: bool = False) -> Fields:
        """A nested object; an absent one reads as empty unless it is required."""
        value = self.raw.get(key)
        if value is None and required:
            raise ConfigError(self.name(key), "missing")
        return Fields({} if value is None else value, self.name(key))

    def must(self, key: str, allowed: Sequence[Any], absent_is_fine: bool = True) -> None:
        """Refuse any value but these; null counts as absent."""
        value = self.raw.get(key)
        if value is None and absent_is_fine:
            return
        if not any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in allowed):
            choices = " or ".join(repr(choice) for choice in allowed)
            problem = "missing" if value is None else f"{value!r} is not supported"
            raise ConfigError(self.name(key), f"{problem}; this code runs {choices}")

    def integer(
        self,
        key: str,
        *,
        default: int | None = None,
        alias: str | None = None,
        fallback: tuple[Fields, str] | None = None,
        least: int = 1,
    ) -> int:
        """A whole number of at least `least`; `fallback` is the same field in the other spelling."""
        value = self.raw.get(key)
        if value is None and alias is not None:
            value = self.raw.get(alias)
        if value is None and fallback is not None:
            section, other = fallback
            if section.raw.get(other) is not None:
                return section.integer(other, least=least)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(self.name(key), "missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(self.name(key), f"a whole number is needed, not {_kind(value)}")
        if value < least:
            raise ConfigError(self.name(key), f"{value} is below {least}")
        return value

    def number(self, key: str, *, default: float) -> float:
        """A positive number, or the default (which may be 0 for 'absent')."""
        value = self.raw.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(self.name(key), f"a number is needed, not {_kind(value)}")
        if not 0 < value < float("inf"):
            raise ConfigError(self.name(key), f"{value} is not a positive finite number")
        return float(value)

    def schedule(
        self, layers: int, *, flat: tuple[str, str, str], legacy: str, at: Fields | None = None
    ) -> tuple[bool, ...]:
        """One flag a layer, from the flat list of words (which wins) or the released list of zeros and ones."""
        key, yes, no = flat
        section = self if self.raw.get(key) is not None else (at or self)
        key = key if section is self and self.raw.get(key) is not None else legacy
        values = section.raw.get(key)
        if values is None:
            raise ConfigError(section.name(key), "missing; it says for each layer which kind it is")
        if not isinstance(values, Sequence) or isinstance(values, str):
            raise ConfigError(section.name(key), f"a list is needed, not {_kind(values)}")
        if len(values) != layers:
            raise ConfigError(section.name(key), f"{len(values)} entries for {layers} layers")
        known = {yes: True, no: False} if key != legacy else {0: False, 1: True}
        for layer, value in enumerate(values):
            if not isinstance(value, (str, int)) or value not in known:
                raise ConfigError(f"{section.name(key)}[{layer}]", f"{value!r} is not one of {sorted(known, key=str)}")
        return tuple(known[value] for value in values)


def _kind(value: Any) -> str:
    return "null" if value is None else f"{type(value).__name__} {value!r}"[:60]
