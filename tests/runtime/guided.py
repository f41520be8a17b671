"""For the tests of guided decoding: schemas as people write them, and random walks over what a guide allows."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from m3agent.chat import Detokenizer, ParseEvent, ReplyParser, Tokenizer
from m3agent.runtime.guide import TurnGuide

NAMES = st.sampled_from(["a", "b", "city", "item", "Straße", "x-y", "name", "kind"])
WORDS = st.sampled_from(["", "red", "17", "null", "true", "[1]", " two words ", "<item>", "日本", 'say "hi"'])


def _bounds(draw: Any, low: int, high: int) -> dict[str, int]:
    first, second = sorted((draw(st.integers(low, high)), draw(st.integers(low, high))))
    return draw(st.sampled_from([{}, {"minimum": first}, {"maximum": second}, {"minimum": first, "maximum": second}]))


@st.composite
def scalars(draw: Any) -> dict[str, Any]:
    kind = draw(
        st.sampled_from(["string", "integer", "number", "boolean", "null", "enum", "const", "pattern", "format"])
    )
    if kind == "string":
        return {"type": "string", **draw(st.sampled_from([{}, {"minLength": 2}, {"maxLength": 5}]))}
    if kind in ("integer", "number"):
        return {"type": kind, **_bounds(draw, -50, 50)}
    if kind == "enum":
        values = draw(st.lists(st.one_of(WORDS, st.integers(-3, 20), st.booleans(), st.none()), min_size=1, max_size=4))
        return {"enum": list({repr(value): value for value in values}.values())}
    if kind == "const":
        return {"const": draw(st.one_of(WORDS, st.integers(-3, 3)))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from([r"^[a-z]{2,4}$", r"\d{3}", r"^a|b$", r"^(x/y)+$"]))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "uuid", "ipv4", "email", "date-time"]))}
    return {"type": kind}


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    @st.composite
    def objects(draw: Any) -> dict[str, Any]:
        properties = draw(st.dictionaries(NAMES, inner, min_size=1, max_size=3))
        required = [name for name in properties if draw(st.booleans())]
        return {"type": "object", "properties": properties, "required": required}

    @st.composite
    def arrays(draw: Any) -> dict[str, Any]:
        least = draw(st.integers(0, 2))
        return {"type": "array", "items": draw(inner), "minItems": least, "maxItems": least + draw(st.integers(0, 2))}

    maps = st.builds(lambda part: {"type": "object", "additionalProperties": part}, inner)
    tuples = st.builds(
        lambda parts: {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)},
        st.lists(inner, min_size=1, max_size=3),
    )
    unions = st.builds(lambda parts: {"anyOf": parts}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects(), arrays(), maps, tuples, unions)


schemas = st.recursive(scalars(), _containers, max_leaves=8)


@st.composite
def parameters(draw: Any) -> dict[str, Any]:
    """The parameters of a tool."""
    properties = draw(st.dictionaries(NAMES, schemas, max_size=4))
    return {"type": "object", "properties": properties, "required": [n for n in properties if draw(st.booleans())]}


def tool(schema: Mapping[str, Any], name: str = "f") -> dict[str, Any]:
    return {"name": name, "parameters": schema}


def walk(guide: TurnGuide, tokenizer: Tokenizer, begin: list[int], seed: int, limit: int = 3000) -> list[int]:
    """A turn that begins with `begin` and goes on at random, leaning towards what comes to an end."""
    choose = random.Random(seed)
    ids: list[int] = []
    for token in begin:
        guide.accept(token)
        ids.append(token)
    end = tokenizer.control["[e~["]
    while ids[-1:] != [end]:
        assert len(ids) < limit, f"no end in sight: {tokenizer.decode(ids)[:2000]!r}"
        allowed = guide.allowed()
        assert allowed is not None
        tokens = np.flatnonzero(allowed).tolist()
        closing = [t for t in tokens if tokenizer.is_control(t)]
        if not closing:
            closing = [t for t in tokens if tokenizer.decode([t]) in set('"}]123abxy/@.-:T')]
        token = choose.choice(closing if closing and choose.random() < min(0.1 + len(ids) / 300, 0.95) else tokens)
        guide.accept(token)
        ids.append(token)
    return ids


def read(ids: list[int], tools: list[dict[str, Any]], tokenizer: Tokenizer) -> list[ParseEvent]:
    """What the parser makes of a turn, as a session does it."""
    detokenizer, parser = Detokenizer(tokenizer), ReplyParser(tools, "disabled", tokens=True)
    events = [
        event for token in ids for text, control in detokenizer.push(token) for event in parser.feed(text, control)
    ]
    events += [event for text, control in detokenizer.finish() for event in parser.feed(text, control)]
    return events + parser.finish()
