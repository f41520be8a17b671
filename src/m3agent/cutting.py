"""A result that is too long, cut to its head and tail, with a note that says how much there was."""

from __future__ import annotations

from m3agent.content import Text, ToolResult

LEAST = 200  # characters; what would be cut shorter says too little


def cut_result(result: ToolResult, keep: int, readable: bool) -> ToolResult:
    """The result with about `keep` characters of its text, two thirds of them from the beginning.

    readable: the model has the tool that shows the rest. Pictures stay where they are, and so do short texts.
    """
    total = len(result.text)
    if total <= keep:
        return result
    left, parts = total - keep, list(result.parts)
    # From the longest text, and on to the next one should it not be enough.
    for place in sorted(range(len(parts)), key=lambda place: -len(_text(parts[place]))):
        text = _text(parts[place])
        cut = min(left, len(text))
        if cut <= 0:
            break
        head = (len(text) - cut) * 2 // 3
        rest = f"; read_result(call_id={result.call_id!r}, start={head}) shows them" if readable else ""
        note = f"\n[… {cut} of {len(text)} characters left out{rest} …]\n"
        tail = text[head + cut :]
        parts[place] = Text(text=f"{text[:head]}{note}{tail}")
        left -= cut
    return result.model_copy(update={"parts": tuple(parts)})


def _text(part: object) -> str:
    return part.text if isinstance(part, Text) else ""
