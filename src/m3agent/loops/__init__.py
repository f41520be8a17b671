"""Loops around a session: write code, render it, look at the picture, go on, until checks or a budget say stop.

`refine` runs the loop; `SvgRenderer`, `HtmlRenderer` or any function from code to picture draws, `PixelMatch` and rules
judge, `Stop` ends it, and `film_strip` turns the record of every step into a page to look at.
"""

from m3agent.loops.checks import Check, PixelMatch
from m3agent.loops.record import Refinement, Step, Verdict, best_of
from m3agent.loops.refinement import refine
from m3agent.loops.report import film_strip
from m3agent.loops.stop import Stop, StopRule
from m3agent.loops.tool import render_tool
from m3agent.render import FunctionRenderer, HtmlRenderer, Renderer, Rendering, SvgRenderer

__all__ = [
    "Check",
    "FunctionRenderer",
    "HtmlRenderer",
    "PixelMatch",
    "Refinement",
    "Renderer",
    "Rendering",
    "Step",
    "Stop",
    "StopRule",
    "SvgRenderer",
    "Verdict",
    "best_of",
    "film_strip",
    "refine",
    "render_tool",
]
