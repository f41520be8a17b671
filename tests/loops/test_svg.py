"""SvgRenderer: what it draws, what it refuses, and that no code can reach a file, crash the program or hang it."""

import base64
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from m3agent.errors import RenderError
from m3agent.loops import SvgRenderer

SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 224 224">{}</svg>'
RED_SQUARE = SVG.format('<rect width="112" height="224" fill="red"/>')


def draw(body: str, **kwargs) -> np.ndarray:
    return SvgRenderer(**kwargs).render(SVG.format(body)).rgb


def test_draws_on_white_at_the_size_asked_for():
    rgb = SvgRenderer(size=(224, 224)).render(RED_SQUARE).rgb
    assert rgb.shape == (224, 224, 3)
    assert (rgb[:, :112] == (255, 0, 0)).all()
    assert (rgb[:, 112:] == (255, 255, 255)).all()


def test_another_aspect_is_fitted_into_the_middle():
    wide = RED_SQUARE.replace("0 0 224 224", "0 0 112 56")
    rgb = SvgRenderer(size=(100, 100)).render(wide).rgb
    assert (rgb[25:75] == (255, 0, 0)).all()
    assert (rgb[:25] == 255).all()
    assert (rgb[75:] == 255).all()


def test_half_transparent_paint_is_laid_on_white():
    rgb = draw('<rect width="224" height="224" fill="black" opacity="0.5"/>')
    assert abs(int(rgb[0, 0, 0]) - 127) <= 1


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("", "empty"),
        (" \n", "empty"),
        ("a red circle", "unknown token at 1:1"),
        ('<svg xmlns="http://www.w3.org/2000/svg"><rect>', "never closed"),
        (
            '<svg xmlns="http://www.w3.org/2000/svg"><rect width="1" height="1"/></g></svg>',
            "expected 'svg' tag, not 'g'",
        ),
        ("<html><body/></html>", "root element is <html>"),
        ('<svg xmlns="http://www.w3.org/2000/svg" width="0" height="0"/>', "invalid size"),
        (SVG.format("<!-- -->" + " " * 200_000), "at most 200000"),
        ("<svg>\ud800</svg>", "lone surrogates"),
        (SVG.format("\0"), "1:63"),
        ("<svg xmlns='http://www.w3.org/2000/svg'><x:g/></svg>", "unknown namespace prefix"),
        ("<svg><rect width='1' width='2'/></svg>", "'width'"),
    ],
)
def test_malformed_code_is_a_render_error_with_a_short_reason(code: str, reason: str):
    with pytest.raises(RenderError, match=reason) as caught:
        SvgRenderer().render(code)
    assert len(str(caught.value)) < 260
    assert "\n" not in str(caught.value)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret.png"
    PIL.Image.new("RGB", (8, 8), "red").save(path)
    return path


@pytest.mark.parametrize("spelling", ["{path}", "file://{path}", "secret.png", "http://localhost:1/x.png", " {path}"])
@pytest.mark.parametrize(
    "element",
    [
        '<image href="{}" width="224" height="224"/>',
        '<image xmlns:xlink="http://www.w3.org/1999/xlink" xlink:href="{}" width="224" height="224"/>',
        '<image xmlns:q="http://www.w3.org/1999/xlink" q:href="{}" width="224" height="224"/>',
        '<filter id="f"><feImage href="{}"/></filter><rect width="224" height="224" filter="url(#f)"/>',
        '<use href="{}#a"/>',
    ],
)
def test_nothing_outside_the_code_is_read(secret: Path, monkeypatch: pytest.MonkeyPatch, element: str, spelling: str):
    monkeypatch.chdir(secret.parent)
    with pytest.raises(RenderError, match="outside the SVG"):
        draw(element.format(spelling.format(path=secret)))


def test_the_child_itself_cannot_open_files(secret: Path, monkeypatch: pytest.MonkeyPatch):
    """The second wall: with the inspection taken away, resvg still sees no file."""
    monkeypatch.setattr("m3agent.render.svg._inspect", lambda code: False)
    rgb = draw(f'<image href="{secret}" width="224" height="224"/>')
    assert (rgb == 255).all()


def test_an_svg_inside_a_data_address_reads_nothing_either(secret: Path):
    inner = SVG.format(f'<image href="{secret}" width="224" height="224"/><text>fonts on</text>')
    address = "data:image/svg+xml;base64," + base64.b64encode(inner.encode()).decode()
    rgb = draw(f'<image href="{address}" width="224" height="224"/><text>fonts on</text>')
    assert not (rgb == (255, 0, 0)).all(axis=2).any()


def test_a_picture_in_the_code_is_drawn(secret: Path):
    address = "data:image/png;base64," + base64.b64encode(secret.read_bytes()).decode()
    rgb = draw(f'<image href="{address}" width="224" height="224"/>')
    assert tuple(rgb[100, 100]) == (255, 0, 0)


def test_references_within_the_code_and_links_are_fine():
    rgb = draw(
        '<a href="https://example.org/"><g id="half"><rect width="112" height="224"/></g></a>'
        '<use href="#half" x="112"/>'
    )
    assert (rgb == 0).all()


@pytest.mark.parametrize(
    "doctype",
    [
        '<!DOCTYPE svg [<!ENTITY p SYSTEM "file:///etc/hostname">]>',
        "<!DOCTYPE svg [<!ENTITY p \"&#60;image href='/etc/x.png'/&#62;\">]>",
    ],
)
def test_entities_are_refused(doctype: str):
    with pytest.raises(RenderError, match="DOCTYPE"):
        SvgRenderer().render(doctype + SVG.format("<text>&p;</text>"))


def test_a_plain_doctype_is_fine():
    public = '<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">'
    assert tuple(SvgRenderer().render(public + RED_SQUARE).rgb[0, 0]) == (255, 0, 0)


def test_deep_nesting_is_refused():
    with pytest.raises(RenderError, match="nests more than"):
        draw("<g>" * 5000 + "</g>" * 5000)


def test_a_crash_of_the_renderer_does_not_reach_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("m3agent.render.svg._inspect", lambda code: False)
    with pytest.raises(RenderError, match="too much memory or nesting"):
        draw("<g>" * 20000 + "</g>" * 20000)


def test_code_that_takes_forever_is_stopped():
    endless = (
        '<filter id="f"><feTurbulence baseFrequency="0.1" numOctaves="10000000"/></filter>'
        '<rect width="224" height="224" filter="url(#f)"/>'
    )
    with pytest.raises(RenderError, match=r"more than 0\.3 seconds"):
        draw(endless, seconds=0.3)


def test_use_bombs_end_in_an_error():
    layers = '<rect id="a0" width="5" height="5"/>'
    layers += "".join(f'<g id="a{n}">' + f'<use href="#a{n - 1}"/>' * 10 + "</g>" for n in range(1, 8))
    with pytest.raises(RenderError):
        draw(f'<defs>{layers}</defs><use href="#a7"/>')


@pytest.mark.parametrize("size", [(0, 10), (10, 5000)])
def test_sizes_have_limits(size: tuple[int, int]):
    with pytest.raises(ValueError, match="1 to 4096"):
        SvgRenderer(size=size)
