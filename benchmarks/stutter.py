"""Whether a long prompt makes other sessions stutter: `python -m benchmarks.stutter`.

The embedded m3-nano on the CPU. Some streams decode; then the prompt of another session is admitted. Measured are the
gaps between the tokens of a stream as its reader sees them, before and while that prompt is computed, and how long the
prompt takes, beside the same prompt alone. Prints a table and writes benchmarks/results/stutter.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import anyio

from m3agent.runtime import Runtime, Sampling

RESULTS = Path(__file__).parent / "results" / "stutter.json"
TOKENS = 2000  # of a decoding stream, at most


async def measure(streams: int, prompt: int) -> dict[str, Any]:
    luck = random.Random(1)
    async with Runtime.open(device="cpu") as runtime:
        times: list[list[float]] = [[] for _ in range(streams)]
        sampling = Sampling(temperature=1.0, max_tokens=TOKENS, stop=frozenset())

        async def alone() -> float:
            sequence = runtime.sequence()
            sequence.append(luck.choices(range(256), k=prompt))
            began = time.perf_counter()
            async with sequence.generate(Sampling(0.0, max_tokens=1, stop=frozenset())) as stream:
                await anext(stream)
            sequence.close()
            return time.perf_counter() - began

        async def decode(place: int) -> None:
            sequence = runtime.sequence()
            sequence.append(luck.choices(range(256), k=200))
            async with sequence.generate(sampling) as stream:
                async for _ in stream:
                    times[place].append(time.perf_counter())

        await alone()
        lone = await alone()
        async with anyio.create_task_group() as group:
            for place in range(streams):
                group.start_soon(decode, place)
            while min(map(len, times)) < 100:
                await anyio.sleep(0.01)
            began = time.perf_counter()
            beside = await alone()
            ended = time.perf_counter()
            group.cancel_scope.cancel()
        idle, busy = gaps(times, began - 0.3, began), gaps(times, began, ended)
        return {
            "streams": streams,
            "prompt": prompt,
            "idle gap": median(idle),
            "gap": median(busy),
            "ratio": median(busy) / median(idle),
            "95th": quantiles(busy, n=20)[-1] / median(idle),
            "prompt alone": lone,
            "prompt beside": beside,
        }


def gaps(times: list[list[float]], begin: float, end: float) -> list[float]:
    """Seconds from token to token inside a time, of all streams."""
    return [b - a for each in times for a, b in pairwise(each) if begin <= a and b <= end]


async def main() -> None:
    rows: list[dict[str, Any]] = []
    print("streams  prompt   idle gap   gap beside   ratio  95th   prompt alone   beside")
    for streams, prompt in ((1, 2048), (4, 2048), (16, 2048), (1, 7000)):
        row = await measure(streams, prompt)
        rows.append(row)
        print(
            f"{streams:7} {prompt:7} {1000 * row['idle gap']:7.2f} ms {1000 * row['gap']:9.2f} ms {row['ratio']:7.2f} "
            f"{row['95th']:5.2f} {row['prompt alone']:12.2f} s {row['prompt beside']:8.2f} s"
        )
    machine = platform.processor() or platform.machine()
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    anyio.run(main)
