"""Results in both directions, with whatever a server may send."""

from __future__ import annotations

import base64
import json
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from mcp.types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

import m3agent as m3
from m3agent.tools.mcp.content import received, sent
from tests.media.makers import y4m

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
data = (
    st.text()
    | st.binary().map(lambda raw: base64.b64encode(raw).decode())
    | st.just(base64.b64encode(m3.Image(np.zeros((2, 2, 3), np.uint8)).to_png()).decode())
)
mime = st.sampled_from(["image/png", "video/mp4", "application/pdf", "", "%"])
block = st.one_of(
    st.builds(TextContent, text=st.text()),
    st.builds(ImageContent, data=data, mime_type=mime),
    st.builds(AudioContent, data=data, mime_type=mime),
    st.builds(ResourceLink, name=st.text(), uri=st.text()),
    st.builds(EmbeddedResource, resource=st.builds(TextResourceContents, uri=st.text(), text=st.text())),
    st.builds(EmbeddedResource, resource=st.builds(BlobResourceContents, uri=st.text(), blob=data)),
)


@given(st.lists(block, max_size=5), JSON)
@settings(max_examples=150)
def test_anything_a_server_sends_becomes_parts(content: list[Any], structured: Any) -> None:
    parts = received(CallToolResult(content=content, structured_content=structured))
    assert parts
    assert all(isinstance(part, str | m3.Image | m3.Video) for part in parts)
    assert not any(isinstance(a, str) and isinstance(b, str) for a, b in pairwise(parts))


@given(st.lists(st.text() | arrays.arrays(np.uint8, (2, 3, 3)).map(m3.Image), min_size=1, max_size=5))
@settings(max_examples=50)
def test_what_we_send_we_can_read(parts: list[Any]) -> None:
    back = received(CallToolResult(content=sent(parts)))
    pictures = [part for part in parts if isinstance(part, m3.Image)]
    assert [part for part in back if isinstance(part, m3.Image)] == pictures
    for text in (part for part in parts if isinstance(part, str)):
        assert any(text.removesuffix("\n") in part for part in back if isinstance(part, str))


def test_long_films_are_sampled() -> None:
    film = m3.Video([np.full((2, 2, 3), level, np.uint8) for level in range(100)], frame_rate=1)
    content = sent([film])
    captions = [part.text for part in content if isinstance(part, TextContent)]
    assert len(content) == 64
    assert [captions[0], captions[-1]] == ["Frame 1 of 100 at 0.00 s:", "Frame 100 of 100 at 99.00 s:"]


def test_structured_results_are_shown_once() -> None:
    for text, structured, shown in [
        ('{"n": 3}', {"n": 3}, ['{"n": 3}']),
        ("3", {"result": 3}, ["3"]),
        ("three", {"result": "three"}, ["three"]),
        ("there are three", {"n": 3}, ['there are three\n{"n": 3}']),
    ]:
        result = CallToolResult(content=[TextContent(text=text)], structured_content=structured)
        assert received(result) == shown
    assert received(CallToolResult(content=[], structured_content={"n": 3})) == ['{"n": 3}']
    assert received(CallToolResult(content=[])) == ["(no content)"]


def test_films_and_other_files_in_resources() -> None:
    def resource(raw: bytes, mime_type: str) -> Any:
        blob = base64.b64encode(raw).decode()
        embedded = EmbeddedResource(resource=BlobResourceContents(uri="file:///x", mime_type=mime_type, blob=blob))
        return received(CallToolResult(content=[embedded]))

    name, film = resource(y4m([1, 200], 32, 16, "1:1"), "video/x-raw")
    assert name == "[resource file:///x]"
    assert isinstance(film, m3.Video)
    assert len(film.frames) == 2
    (text,) = resource(b"%PDF-1.7 ...", "application/pdf")
    assert text == "[resource file:///x]\n[resource (application/pdf, pdf, 12 bytes) that cannot be shown]"
    link = ResourceLink(name="log", uri="file:///log", description="The log.")
    (text,) = received(CallToolResult(content=[link]))
    assert json.loads(text) == {"resource": "file:///log", "name": "log", "description": "The log."}
