"""Reading the small JSON files of a checkpoint, with an error that names the file whatever is wrong with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from m3agent.errors import CheckpointError


def read_text(path: Path) -> str | None:
    """A UTF-8 text; None if there is no such file. Raises CheckpointError for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: no UTF-8 text ({error})") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """A JSON object; None if there is no such file. Raises CheckpointError for anything else."""
    text = read_text(path)
    if text is None:
        return None
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object but {type(value).__name__}")
    return value
