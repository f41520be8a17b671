"""Docstrings → a tool's description and those of its parameters (Google, NumPy and Sphinx style).

docstring-parser does the reading. Two of its gaps are closed here: parameters are lost when a docstring opens with a
section, and "Keyword Args" (Google) or "Other Parameters" (Google) are no sections to it.
"""

from __future__ import annotations

import inspect
import textwrap
from dataclasses import dataclass

from docstring_parser import Docstring, ParseError, google, numpydoc, rest

_KEYWORD_TITLES = ("Keyword Args", "Keyword Arguments", "Other Parameters", "Other Args", "Other Arguments")
_TITLES = {"Args", "Arguments", "Parameters", "Params", *_KEYWORD_TITLES}
_GOOGLE = google.GoogleParser(
    [
        *google.DEFAULT_SECTIONS,
        *(google.Section(title, "param", google.SectionType.MULTIPLE) for title in _KEYWORD_TITLES),
    ]
)
_NUMPY = numpydoc.NumpydocParser()

# Stands in for the summary, so that a docstring never opens with a section.
_SUMMARY = "\u2060"


@dataclass(frozen=True)
class Doc:
    """`description` is everything before the first section; `parameters` keeps names as documented, stars included."""

    description: str
    parameters: dict[str, str]


def read_doc(docstring: str | None) -> Doc:
    """Read a docstring in whichever of the three styles finds most parameters in it. Never raises."""
    if not docstring or not docstring.strip():
        return Doc("", {})
    docstring = _clean(docstring)
    text = f"{_SUMMARY}\n\n{docstring}"
    readings: list[Doc] = []
    for parse in (_GOOGLE.parse, _NUMPY.parse, rest.parse):
        try:
            readings.append(_doc(parse(text)))
        except ParseError:
            continue
    best = max(readings, key=lambda doc: len(doc.parameters), default=None)
    # With no parameters found the text is taken whole: a style that met a section of its own may have dropped a part.
    if best is None or (not best.parameters and len({doc.description for doc in readings}) > 1):
        return min(readings, key=lambda doc: len(doc.description), default=Doc(docstring, {}))
    return best


def _clean(docstring: str) -> str:
    """Without the source's indentation, which cannot be told from a section's own when a title is the first line."""
    clean = inspect.cleandoc(docstring)
    title, _, rest = clean.partition("\n")
    if title.removesuffix(":") in _TITLES and title.endswith(":") and not rest[:1].isspace():
        return f"{title}\n{textwrap.indent(rest, '    ')}"
    return clean


def _doc(parsed: Docstring) -> Doc:
    description = (parsed.description or "").replace(_SUMMARY, "", 1).strip()
    return Doc(
        description, {p.arg_name: (p.description or "").strip() for p in parsed.params if p.args[0] != "attribute"}
    )
