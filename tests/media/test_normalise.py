"""What the user holds is what the model sees: orientation, transparency, depth, colour modes."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image as Pil

from m3agent.media import Image
from tests.media.makers import encode, film

RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)


def corners() -> Pil.Image:
    """40x20: red, green above, blue, white below: no two orientations look the same."""
    array = np.zeros((20, 40, 3), np.uint8)
    array[:10, :20], array[:10, 20:], array[10:, :20], array[10:, 20:] = RED, GREEN, BLUE, WHITE
    return Pil.fromarray(array)


# how an upright picture has to be stored for each orientation: the inverse of what a viewer does
STORED = {
    1: None,
    2: Pil.Transpose.FLIP_LEFT_RIGHT,
    3: Pil.Transpose.ROTATE_180,
    4: Pil.Transpose.FLIP_TOP_BOTTOM,
    5: Pil.Transpose.TRANSPOSE,
    6: Pil.Transpose.ROTATE_90,
    7: Pil.Transpose.TRANSVERSE,
    8: Pil.Transpose.ROTATE_270,
}


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize("orientation", STORED)
def test_exif_orientation(kind: str, orientation: int) -> None:
    turn = STORED[orientation]
    stored = corners() if turn is None else corners().transpose(turn)
    exif = Pil.Exif()
    exif[0x0112] = orientation
    options = {"WEBP": {"lossless": True}, "JPEG": {"quality": 100, "subsampling": 0}, "AVIF": {"quality": 100}}
    image = Image(encode(stored, kind, exif=exif, **options.get(kind, {})))
    assert (image.width, image.height) == (40, 20)
    for (y, x), colour in {(4, 4): RED, (4, 35): GREEN, (15, 4): BLUE, (15, 35): WHITE}.items():
        assert np.abs(image.rgb[y, x].astype(int) - colour).max() <= 3


def test_a_pillow_picture_is_turned_too() -> None:
    exif = Pil.Exif()
    exif[0x0112] = 6
    opened = Pil.open(io.BytesIO(encode(corners().transpose(Pil.Transpose.ROTATE_90), "PNG", exif=exif)))
    assert np.array_equal(Image(opened).rgb, np.asarray(corners()))


@pytest.mark.parametrize("orientation", [0, 9, 65_535])
def test_an_orientation_that_does_not_exist_is_none(orientation: int) -> None:
    exif = Pil.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(Image(encode(corners(), "PNG", exif=exif)).rgb, np.asarray(corners()))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")  # Pillow's own remark
def test_damaged_exif_does_not_lose_the_picture() -> None:
    data = encode(corners(), "JPEG", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 40)
    assert (Image(data).width, Image(data).height) == (40, 20)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_the_colour_under_transparent_pixels_never_shows(kind: str) -> None:
    hidden = Pil.new("RGBA", (8, 6), (*RED, 0))
    assert (Image(encode(hidden, kind)).rgb == 255).all()
    assert (Image(encode(hidden, kind), background="black").rgb == 0).all()
    assert (Image(encode(hidden, kind), background=(1, 2, 3)).rgb == (1, 2, 3)).all()
    assert (Image(hidden, background="#010203").rgb == (1, 2, 3)).all()


def test_half_transparent_is_mixed() -> None:
    assert np.abs(Image(Pil.new("RGBA", (2, 2), (*RED, 128))).rgb[0, 0].astype(int) - (255, 127, 127)).max() <= 1
    assert np.abs(Image(Pil.new("LA", (2, 2), (0, 51)), background="#c8c8c8").rgb[0, 0].astype(int) - 160).max() <= 1


def test_palette_with_transparent_entry() -> None:
    picture = Pil.new("P", (4, 1))
    picture.putpalette([*GREEN, *RED, *BLUE])
    picture.putdata([0, 1, 2, 1])
    expected = [WHITE, RED, BLUE, RED]
    assert Image(encode(picture, "PNG", transparency=0)).rgb[0].tolist() == [list(colour) for colour in expected]
    # tRNS as a table: one alpha per palette entry
    mixed = Image(encode(picture, "PNG", transparency=bytes([255, 0, 128])), background="black").rgb[0].tolist()
    assert mixed[:2] == [list(GREEN), list(BLACK)]
    assert mixed[2] == pytest.approx([0, 0, 128], abs=1)
    # without tRNS nothing is transparent
    assert Image(encode(picture, "PNG")).rgb[0, 0].tolist() == list(GREEN)


def test_transparent_colour_of_pictures_without_alpha() -> None:
    rgb = Pil.new("RGB", (2, 1), RED)
    rgb.putpixel((1, 0), BLUE)
    assert Image(encode(rgb, "PNG", transparency=RED)).rgb[0].tolist() == [list(WHITE), list(BLUE)]
    grey = Pil.new("L", (2, 1), 7)
    grey.putpixel((1, 0), 9)
    assert Image(encode(grey, "PNG", transparency=7)).rgb[0].tolist() == [list(WHITE), [9, 9, 9]]


def test_16_bit_grey_is_scaled_not_clipped() -> None:
    ramp = np.array([[0, 256, 257, 32_768, 65_535]], np.uint16)
    expected = [0, 1, 1, 128, 255]  # value / 257, rounded
    for image in (Image(encode(Pil.fromarray(ramp), "PNG")), Image(encode(Pil.fromarray(ramp), "TIFF")), Image(ramp)):
        assert image.rgb[0, :, 0].tolist() == expected
        assert (image.rgb[..., 0] == image.rgb[..., 2]).all()
    keyed = encode(Pil.fromarray(ramp), "PNG", transparency=32_768)
    assert Image(keyed, background="blue").rgb[0].tolist()[3] == list(BLUE)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 100, 255], [0, 100, 255]),
        ([0, 257, 65_535], [0, 1, 255]),
        ([0, 500_000, 1_000_000], [0, 128, 255]),
        ([-100, 0, 100], [0, 128, 255]),
        ([300_000, 300_000, 300_000], [0, 0, 0]),
    ],
)
def test_32_bit_integers(values: list[int], expected: list[int]) -> None:
    picture = Pil.fromarray(np.array([values], np.int32))
    assert picture.mode == "I"
    assert Image(picture).rgb[0, :, 0].tolist() == expected
    assert Image(encode(picture, "TIFF")).rgb[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0, 0.5, 1.0], [0, 128, 255]),
        ([0.0, 100.0, 200.0], [0, 100, 200]),
        ([-1.0, 0.0, 1.0], [0, 128, 255]),
        ([0.0, 500.0, 1000.0], [0, 128, 255]),
        ([float("nan"), float("inf"), 1.0], [0, 0, 255]),
        ([float("nan"), float("nan"), float("nan")], [0, 0, 0]),
    ],
)
def test_floats(values: list[float], expected: list[int]) -> None:
    picture = Pil.fromarray(np.array([values], np.float32))
    assert picture.mode == "F"
    assert Image(picture).rgb[0, :, 0].tolist() == expected


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "HSV"]
)
def test_every_mode_keeps_black_and_white(mode: str) -> None:
    picture = Pil.new("RGB", (2, 1), WHITE)
    picture.putpixel((0, 0), BLACK)
    route = {"La": "LA", "RGBa": "RGBA", "PA": "P"}.get(mode, mode)
    picture = picture.convert(route)
    if mode != route:
        picture = picture.convert(mode)
    assert np.abs(Image(picture).rgb[0].astype(int) - [BLACK, WHITE]).max() <= 1


def test_cmyk_jpeg() -> None:
    data = encode(corners().convert("CMYK"), "JPEG", quality=100)
    assert np.abs(Image(data).rgb[4, 4].astype(int) - RED).max() <= 3
    assert np.abs(Image(data).rgb[15, 35].astype(int) - WHITE).max() <= 3


@given(hnp.arrays(np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4))))
def test_arrays_agree_with_pillow(array: np.ndarray) -> None:
    mode = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}[array.shape[2]]
    picture = Pil.frombytes(mode, array.shape[1::-1], array.tobytes())
    assert np.abs(Image(array).rgb.astype(int) - Image(picture).rgb.astype(int)).max() <= 1


def test_arrays_of_other_kinds() -> None:
    assert Image(np.array([[True, False]])).rgb[0].tolist() == [list(WHITE), list(BLACK)]
    assert Image(np.array([[0.0, 0.5, 1.0]])).rgb[0, :, 0].tolist() == [0, 128, 255]
    assert Image(film(1, 5, 4)[0]).rgb.tolist() == film(1, 5, 4)[0].tolist()
