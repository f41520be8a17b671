"""The model writes a page, sees it at the sizes of a phone and a desk, and mends what it sees.

    python examples/refine_page.py     # the embedded m3-nano knows SVG alone: it runs, and that is all
    python examples/refine_page.py --model FOLDER "A page with a price table of three plans."

Needs Chromium and `pip install 'm3agent[browser]'`. Writes refine_page.html: every draft with its pictures and notes.
"""

import argparse
from pathlib import Path

import anyio

import m3agent as m3

GOAL = "Write a page with a header, three cards that stand below each other on a phone, and a footer."


async def work(runtime: m3.Runtime, goal: str, rounds: int) -> m3.loops.Refinement:
    with m3.loops.HtmlRenderer() as renderer:
        async with m3.Agent(runtime).session() as session:
            result = await m3.loops.refine(session, goal, render=renderer, max_rounds=rounds)
    for step in result.steps:
        print(f"draft {step.index + 1}: {step.error or ', '.join(label for label, _ in step.pictures)}")
        for note in step.notes:
            print(f"  {note}")
    page = Path("refine_page.html")
    page.write_text(m3.loops.film_strip(result, goal=goal), encoding="utf-8")
    print(f"ended: {result.stopped}; {result.usage}; see {page}")
    return result


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("goal", nargs="?", default=GOAL)
    parser.add_argument("--model", help="a checkpoint's folder; the embedded model if left out")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    async with m3.Runtime.open(options.model) as runtime:
        await work(runtime, options.goal, options.rounds)


if __name__ == "__main__":
    anyio.run(main)
