"""Draw a picture as SVG, look at the result, mend it, and keep a film strip of how it came about.

python examples/look_and_fix.py [PICTURE]
"""

import sys
from pathlib import Path

import anyio

import m3agent as m3
from m3agent.loops import PixelMatch, Step, Stop, SvgRenderer, film_strip, refine
from m3agent.render.renderer import on_canvas

SCENE = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 224 224">
<rect width="224" height="224" fill="skyblue"/>
<rect x="48" y="104" width="96" height="80" fill="brown"/>
<polygon points="96,48 156,104 36,104" fill="maroon"/>
<circle cx="184" cy="48" r="24" fill="gold"/>
</svg>"""


def told(event: m3.Event | Step) -> None:
    if isinstance(event, Step):
        print(f"draft {event.index + 1}: {event.score:.1%} as the picture", event.error or "")


async def main(picture: str | None) -> None:
    renderer = SvgRenderer((224, 224))
    target = on_canvas(m3.Image(picture), (224, 224)) if picture else renderer.render(SCENE)
    async with m3.Runtime.open() as runtime, m3.Agent(runtime).session() as session:
        result = await refine(
            session,
            ["Draw this picture.", target],
            render=renderer,
            checks=[PixelMatch(target, within=0.01)],
            stop=Stop(seconds=120),
            attempts=4,
            on_event=told,
        )
    page = Path("film_strip.html")
    page.write_text(film_strip(result, goal="Draw this picture.", target=target), encoding="utf-8")
    print(f"ended: {result.stopped}; {result.usage}; see {page}")
    if result.best is not None:
        print(result.best.code)


if __name__ == "__main__":
    anyio.run(main, sys.argv[1] if len(sys.argv) > 1 else None)
