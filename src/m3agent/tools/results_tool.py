"""The results toolset: the model reads on in a result of which it was shown a part."""

from __future__ import annotations

from typing import Any

from m3agent.errors import ToolError
from m3agent.tools.context import Context
from m3agent.tools.define import Tool, tool

LONGEST = 20_000  # characters of one look


def results() -> list[Tool[..., Any]]:
    """One tool, `read_result(call_id, start, length)`. Where a session has it, the note in a cut result names it."""

    @tool
    def read_result(call_id: str, context: Context, start: int = 0, length: int = 4000) -> str:
        """Read on in a long result that was shown in part.

        Args:
            call_id: as the note in the result says it
            start: the first character, from 0
            length: how many characters
        """
        try:
            text: str = context.session.full_result(call_id)
        except KeyError:
            raise ToolError(f"there is no result {call_id!r}") from None
        if not 0 <= start < len(text):
            raise ToolError(f"the result has characters 0 to {len(text) - 1}")
        end = min(start + max(1, min(length, LONGEST)), len(text))
        return f"{text[start:end]}\n[characters {start} to {end} of {len(text)}]"

    return [read_result]
