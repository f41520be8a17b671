"""The library's own cost, without a model: `python -m benchmarks.overhead`.

The scripted model of `m3agent.testing` costs next to nothing, and what it costs is measured alone (its tokens pulled
with no session around) and taken off. Then: a turn, a streamed token, a call of a tool (each the slope over two sizes,
so that what runs once does not count), turn 1 and turn 200 of one session, and 1,000 sessions at once on one event
loop. Medians. Prints a table and writes benchmarks/results/overhead.json.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

import anyio

import m3agent as m3
from m3agent.runtime import Sampling
from m3agent.testing import ScriptedRuntime, Turn, call, scripted
from m3agent.testing.turns import Shown

RESULTS = Path(__file__).parent / "results" / "overhead.json"
REPEATS = 15
BARS = {"a turn": 1000.0, "a streamed token": 20.0}  # microseconds
WORD = "word "  # some tokens of any tokenizer


@m3.tool
async def look(where: str) -> str:
    """Look somewhere."""
    return where


async def seconds(run: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await run()
    return time.perf_counter() - began


def agent(runtime: ScriptedRuntime, **options: Any) -> m3.Agent:
    return m3.Agent(runtime, **options)  # pyright: ignore[reportArgumentType]


async def stream(runtime: ScriptedRuntime, **options: Any) -> int:
    """One run in a session of its own; returns how many tokens were streamed."""
    async with agent(runtime, **options).session() as session, session.stream("Go.") as events:
        async for _ in events:
            pass
        return events.reply.usage.output_tokens


async def alone(runtime: ScriptedRuntime) -> int:
    """The double's own cost: its tokens, with nothing around."""
    sequence = runtime.sequence()
    sequence.append([1])
    async with sequence.generate(Sampling()) as tokens:
        return len([token async for token in tokens])


async def per_token() -> tuple[float, float]:
    """Microseconds of the library and of the double."""
    ours, doubles = [], []
    for _ in range(REPEATS):
        times: list[tuple[int, float, float]] = []
        for words in (100, 2100):
            runtime = scripted(lambda _, words=words: WORD * words)
            tokens = await alone(runtime)
            whole = await seconds(lambda runtime=runtime: stream(runtime))
            times.append((tokens, whole, await seconds(lambda runtime=runtime: alone(runtime))))
        count = times[1][0] - times[0][0]
        double = (times[1][2] - times[0][2]) / count
        ours.append((times[1][1] - times[0][1]) / count - double)
        doubles.append(double)
    return median(ours) * 1e6, median(doubles) * 1e6


async def per_turn(token: float, **options: Any) -> float:
    """Microseconds of a turn and the call after it: 20 turns less 1, over 19, less `token` for each of its tokens."""
    found = []
    for _ in range(REPEATS):

        def script(turns: int) -> list[Any]:
            return [*[call("look", where="here")] * (turns - 1), "Done."]

        short, long = scripted(script(1)), scripted(script(20))
        times: list[float] = []
        tokens: list[int] = []
        for runtime in (short, long):
            began = time.perf_counter()
            tokens.append(await stream(runtime, tools=[look], **options))
            times.append(time.perf_counter() - began)
        found.append((times[1] - times[0] - (tokens[1] - tokens[0]) * token / 1e6) / 19)
    return median(found) * 1e6


async def slope() -> tuple[float, float]:
    """Microseconds of the first turns and of the last of 200, in one session."""
    runtime = scripted(["Yes."] * 200)
    async with agent(runtime).session() as session:
        times = [await seconds(lambda: session.run("And now?")) for _ in range(200)]
    return median(times[5:25]) * 1e6, median(times[-20:]) * 1e6


async def crowd(sessions: int = 1000, turns: int = 3) -> dict[str, float]:
    """All at once: the time of all, of the slowest over the fastest, and memory, in KiB a session."""

    def reply(conversation: list[Shown]) -> Turn:
        told = conversation[-1].role == "tool"
        return Turn(WORD * 20) if told else Turn("Let me see.", calls=(call("look", where="here"),))

    runtime, done = scripted(reply), list[float]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.perf_counter()
    open_sessions = [agent(runtime, tools=[look]).session() for _ in range(sessions)]

    async def use(session: m3.Session) -> None:
        for _ in range(turns):
            await session.run("Go.")
        done.append(time.perf_counter() - began)

    async with anyio.create_task_group() as group:
        for session in open_sessions:
            group.start_soon(use, session)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    seconds_of_all = time.perf_counter() - began
    return {
        "seconds": seconds_of_all,
        "microseconds a model turn": seconds_of_all / (sessions * turns * 2) * 1e6,
        "slowest over median": max(done) / median(done),
        "KiB a session": memory / sessions,
    }


async def measure() -> dict[str, Any]:
    await stream(scripted(["warm up"]))
    token, double = await per_token()
    first, last = await slope()
    return {
        "a streamed token": token,
        "a token of the scripted model alone": double,
        "a turn": await per_turn(token + double),
        "a turn, not guided": await per_turn(token + double, guided=False),
        "a run of one turn, at the beginning": first,
        "a run of one turn, after 200": last,
        "1,000 sessions": await crowd(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    found = anyio.run(measure)
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{figure:.3g} {unit}" for unit, figure in value.items()))
        else:
            bar = f" (≤ {BARS[name]:.0f})" if name in BARS else ""
            print(f"{name:38} {value:8.1f} µs{bar}")
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
