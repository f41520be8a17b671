"""An agent that works on a code base: it searches, reads, edits and runs commands, and you see what it changed.

python examples/coding_agent.py FOLDER "Rename parse to read_lines everywhere." --model FOLDER_OR_HUB_ID

Files are reached through the workspace alone, which nothing leaves; commands run in a sandbox where bubblewrap is there
(`--no-sandbox` runs them as they are). The embedded m3-nano was trained to draw: name a larger checkpoint.
"""

import argparse
import shutil
from pathlib import Path

import anyio

import m3agent as m3

INSTRUCTIONS = """You change the code base in the current folder as you are asked to.
Find the places with grep, read them before you edit, and change nothing else. Then run the project's tests, read what
they print, and go on until they pass. End with one sentence about what you changed."""


def tools(folder: Path, *, sandbox: bool) -> list[m3.Tool[..., object]]:
    confined = m3.tools.Sandbox() if sandbox else None
    return [*m3.tools.workspace(folder), *m3.tools.shell(folder, seconds=120, sandbox=confined)]


async def work(runtime: m3.Runtime, folder: Path, task: str, *, sandbox: bool) -> m3.Reply:
    """Work on one task, telling what happens; the reply's messages hold all of it."""
    agent = m3.Agent(runtime, instructions=INSTRUCTIONS, tools=tools(folder, sandbox=sandbox), max_turns=40)
    async with agent.session() as session, session.stream(task, max_tokens=20_000) as events:
        async for event in events:
            match event:
                case m3.TextDelta(text):
                    print(text, end="", flush=True)
                case m3.CallFinished(call):
                    print(f"\n→ {call.name} {_short(call.damaged or str(call.arguments))}")
                case m3.ToolResultEvent(result):
                    print(f"← {_short(result.text)}")
                case _:
                    pass
        return events.reply


def _short(text: str, limit: int = 160) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"


async def main(folder: Path, task: str, model: str | None, sandbox: bool) -> None:
    async with m3.Runtime.open(model) as runtime:
        reply = await work(runtime, folder, task, sandbox=sandbox)
    print(f"\n[{reply.stop}; {reply.usage}]")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("task")
    parser.add_argument("--model")
    parser.add_argument("--no-sandbox", action="store_true")
    options = parser.parse_args()
    confined = not options.no_sandbox and shutil.which("bwrap") is not None
    anyio.run(main, options.folder, options.task, options.model, confined)
