"""Regular expressions of strings and numbers as terminals of the grammar (Rust's syntax, between slashes)."""

from __future__ import annotations

from functools import cache

_DAY = r"(0[1-9]|1[0-9]|2[0-8])"
_DATE = rf"[12][0-9]{{3}}-((0[1-9]|1[0-2])-{_DAY}|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31)"
_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{1,6})?"
_ZONE = r"(Z|[+\-]([01][0-9]|2[0-3]):[0-5][0-9])"
_BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_LABEL = r"[a-z0-9]([a-z0-9\-]{0,20}[a-z0-9])?"
_BASE64 = r"[A-Za-z0-9_\-]"

# As RFC 3339 and others have them, narrower where readers differ: a leap day is never written.
_FORMATS = {
    "date": _DATE,
    "time": rf"{_TIME}({_ZONE})?",
    "date-time": rf"{_DATE}T{_TIME}({_ZONE})?",
    "duration": r"P([0-9]{1,3}D(T[0-9]{1,2}H([0-9]{1,2}M)?)?|T[0-9]{1,4}(H|M|S))",
    "uuid": r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "email": rf"[a-z0-9]([a-z0-9._+\-]{{0,30}}[a-z0-9])?@({_LABEL}\.){{1,3}}[a-z]{{2,6}}",
    "hostname": rf"({_LABEL}\.){{0,3}}{_LABEL}",
    "uri": rf"https?:\/\/({_LABEL}\.){{1,3}}[a-z]{{2,6}}(\/[A-Za-z0-9._~\-]{{0,40}}){{0,6}}",
    # bytes, as the arguments of a tool carry them
    "base64url": rf"({_BASE64}{{4}})*({_BASE64}[AQgw]==|{_BASE64}{{2}}[AEIMQUYcgkosw048]=)?",
    "binary": rf"({_BASE64}{{4}})*({_BASE64}[AQgw]==|{_BASE64}{{2}}[AEIMQUYcgkosw048]=)?",
    # these say what a string means, and any string is valid
    **dict.fromkeys(("path", "file-path", "directory-path", "password"), ""),
}


def any_text() -> str:
    return "/(?s:.*)/"


def integer_pattern() -> str:
    """Without bounds: what fits into 64 bits."""
    return "/-?(0|[1-9][0-9]{0,17})/"


def length_pattern(least: object, most: object) -> str:
    """In characters; "" when both are absent."""
    low = least if isinstance(least, int) else 0
    if isinstance(most, int):
        return f"/(?s:.{{{low},{most}}})/"
    return f"/(?s:.{{{low},}})/" if low else ""


def format_pattern(name: str) -> str | None:
    """ "" for a format that any string has, None for one that is not known here."""
    pattern = _FORMATS.get(name)
    return None if pattern is None else f"/{pattern}/" if pattern else ""


def search_pattern(pattern: str) -> str | None:
    """A schema's `pattern`, which may match anywhere in a string, as a terminal for the whole string.

    None where it needs what the grammar's expressions have not (looking ahead or behind, anchors inside).
    """
    wholes: list[str] = []
    for choice in _alternatives(pattern):
        begin, end = "(?s:.*)", "(?s:.*)"
        if choice.startswith("^"):
            begin, choice = "", choice[1:]
        if choice.endswith("$") and not _escaped(choice, len(choice) - 1):
            end, choice = "", choice[:-1]
        wholes.append(f"{begin}({choice}){end}")
    terminal = f"/{_slashed('|'.join(wholes))}/"
    return terminal if _compiles(terminal) else None


@cache
def _compiles(terminal: str) -> bool:
    from llguidance import LLMatcher  # only where a schema has patterns

    return not LLMatcher.validate_grammar(f"start: T\nT: {terminal}\n")


def _alternatives(pattern: str) -> list[str]:
    """Cut at every | that stands outside of groups and classes."""
    found, depth, in_class, begin = [], 0, False, 0
    for place, character in enumerate(pattern):
        if _escaped(pattern, place):
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and depth == 0:
            found.append(pattern[begin:place])
            begin = place + 1
    return [*found, pattern[begin:]]


def _escaped(text: str, place: int) -> bool:
    before = text[:place]
    return (len(before) - len(before.rstrip("\\"))) % 2 == 1


def _slashed(pattern: str) -> str:
    """With slashes and line ends escaped, as the notation between slashes needs."""
    out: list[str] = []
    for place, character in enumerate(pattern):
        if character == "/" and not _escaped(pattern, place):
            out.append("\\/")
        else:
            out.append({"\n": "\\n", "\r": "\\r"}.get(character, character))
    return "".join(out)
