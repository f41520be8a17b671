"""What a tool returned, as the model will see it."""

from __future__ import annotations

import datetime
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import m3agent as m3
from m3agent.tools.results import result_parts

IMAGE = m3.Image(np.zeros((2, 3, 3), np.uint8))

values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8) | st.just(IMAGE),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=10,
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is\n", "as it is\n"),
        (None, "null"),
        (3, "3"),
        (np.float32(0.5), "0.5"),
        ([1, np.int64(2)], "[1, 2]"),
        (["a", "b"], '["a", "b"]'),
        ({"ü": datetime.date(2026, 1, 2), "b": b"\xff"}, '{"ü": "2026-01-02", "b": "_w=="}'),
        ({1}, "[1]"),
    ],
)
def test_text_and_json(value: Any, text: str) -> None:
    assert result_parts(value) == [text]


def test_a_list_of_text_and_pictures_keeps_its_order() -> None:
    assert result_parts(["a", IMAGE, {"n": 1}, "b", IMAGE]) == ["a", IMAGE, '{"n": 1}', "b", IMAGE]


@given(values)
def test_pictures_stand_at_their_place_in_the_json(value: Any) -> None:
    """Putting a quoted word back for each picture gives the JSON of the value with that word in place of pictures."""
    if isinstance(value, str | m3.Image) or (isinstance(value, list) and any(isinstance(v, m3.Image) for v in value)):
        return
    parts = result_parts(value)
    text = "".join(part if isinstance(part, str) else '"picture"' for part in parts)
    assert json.loads(text) == json.loads(json.dumps(value, default=lambda image: "picture"))


@pytest.mark.parametrize("value", [object(), [object()], {"a": object()}, {"a": [IMAGE, object()]}])
def test_image_10_unknown_objects_are_no_text(value: Any) -> None:
    with pytest.raises(m3.ToolError, match="returned a object, which is neither text, JSON nor a picture"):
        result_parts(value)


def test_a_value_that_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(m3.ToolError, match="no JSON form"):
        result_parts(loop)
