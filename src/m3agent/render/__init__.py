"""Code to pictures. `renderer` is the protocol, `svg` draws with resvg, `html` with Chromium.

Below `html`: `chromium` is the browser in its thread, `page` watches a page and shoots it, `network` is the allow-list.
"""

from m3agent.render.html import HtmlRenderer
from m3agent.render.renderer import FunctionRenderer, Renderer, Rendering
from m3agent.render.svg import SvgRenderer

__all__ = ["FunctionRenderer", "HtmlRenderer", "Renderer", "Rendering", "SvgRenderer"]
