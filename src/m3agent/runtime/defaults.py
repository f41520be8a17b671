"""What a checkpoint itself says about generating: its generation_config.json and its special tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from m3agent.chat import Tokenizer
from m3agent.errors import ConfigError
from m3agent.json_file import read_object
from m3agent.runtime.sampling import Sampling

END_OF_MESSAGE, ROLE_START, DOCUMENT_START = "[e~[", "]~b]", "]~!b["


@dataclass(frozen=True)
class Defaults:
    """generation_config.json; what it does not say is what MiniMax-M3's API documents."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    do_sample: bool = True
    thinking_mode: Literal["adaptive", "enabled", "disabled"] | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> Defaults:
        """Raises CheckpointError for a file that is no JSON object, ConfigError for a value that cannot be meant."""
        path = folder / "generation_config.json"
        raw = read_object(path) or {}
        given = {name: raw[name] for name in cls.__dataclass_fields__ if raw.get(name) is not None}
        try:
            defaults = TypeAdapter(cls).validate_python(given)
            defaults.sampling()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise ConfigError(f"generation_config.{first['loc'][0]}", first["msg"]) from error
        except ValueError as error:
            raise ConfigError("generation_config", str(error)) from error
        return defaults

    def sampling(self) -> Sampling:
        """These settings for a call: greedy when the file says do_sample false."""
        if not self.do_sample:
            return Sampling(temperature=0.0)
        return Sampling(self.temperature, self.top_p, self.top_k, self.min_p)


def stop_tokens(tokenizer: Tokenizer) -> frozenset[int]:
    """What ends a reply: the end of a message, and, should a model run over it, a new role or document."""
    others = (tokenizer.control[text] for text in (ROLE_START, DOCUMENT_START) if text in tokenizer.control)
    return frozenset((tokenizer.control_id(END_OF_MESSAGE), *others))
