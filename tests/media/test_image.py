"""Image: sources, damaged data, limits, animations, equality, saved form."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pil

from m3agent.errors import ImageError
from m3agent.media import Image, sniff
from tests.media.makers import encode, encode_film, film

PHOTO = Pil.fromarray(film(1, 64, 48)[0])
KINDS = ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM"]


@pytest.mark.parametrize("kind", KINDS)
def test_formats_are_told_by_content(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "picture.txt"
    path.write_bytes(encode(PHOTO, kind))
    image = Image(path)
    assert sniff(path.read_bytes()) == image.format == kind.lower()
    assert (image.width, image.height, image.frames) == (64, 48, 1)
    assert image.rgb.dtype == np.uint8
    assert image.rgb.shape == (48, 64, 3)
    if kind not in ("JPEG", "GIF", "WEBP", "AVIF"):
        assert np.array_equal(image.rgb, np.asarray(PHOTO))


def test_wrong_extension_alone_is_fine(tmp_path: Path) -> None:
    path = tmp_path / "really_a_png.jpg"
    path.write_bytes(encode(PHOTO, "PNG"))
    assert np.array_equal(Image(str(path)).rgb, np.asarray(PHOTO))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF", "PPM"])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.9])
def test_a_picture_cut_short_is_an_error(kind: str, share: float, tmp_path: Path) -> None:
    whole = encode(PHOTO, kind)
    path = tmp_path / "half.img"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ImageError) as caught:
        Image(path).load()
    message = str(caught.value)
    assert str(path) in message
    assert kind.lower() in message
    assert str(path.stat().st_size) in message


@given(st.sampled_from(KINDS), st.data())
def test_damaged_pictures_raise_nothing_else(kind: str, data: st.DataObject) -> None:
    encoded = bytearray(encode(PHOTO.resize((12, 8)), kind))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ImageError):
        image = Image(bytes(encoded)).load()
        assert image.rgb.shape == (image.height, image.width, 3)


@given(st.binary(max_size=300))
def test_sniffing_and_loading_any_bytes(data: bytes) -> None:
    assert sniff(data).isidentifier()
    with contextlib.suppress(ImageError):
        Image(data).load()


def test_progressive_jpeg_cut_short_is_an_error() -> None:
    whole = encode(PHOTO, "JPEG", progressive=True)
    with pytest.raises(ImageError, match="jpeg data that cannot be decoded"):
        Image(whole[: len(whole) // 2]).load()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html><body>404</body></html>", "web page"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
        (b"%PDF-1.7\n", "PDF"),
        (b"hello there", "text"),
        (b"\0\1\2\3", "unknown"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "Video"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "HEIF"),
        (b"\x89PNG\r\n\x1a\n", "png data that cannot be decoded"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n", "not a picture"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.png"
    path.write_bytes(data)
    with pytest.raises(ImageError, match=words) as caught:
        Image(path).load()
    assert "saved.png" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=r"missing\.png: cannot be read: No such file"):
        Image(tmp_path / "missing.png").load()
    with pytest.raises(ImageError, match="cannot be read"):
        Image(tmp_path).load()
    with pytest.raises(ImageError, match="not a regular file"):
        Image("/dev/zero").load()
    with pytest.raises(ImageError, match="download it first"):
        Image("https://example.org/cat.png").load()
    with pytest.raises(ImageError, match="cannot be read"):
        Image("nul\0byte.png").load()
    with pytest.raises(ImageError, match="the path of the picture is empty"):
        Image("")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="named pipes are Unix's")
@pytest.mark.timeout(20)
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(ImageError, match="not a regular file"):
        Image(tmp_path / "pipe.png").load()


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds nothing like it."""
    whole = bytearray(encode(Pil.new("L", (1, 1)), "PNG"))
    whole[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    whole[29:33] = zlib.crc32(bytes(whole[12:29])).to_bytes(4, "big")
    return bytes(whole)


@pytest.mark.parametrize("size", [(8001, 8000), (10_000, 9_500), (60_000, 60_000)])
def test_huge_pictures_are_refused_before_decoding(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError) as caught:
        Image(png_header(*size)).load()
    assert f"{size[0]}x{size[1]}" in str(caught.value)
    assert "limit of 64000000" in str(caught.value)


def test_the_limit_counts_for_pixels_too_and_can_be_moved() -> None:
    for source in (PHOTO, np.asarray(PHOTO), encode(PHOTO, "PNG")):
        assert Image(source, max_pixels=64 * 48).load().width == 64
        with pytest.raises(ImageError, match="64x48 = 3072 pixels is over the limit of 3071"):
            Image(source, max_pixels=64 * 48 - 1).load()


def test_a_decode_bomb_inside_a_good_header_is_stopped() -> None:
    with pytest.raises(ImageError, match="png data that cannot be decoded"):
        Image(png_header(5000, 5000)).load()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (42, "not int"),
        (None, "not NoneType"),
        (np.zeros((2, 2, 5), np.uint8), r"\[2, 2, 5\]"),
        (np.zeros((0, 2), np.uint8), "no pixels"),
        (np.zeros(3, np.uint8), r"\[3\]"),
        (np.zeros((2, 2), np.int64), "int64"),
        (np.full((2, 2), 1.5), r"0\.\.1"),
        (np.full((2, 2), np.nan), r"0\.\.1"),
    ],
)
def test_sources_that_cannot_be_meant(source: object, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        Image(source)  # type: ignore[arg-type]


def test_background_must_be_opaque() -> None:
    for background in ("no such colour", "#ff000080", (1, 2), (1, 2, 300)):
        with pytest.raises(ImageError, match="background"):
            Image(b"", background=background)  # type: ignore[arg-type]


def moving(count: int = 3) -> list[Pil.Image]:
    """Frames that differ only in a small square."""
    frames = []
    for index in range(count):
        array = film(1, 40, 30)[0]
        array[10:15, 5 + 8 * index : 10 + 8 * index] = (255, 0, 0)
        frames.append(Pil.fromarray(array))
    return frames


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    options = {"GIF": {}, "AVIF": {"quality": 100}}.get(kind, {"lossless": True})
    image = Image(encode_film(moving(), kind, [100, 100, 100], **options))
    assert image.frames == 3
    assert "first of 3 frames" in repr(image.load())
    assert np.abs(image.rgb[12, 7].astype(int) - (255, 0, 0)).max() <= 5
    assert image.rgb[12, 15].tolist() != [255, 0, 0]


def test_first_gif_frame_smaller_than_its_screen_is_composed() -> None:
    whole = bytearray(encode(Pil.new("RGB", (10, 8), (255, 0, 0)), "GIF"))
    whole[6:10] = (20).to_bytes(2, "little") + (16).to_bytes(2, "little")  # the logical screen
    image = Image(bytes(whole))
    assert (image.width, image.height) == (20, 16)
    assert image.rgb[4, 4].tolist() == [255, 0, 0]


def test_pixels_are_copied_and_read_only() -> None:
    array = film(1, 8, 8)[0]
    picture = Pil.fromarray(array)
    images = Image(array), Image(picture)
    digests = [image.digest for image in images]
    array[:] = 0
    picture.putpixel((0, 0), (1, 2, 3))
    assert [image.digest for image in images] == digests == [Image(film(1, 8, 8)[0]).digest] * 2
    for image in images:
        with pytest.raises(ValueError, match="read-only"):
            image.rgb[0, 0] = 0


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "shot.png"
    path.write_bytes(encode(PHOTO, "PNG"))
    image = Image(path).load()
    path.unlink()
    assert image.rgb is image.rgb
    assert Image.from_json(image.to_json()) == image


def test_equality_is_by_pixels() -> None:
    same = Image(encode(PHOTO, "PNG")), Image(encode(PHOTO, "BMP")), Image(PHOTO), Image(np.asarray(PHOTO))
    assert len(set(same)) == 1
    assert same[0] != Image(np.zeros((48, 64, 3), np.uint8))
    assert same[0] != "something else"
    # the same bytes in another shape are another picture
    assert Image(np.zeros((2, 6, 3), np.uint8)).digest != Image(np.zeros((6, 2, 3), np.uint8)).digest


def test_to_png_is_lossless() -> None:
    opened = Pil.open(io.BytesIO(Image(PHOTO).to_png()))
    assert opened.mode == "RGB"
    assert np.array_equal(np.asarray(opened), np.asarray(PHOTO))


def test_repr_is_short_and_does_not_decode() -> None:
    assert repr(Image("nowhere.png")) == "Image('nowhere.png', not decoded yet)"
    image = Image(encode(PHOTO, "PNG")).load()
    assert repr(image) == f"Image(64x48, png, {image.digest[:4]}…)"


@pytest.mark.parametrize("source", [encode(PHOTO, "JPEG"), PHOTO, encode(Pil.new("RGBA", (4, 4)), "PNG")])
def test_json_round_trip(source: bytes | Pil.Image) -> None:
    image = Image(source, background="#204060")
    data = json.loads(json.dumps(image.to_json()))
    again = Image.from_json(data)
    assert again == image
    assert again.to_json() == data
    if isinstance(source, bytes):
        assert again.format == image.format


def test_a_field_of_a_pydantic_model() -> None:
    class Shot(pydantic.BaseModel):
        title: str
        image: Image

    shot = Shot(title="x", image=Image(PHOTO))
    assert shot.model_dump()["image"] is shot.image
    assert Shot.model_validate_json(shot.model_dump_json()) == shot
    assert Shot.model_validate(json.loads(shot.model_dump_json())) == shot
    assert Shot.model_json_schema()["properties"]["image"]["type"] == "object"
    broken = {"title": "x", "image": {"data": "AAAA"}}
    with pytest.raises(pydantic.ValidationError, match="not a picture"):
        Shot.model_validate(broken)
    with pytest.raises(pydantic.ValidationError):
        Shot.model_validate({"title": "x", "image": "photo.png"})


@pytest.mark.parametrize("data", [{}, {"data": 3}, {"data": "!"}, {"data": "", "max_pixels": "x"}])
def test_damaged_json(data: dict[str, object]) -> None:
    with pytest.raises(ImageError):
        Image.from_json(data)


def test_importing_pictures_does_not_import_torch_or_opencv() -> None:
    code = "import sys, m3agent.media; assert not {'torch', 'cv2'} & set(sys.modules); m3agent.media.PixelSpec()"
    source = str(Path(__file__).parents[2] / "src")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": source})
