"""Dangerous calls wait for a person: the run pauses, its messages are kept in a file, and go on when you have decided.

python examples/approvals.py FOLDER "Remove the old logs." --model FOLDER_OR_HUB_ID
python examples/approvals.py FOLDER --allow call_1 --refuse call_2 --model FOLDER_OR_HUB_ID

The second command may come days later: nothing but conversation.json is needed. The embedded m3-nano was trained to
draw: name a larger checkpoint.
"""

import argparse
from pathlib import Path

import anyio

import m3agent as m3

KEPT = "conversation.json"


def tools(folder: Path) -> list[m3.Tool[..., object]]:
    def precious(name: str) -> bool:
        """Which calls need a decision: those that would take something away."""
        file = folder / name
        return file.is_file() and file.stat().st_size > 0

    @m3.tool(needs_approval=precious)
    def remove(name: str) -> str:
        """Remove a file of the folder."""
        file = folder / Path(name).name
        if not file.is_file():
            raise m3.ToolError(f"there is no file {name!r}")
        file.unlink()
        return f"removed {file.name}"

    files = [tool for tool in m3.tools.workspace(folder, write=False) if tool.name in ("list", "read")]
    return [*files, remove]


async def go_on(runtime: m3.Runtime, folder: Path, task: str | None, decisions: dict[str, bool]) -> m3.Reply:
    """One run, from the beginning or from where it paused; keeps the conversation when calls wait."""
    kept = folder / KEPT
    messages = m3.load_messages(kept.read_text(encoding="utf-8")) if task is None else []
    agent = m3.Agent(runtime, instructions="You tidy up a folder.", tools=tools(folder))
    async with agent.session(messages) as session:
        reply = await session.run(*([task] if task else []), approve=decisions or None, max_tokens=2000)
        for call in session.pending:
            print(f"{call.id} waits: {call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})")
        if session.pending:
            kept.write_text(m3.dump_messages(session.messages), encoding="utf-8")
        else:
            kept.unlink(missing_ok=True)
            print(reply.text)
        return reply


async def main(folder: Path, task: str | None, model: str | None, decisions: dict[str, bool]) -> None:
    async with m3.Runtime.open(model) as runtime:
        await go_on(runtime, folder, task, decisions)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("task", nargs="?")
    parser.add_argument("--model")
    parser.add_argument("--allow", nargs="*", default=[])
    parser.add_argument("--refuse", nargs="*", default=[])
    options = parser.parse_args()
    decided: dict[str, bool] = dict.fromkeys(options.allow, True) | dict.fromkeys(options.refuse, False)
    if options.task is None and not decided:
        parser.error("say what to do, or decide about calls that wait: --allow call_1")
    anyio.run(main, options.folder, options.task, options.model, decided)
