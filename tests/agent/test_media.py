"""Pictures in a session: decoded before they enter, at their place in the prompt, once."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pil

import m3agent as m3
from m3agent.media import image as image_module
from tests.agent.double import ScriptedRuntime, block, call, check_log

pytestmark = pytest.mark.anyio


def agent(runtime: ScriptedRuntime, *tools: Any, **options: Any) -> m3.Agent:
    return m3.Agent(runtime, tools=tools, **options)


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Pil.effect_noise((96, 64), 60).convert("RGB").save(buffer, "JPEG")
    return buffer.getvalue()


BROKEN = {
    "half": jpeg()[: len(jpeg()) // 2],
    "html": b"<!doctype html><html><body>404</body></html>",
    "empty": b"",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_image_05_a_broken_picture_of_the_user_never_enters(
    runtime: ScriptedRuntime, tmp_path: Path, kind: str
) -> None:
    path = tmp_path / "shelf.png"
    path.write_bytes(BROKEN[kind])
    session = agent(runtime.says("ok", "fine")).session()
    with pytest.raises(m3.ImageError, match=r"shelf\.png"):
        await session.run("Look", m3.Image(path))
    assert (session.messages, session.tokens) == ([], [])
    await session.run("Hello")
    with pytest.raises(m3.ImageError):
        await session.run("Look", m3.Image(path))
    assert (await session.run("Hello")).text == "fine"
    check_log(runtime, session)


@pytest.mark.parametrize("kind", BROKEN)
async def test_image_05_a_broken_picture_of_a_tool_is_an_error_for_the_model(
    runtime: ScriptedRuntime, kind: str
) -> None:
    @m3.tool
    async def shot() -> m3.Image:
        return m3.Image(BROKEN[kind])

    session = agent(runtime.says(block(call("shot")), "I see nothing."), shot).session()
    reply = await session.run("Look")
    result = session.messages[2].results[0]
    assert result.error
    assert len(result.text) <= 800
    assert reply.text == "I see nothing."
    # and after a reload
    messages = m3.load_messages(m3.dump_messages(session.messages))
    again = agent(runtime.says("fine"), shot).session(messages)
    assert (await again.run("Go on")).text == "fine"
    check_log(runtime, again)


async def test_image_05_a_wrong_extension_alone_is_fine(runtime: ScriptedRuntime, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(jpeg())
    session = agent(runtime.says("ok")).session()
    await session.run(m3.Image(path))
    assert [patches.tokens for patches in runtime.media] == [6]


@dataclass
class Report:
    title: str
    plot: m3.Image


@pytest.mark.parametrize("form", ["image", "pil", "list", "dataclass", "model", "nested"])
async def test_image_10_a_picture_from_a_tool_is_pixels_at_its_place(runtime: ScriptedRuntime, form: str) -> None:
    import pydantic

    class Page(pydantic.BaseModel):
        title: str
        plot: m3.Image

    picture = Pil.new("RGB", (112, 56), "red")
    image = m3.Image(picture)
    value = {
        "image": image,
        "pil": picture,
        "list": ["before", image, "after"],
        "dataclass": Report("t", image),
        "model": Page(title="t", plot=image),
        "nested": {"pages": [{"n": 1, "view": image}], "last": True},
    }[form]

    @m3.tool
    def plot() -> Any:
        return value

    session = agent(runtime.says(block(call("plot")), "ok"), plot).session()
    await session.run("x")
    marker = runtime.tokenizer.control["]<]image[>["]
    picture_text = "]<]start of image[>[" + 8 * "]<]image[>[" + "]<]end of image[>["
    assert session.tokens.count(marker) == 8  # 112x56 pixels, whatever the base64 length
    assert runtime.media[0].tokens == 8
    expected = {
        "image": picture_text,
        "pil": picture_text,
        "list": f"before{picture_text}after",
        "dataclass": f'{{"title": "t", "plot": {picture_text}}}',
        "model": f'{{"title": "t", "plot": {picture_text}}}',
        "nested": f'{{"pages": [{{"n": 1, "view": {picture_text}}}], "last": true}}',
    }[form]
    assert check_log(runtime, session)[4].body == f"<response>{expected}</response>"
    assert m3.load_messages(m3.dump_messages(session.messages)) == session.messages


async def test_image_10_an_unknown_object_is_an_error_and_never_its_repr(runtime: ScriptedRuntime) -> None:
    class Window:
        pass

    @m3.tool
    def opened():
        return {"window": Window()}

    session = agent(runtime.says(block(call("opened")), "ok"), opened).session()
    await session.run("x")
    result = session.messages[2].results[0]
    assert result.error
    assert result.text == "the tool returned a Window, which is neither text, JSON nor a picture"


async def test_image_12_each_picture_is_decoded_and_cut_once(
    runtime: ScriptedRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    real = image_module.Image._decode  # pyright: ignore[reportPrivateUsage]

    def decode(image: m3.Image) -> Any:
        decoded.append(image.name)
        return real(image)

    monkeypatch.setattr(image_module.Image, "_decode", decode)

    @m3.tool
    def screenshot() -> m3.Image:
        return m3.Image(jpeg())

    session = agent(runtime, screenshot).session()
    for _ in range(6):
        runtime.says(block(call("screenshot")), "ok")
        await session.run("Look", m3.Image(jpeg()))
    assert len(decoded) == 12
    assert len(runtime.media) == 12


async def test_films_stand_in_a_prompt_as_pictures_do(runtime: ScriptedRuntime) -> None:
    frames = [np.full((28, 28, 3), value, np.uint8) for value in (0, 90, 180)]
    session = agent(runtime.says("ok")).session()
    await session.run("What happens?", m3.Video(frames, frame_rate=1.0))
    assert [(p.kind, p.tokens) for p in runtime.media] == [("video", 8)]
    assert m3.load_messages(m3.dump_messages(session.messages)) == session.messages


async def test_a_model_without_eyes_says_so(runtime: ScriptedRuntime) -> None:
    runtime.pixels = None
    with pytest.raises(m3.MediaError, match="no vision tower"):
        await agent(runtime).run(m3.Image(jpeg()))
