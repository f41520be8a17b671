"""Functions as renderers, and pictures fitted onto a canvas."""

import numpy as np
import PIL.Image
import pytest

from m3agent.errors import RenderError, ToolError
from m3agent.loops import FunctionRenderer, SvgRenderer
from m3agent.media.image import Image
from m3agent.render.renderer import as_renderer, on_canvas


def test_a_function_may_return_any_kind_of_picture():
    pixels = np.full((4, 6, 3), 7, np.uint8)
    for picture in (pixels, PIL.Image.fromarray(pixels), Image(pixels)):
        image = FunctionRenderer(lambda code, picture=picture: picture).render("x")
        assert (image.width, image.height) == (6, 4)
        assert (image.rgb == 7).all()


def test_what_a_function_raises_is_told_in_one_line():
    def broken(code: str) -> Image:
        raise KeyError("colour\nand a long story")

    with pytest.raises(RenderError, match="KeyError") as caught:
        FunctionRenderer(broken).render("x")
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ToolError)


def test_what_is_no_picture_is_a_render_error():
    with pytest.raises(RenderError):
        FunctionRenderer(lambda code: "not a picture"[:0]).render("x")  # type: ignore[arg-type]
    with pytest.raises(RenderError, match="5000x1"):
        FunctionRenderer(lambda code: np.zeros((1, 5000, 3), np.uint8)).render("x")


def test_a_render_error_keeps_its_words():
    def refuse(code: str) -> Image:
        raise RenderError("no such chart")

    with pytest.raises(RenderError, match=r"^no such chart$"):
        FunctionRenderer(refuse).render("x")


def test_as_renderer():
    svg = SvgRenderer()
    assert as_renderer(svg) is svg
    assert as_renderer(lambda code: np.zeros((1, 1, 3), np.uint8)).language == "Python"
    with pytest.raises(TypeError, match="Renderer or a function"):
        as_renderer("svg")  # type: ignore[arg-type]


def test_on_canvas_keeps_the_aspect_and_fills_with_white():
    black = Image(np.zeros((50, 100, 3), np.uint8))
    rgb = on_canvas(black, (224, 224)).rgb
    assert rgb.shape == (224, 224, 3)
    assert (rgb[56:168] == 0).all()
    assert (rgb[:56] == 255).all()
    assert (rgb[168:] == 255).all()


def test_on_canvas_leaves_a_fitting_picture_as_it_is():
    pixels = np.random.default_rng(0).integers(0, 255, (224, 224, 3), dtype=np.uint8)
    assert (on_canvas(Image(pixels), (224, 224)).rgb == pixels).all()


def test_on_canvas_of_a_sliver():
    assert on_canvas(Image(np.zeros((1, 3000, 3), np.uint8)), (224, 224)).rgb.shape == (224, 224, 3)
