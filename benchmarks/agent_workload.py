"""The shape of an agent's work on the KV cache: `python -m benchmarks.agent_workload`.

Sessions of the embedded m3-nano on the CPU as agents run them: a system prompt that all share, then up to 43 turns in
which a tool's result comes (some dozens to hundreds of tokens) and the model writes a little; now and then a sub-agent
goes to work on a fork. Several sessions run side by side. Measured are which share of the tokens that had been computed
before was not computed again, what a turn takes to its first token, what the same prompt takes without a cache, what a
session takes that comes from the disk into a new runtime, and how many sessions a gigabyte holds. Prints tables and
writes benchmarks/results/agent_workload.json and agent_workload.png.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import anyio

from m3agent.model import KVPages
from m3agent.runtime import Runtime, Sampling, Sequence, Usage

RESULTS = Path(__file__).parent / "results" / "agent_workload.json"
SESSIONS, TURNS, SYSTEM = 6, 43, 600
Row = dict[str, Any]


async def generated(sequence: Sequence, tokens: list[int], count: int) -> Usage:
    sequence.append(tokens)
    async with sequence.generate(Sampling(1.0, max_tokens=count, stop=frozenset())) as stream:
        async for _ in stream:
            pass
    return stream.usage


async def session(runtime: Runtime, number: int, rows: list[Row], turns: int) -> Sequence:
    """One agent's work, row by row; returns its sequence, still open."""
    luck = random.Random(number)
    shared = random.Random(-1).choices(range(256), k=SYSTEM)
    sequence = runtime.sequence()
    for turn in range(turns):
        new = luck.choices(range(256), k=min(int(luck.lognormvariate(4.3, 0.7)) + 8, 400))
        said = 8 + luck.randrange(40)
        before = len(sequence)
        if before + len(new) + said > 8000:
            break
        usage = await generated(sequence, [*(shared if not turn else []), *new], said)
        rows.append(row(number, turn, "turn", usage, before + (SYSTEM if number and not turn else 0)))
        if turn % 10 == 9:
            fork = sequence.fork()
            usage = await generated(fork, luck.choices(range(256), k=60), 20)
            rows.append(row(number, turn, "fork", usage, len(sequence)))
            fork.close()
    return sequence


def row(session: int, turn: int, kind: str, usage: Usage, known: int) -> Row:
    return {
        "session": session,
        "turn": turn,
        "kind": kind,
        "prompt": usage.prompt_tokens,
        "known": min(known, usage.prompt_tokens),  # tokens that some call had computed, or generated, before
        "reused": usage.reused_tokens,
        "first token": usage.prefill_seconds,
    }


async def main(turns: int) -> None:
    rows: list[Row] = []
    result: dict[str, Any] = {"machine": platform.processor() or platform.machine()}
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime.open(device="cpu", disk_cache=folder, disk_limit=None) as runtime:
            sequences: list[Sequence] = []

            async def run(number: int) -> None:
                sequences.append(await session(runtime, number, rows, turns))

            await run(0)
            lone = list(rows)
            async with anyio.create_task_group() as group:
                for number in range(1, SESSIONS):
                    group.start_soon(run, number)
            longest = max(sequences, key=len)
            tokens = longest.tokens
            bytes_per_page = KVPages.bytes_per_page(runtime.config, runtime.engine.cache.pages.k[0].dtype)
            result["bytes per token"] = bytes_per_page / runtime.engine.cache.page_tokens
        result["sessions per GB"] = {
            str(size): int(1e9 / (result["bytes per token"] * size)) for size in (1000, 8000, 140_000)
        }
        times: dict[str, float] = {}
        for name, disk in (("disk", folder), ("prefill", False)):
            async with Runtime.open(device="cpu", disk_cache=disk, disk_limit=None) as runtime:
                warm = runtime.sequence()
                await generated(warm, [1] * 300, 2)
                sequence = runtime.sequence()
                began = time.perf_counter()
                usage = await generated(sequence, tokens, 1)
                times[name] = time.perf_counter() - began
                result[f"restored, {name}"] = usage.reused_tokens
        result["restore"] = {"tokens": len(tokens), "from disk": times["disk"], "prefill": times["prefill"]}
    known, reused = sum(each["known"] for each in rows), sum(min(each["reused"], each["known"]) for each in rows)
    result["reuse"] = reused / known
    result["reuse of all prompt tokens"] = sum(each["reused"] for each in rows) / sum(each["prompt"] for each in rows)
    for name, some in (("alone", lone), ("side by side", [each for each in rows if each["session"]])):
        first = [each["first token"] for each in some if each["kind"] == "turn"]
        result[f"first token, {name}"] = {"median": median(first), "95th": quantiles(first, n=20)[-1]}
    result["rows"] = rows
    RESULTS.write_text(json.dumps(result) + "\n")
    for key, value in result.items():
        if key != "rows":
            print(f"{key:28} {value}")
    plot(rows, times["prefill"] / len(tokens))


def plot(rows: list[Row], prefill: float) -> None:
    """Seconds to the first token by the length of the prompt; prefill: seconds a token, without a cache."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, some in (("alone", lambda r: not r["session"]), ("side by side", lambda r: r["session"])):
        found = [each for each in rows if some(each)]
        axes.plot([r["prompt"] for r in found], [1000 * r["first token"] for r in found], ".", label=name)
    ends = [0, max(each["prompt"] for each in rows)]
    axes.plot(ends, [1000 * prefill * end for end in ends], "--", label="without a cache")
    axes.set(
        xlabel="tokens of the prompt", ylabel="ms to the first token", yscale="log", title="m3-nano, two CPU cores"
    )
    axes.legend()
    figure.savefig(RESULTS.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    anyio.run(main, parser.parse_args().turns)
