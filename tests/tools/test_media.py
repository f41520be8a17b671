"""The media toolset: what is shown, where it lies in the original, and that nothing outside the folder is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from PIL import Image as Pil

import m3agent as m3
from m3agent.tools.execute import call_tool
from m3agent.tools.media.difference import difference, regions
from tests.media.makers import encode_film, y4m

pytestmark = pytest.mark.anyio


async def use(folder: Path, name: str, **arguments: Any) -> list[Any]:
    tools = {tool.name: tool for tool in m3.tools.media(folder)}
    return await call_tool(tools, name, arguments, m3.Context(name, "call_1"))


def gradient(width: int, height: int) -> Pil.Image:
    y, x = np.mgrid[:height, :width]
    return Pil.fromarray(np.stack([x, y, x + y], -1).astype(np.uint8))


async def test_look_gives_size_format_and_the_upright_picture(tmp_path: Path) -> None:
    exif = Pil.Exif()
    exif[0x0112] = 6  # turned a quarter
    gradient(40, 20).save(tmp_path / "photo.png", exif=exif)
    text, picture = await use(tmp_path, "look", path="photo.png")
    assert text == "photo.png: 20 x 40 pixels, png\n"
    assert (picture.width, picture.height) == (20, 40)
    Path(tmp_path, "film.gif").write_bytes(encode_film([gradient(8, 8), Pil.new("RGB", (8, 8))], "GIF", [100, 100]))
    text, _ = await use(tmp_path, "look", path="film.gif")
    assert "first of 2 frames (sample_video" in text


async def test_crop_is_the_originals_own_pixels(tmp_path: Path) -> None:
    gradient(60, 50).save(tmp_path / "a.png")
    text, part = await use(tmp_path, "crop", path="a.png", box=[10, 20, 30, 25])
    assert text.startswith("a.png (60 x 50), left 10, top 20, right 30, bottom 25.")
    assert "(10 + x, 20 + y)" in text
    assert np.array_equal(part.rgb, np.asarray(gradient(60, 50))[20:25, 10:30])
    text, part = await use(tmp_path, "crop", path="a.png", box=[-5, 40, 10, 900])  # cut to what there is
    assert "left 0, top 40, right 10, bottom 50" in text
    with pytest.raises(m3.ToolError, match=r"holds no pixel of 'a.png', which is 60 x 50"):
        await use(tmp_path, "crop", path="a.png", box=[60, 0, 70, 10])


async def test_zoom_says_where_its_pixels_are(tmp_path: Path) -> None:
    gradient(60, 50).save(tmp_path / "a.png")
    text, part = await use(tmp_path, "zoom", path="a.png", box=[10, 20, 30, 25], scale=10)
    assert (part.width, part.height) == (200, 50)
    assert "(10 + x/10, 20 + y/10)" in text
    assert np.array_equal(part.rgb[25, 105], np.asarray(gradient(60, 50))[22, 20])
    with pytest.raises(m3.ToolError, match=r"the scale may be at most 36\.51"):
        await use(tmp_path, "zoom", path="a.png", box=[0, 0, 60, 50], scale=100)
    text, part = await use(tmp_path, "zoom", path="a.png", box=[0, 0, 60, 50], scale=36.51)
    assert part.width == 2191
    with pytest.raises(m3.ToolError, match="scale"):
        await use(tmp_path, "zoom", path="a.png", box=[0, 0, 60, 50], scale=0)


async def test_a_film_is_sampled_by_time_and_by_count(tmp_path: Path) -> None:
    Path(tmp_path, "film").write_bytes(y4m([20, 60, 100, 140, 180, 220], 33, 17, "2:1"))
    head, *shown = await use(tmp_path, "sample_video", path="film", count=3)
    assert head == "film: 6 frames of 33 x 17 pixels, the last one at 2.50 s\n"
    assert shown[::2] == ["0.00 s:\n", "1.00 s:\n", "2.50 s:\n"]
    levels = [int(picture.rgb.mean()) for picture in shown[1::2]]
    assert levels == sorted(levels)
    assert levels[0] < 30
    assert levels[-1] > 200
    _, *shown = await use(tmp_path, "sample_video", path="film", times=[2.9, 0.7])  # in the order of time
    assert shown[::2] == ["0.50 s:\n", "2.50 s:\n"]
    with pytest.raises(m3.ToolError, match=r"no frame at 3.5 s: the film runs from 0 to 3.00 s"):
        await use(tmp_path, "sample_video", path="film", times=[3.5])
    with pytest.raises(m3.ToolError, match=r"Give 1 to 32 times"):
        await use(tmp_path, "sample_video", path="film", times=[])


async def test_an_animation_is_a_film(tmp_path: Path) -> None:
    frames = [Pil.new("RGB", (8, 6), (level, level, level)) for level in (10, 120, 240)]
    Path(tmp_path, "a.gif").write_bytes(encode_film(frames, "GIF", [100, 300, 100]))
    _, *shown = await use(tmp_path, "sample_video", path="a.gif", times=[0.3])
    assert shown[0] == "0.10 s:\n"
    assert shown[1].rgb[0, 0].tolist() == [120, 120, 120]


async def test_compare_counts_and_places_the_differences(tmp_path: Path) -> None:
    first = np.full((100, 200, 3), 200, np.uint8)
    second = first.copy()
    second[10:20, 30:50] = 0
    second[80:82, 150:151] = (200, 200, 190)
    Pil.fromarray(first).save(tmp_path / "a.png")
    Pil.fromarray(second).save(tmp_path / "b.png")
    text, marked = await use(tmp_path, "compare", path_a="a.png", path_b="b.png")
    assert text.startswith("1.0100% of 200 x 100 pixels differ by more than 0 of 255; the largest difference")
    assert re.findall(r"^(\d+, \d+, \d+, \d+): (\d+) pixels", text, re.MULTILINE) == [
        ("30, 10, 50, 20", "200"),
        ("150, 80, 151, 82", "2"),
    ]
    assert marked.rgb[15, 40].tolist() == [220, 38, 38]
    text, _ = await use(tmp_path, "compare", path_a="a.png", path_b="b.png", tolerance=10)
    assert "1 region as" in text
    (text,) = await use(tmp_path, "compare", path_a="a.png", path_b="a.png")
    assert text.startswith("The pictures are equal, to the last bit")
    gradient(10, 10).save(tmp_path / "c.png")
    with pytest.raises(m3.ToolError, match=r"'a.png' is 200 x 100, 'c.png' is 10 x 10"):
        await use(tmp_path, "compare", path_a="a.png", path_b="c.png")


@given(arrays.arrays(np.bool_, st.tuples(st.integers(1, 300), st.integers(1, 20))))
@settings(max_examples=50)
def test_every_differing_pixel_is_in_exactly_one_region(differs: np.ndarray) -> None:
    found = regions(differs)
    assert sum(region.pixels for region in found) == differs.sum()
    covered = np.zeros_like(differs)
    for region in found:
        part = np.s_[region.top : region.bottom, region.left : region.right]
        assert differs[part].any(axis=1)[[0, -1]].all()  # no box is larger than it has to be
        assert differs[part].any(axis=0)[[0, -1]].all()
        covered[part] = True
    assert not (differs & ~covered).any()


def test_the_share_of_differing_pixels() -> None:
    black, other = np.zeros((10, 10, 3), np.uint8), np.zeros((10, 10, 3), np.uint8)
    other[0, :5, 1] = 17
    assert difference(black, other, 16).share == 0.05
    assert difference(black, other, 17).share == 0
    assert difference(black, other, 17).largest == 17


async def test_what_is_no_picture_is_named(tmp_path: Path) -> None:
    Path(tmp_path, "page.png").write_text("<!doctype html><p>404</p>")
    Path(tmp_path, "half.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 20)
    Path(tmp_path, "film").write_bytes(y4m([1, 2], 32, 16, "2:1"))
    Path(tmp_path, "folder").mkdir()
    gradient(4, 4).save(tmp_path / "still.png")
    for name, path, reason in [
        ("look", "page.png", r"'page.png': not a picture \(html.*this is a web page"),
        ("look", "half.png", r"'half.png': png data that cannot be decoded"),
        ("look", "film", r"'film' is a film. Use sample_video."),
        ("look", "folder", r"'folder' is a directory. Give the path"),
        ("look", "missing.png", r"'missing.png': no such file"),
        ("sample_video", "page.png", r"'page.png': not a film \(html"),
        ("sample_video", "folder", "'folder' is a directory"),
    ]:
        with pytest.raises(m3.ToolError, match=reason):
            await use(tmp_path, name, path=path)
    head, *shown = await use(tmp_path, "sample_video", path="still.png")  # a film of one frame
    assert "1 frames" in head
    assert len(shown) == 2


async def test_nothing_outside_the_folder_is_shown(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    gradient(4, 4).save(tmp_path / "secret.png")
    gradient(4, 4).save(inside / "real.png")
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "good.png").symlink_to("real.png")
    for path in ["link.png", "../secret.png", str(tmp_path / "secret.png")]:
        for name, arguments in [
            ("look", {"path": path}),
            ("crop", {"path": path, "box": [0, 0, 1, 1]}),
            ("sample_video", {"path": path}),
            ("compare", {"path_a": "real.png", "path_b": path}),
        ]:
            with pytest.raises(m3.ToolError, match="leads outside the workspace"):
                await use(inside, name, **arguments)
    text, _ = await use(inside, "look", path="good.png")
    assert "4 x 4" in text
