"""SVG to picture with resvg, in a child process: code from a model can make a renderer recurse, grow or spin."""

from __future__ import annotations

import importlib.util
import io
import math
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from xml.parsers import expat

import PIL.Image

from m3agent.errors import MissingDependency, RenderError
from m3agent.media.image import Image
from m3agent.render.renderer import SIDE_LIMIT, check_code, on_canvas, short

DEPTH_LIMIT = 100  # nested elements; resvg recurses over them


@dataclass(frozen=True)
class SvgRenderer:
    """SVG in, picture of `size` (width, height) pixels on white out, the drawing's aspect kept.

    Confined: nothing outside the code is read. References to other files or addresses are refused by name, and
    the child process in which resvg works cannot open files, has 1 GiB of memory and `seconds` of time. Text is
    drawn with the system's fonts (code without text looks the same on every machine).

    Raises:
        ValueError: a size under 1 or over 4096 pixels a side.
        MissingDependency: resvg-py is not installed.
    """

    size: tuple[int, int] = (224, 224)
    seconds: float = 5.0
    language: str = "SVG"

    def __post_init__(self) -> None:
        if not all(1 <= side <= SIDE_LIMIT for side in self.size):
            raise ValueError(f"size is {self.size}; each side has to be 1 to {SIDE_LIMIT} pixels")
        if importlib.util.find_spec("resvg_py") is None:
            raise MissingDependency("resvg-py", "svg", "Rendering SVG")

    def render(self, code: str) -> Image:
        """The picture. Blocks for some 20 ms, at most `seconds`.

        Raises:
            RenderError: the SVG does not parse, refers to something outside, or takes too much to render.
        """
        check_code(code)
        try:
            has_text = _inspect(code)
        except expat.ExpatError as error:
            self._in_child(code, fonts=False)  # resvg's words, if it refuses too, name the fault and the place
            raise RenderError(short(f"not well-formed: {error}")) from None
        png = self._in_child(code, fonts=has_text)
        with PIL.Image.open(io.BytesIO(png)) as picture:
            return on_canvas(picture.convert("RGB"), self.size)

    def _in_child(self, code: str, *, fonts: bool) -> bytes:
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("svg_child.py")), _site_folder()]
        command += [str(self.size[0]), str(self.size[1]), str(math.ceil(self.seconds)), "yes" if fonts else "no"]
        try:
            done = subprocess.run(command, input=code.encode(), capture_output=True, timeout=self.seconds, check=False)
        except subprocess.TimeoutExpired:
            raise RenderError(f"the SVG takes more than {self.seconds:g} seconds to render") from None
        except UnicodeEncodeError:
            raise RenderError("the SVG has characters that are not text (lone surrogates)") from None
        if done.returncode == 3:
            raise RenderError(short(done.stderr.decode(errors="replace")))
        if done.returncode != 0 or not done.stdout:
            raise RenderError("the SVG takes too much memory or nesting to render")
        return done.stdout


def _site_folder() -> str:
    spec = importlib.util.find_spec("resvg_py")
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependency("resvg-py", "svg", "Rendering SVG")
    return str(Path(spec.submodule_search_locations[0]).parent)


def _inspect(code: str) -> bool:
    """Refuse what reaches outside; tell whether the SVG has text, and so needs fonts.

    Raises RenderError, and ExpatError for what is not well-formed.
    """
    depth = 0
    has_text = False

    def start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth, has_text
        depth += 1
        element = name.rpartition(":")[2]
        if depth == 1 and element != "svg":
            raise RenderError(f"the root element is <{short(name, 40)}>, not <svg>")
        if depth > DEPTH_LIMIT:
            raise RenderError(f"the SVG nests more than {DEPTH_LIMIT} elements")
        has_text = has_text or element == "text"
        for attribute, value in attributes.items():
            inside = value.strip().startswith(("#", "data:")) or not value.strip()
            if attribute.rpartition(":")[2] == "href" and element != "a" and not inside:
                raise RenderError(f"nothing outside the SVG is read: {attribute}={short(value, 60)!r} was refused")

    def end(_name: str) -> None:
        nonlocal depth
        depth -= 1

    def doctype(_name: str, _system: str | None, _public: str | None, has_internal_subset: bool) -> None:
        # Entities could spell what `start` looks for in ways that two parsers read differently.
        if has_internal_subset:
            raise RenderError("a DOCTYPE with declarations was refused; leave it out")

    parser = expat.ParserCreate()
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = doctype
    try:
        parser.Parse(code, True)
    except UnicodeEncodeError:
        raise RenderError("the SVG has characters that are not text (lone surrogates)") from None
    return has_text
