"""Whether memory stays flat: `python -m benchmarks.soak [--minutes 10]`.

200 sessions of the embedded m3-nano, each of 20 turns, on a KV cache that holds a tenth of them, with a disk tier: a
dozen turns run at once, some are cancelled in the middle, some sessions are forked, saved and taken up again; a session
that has had its turns makes place for a new one. Sampled are the process's memory, threads and open files; at the end
every page has to be free. Prints a line a minute and writes benchmarks/results/soak.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import anyio

from m3agent import Agent, M3Error
from m3agent.runtime import Runtime
from m3agent.session import Session

RESULTS = Path(__file__).parent / "results" / "soak.json"
SESSIONS, TURNS, TOGETHER = 200, 20, 12
WORDS = ("draw", "red", "green", "circle", "square", "left", "right", "small", "line", "look", "again", "please")


def memory() -> float:
    """Resident, in MiB."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


async def main(minutes: float) -> None:
    luck = random.Random(0)
    samples: list[dict[str, Any]] = []
    counts = {"turns": 0, "cancelled": 0, "forks": 0, "restored": 0, "sessions": 0, "failed": 0}
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        async with Runtime.open(
            device="cpu", cache_tokens=SESSIONS * 40, disk_cache=Path(folder) / "kv", disk_limit=256 << 20
        ) as runtime:
            agent = Agent(runtime, max_turns=1)
            turns: dict[Session, int] = {agent.session(): 0 for _ in range(SESSIONS)}

            async def turn(session: Session) -> None:
                said = " ".join(luck.choices(WORDS, k=luck.randint(3, 25)))
                try:
                    with anyio.move_on_after(luck.choice([0.01, 0.05, 0.2, 60, 60, 60])) as scope:
                        await session.run(said, max_tokens=luck.randint(1, 20))
                    counts["cancelled"] += scope.cancelled_caught
                except M3Error:
                    counts["failed"] += 1
                counts["turns"] += 1

            async def renew(session: Session) -> None:
                """A session that has had its turns gives its place to a new one, a fork, or itself from a file."""
                del turns[session]
                kind = luck.random()
                if kind < 0.2:
                    fork = session.fork()
                    await turn(fork)
                    await fork.close()
                    counts["forks"] += 1
                if kind > 0.8:
                    file = Path(folder) / "session"
                    await session.save(file, pages=kind > 0.9)
                    async with await agent.restore(file) as restored:
                        await turn(restored)
                    counts["restored"] += 1
                await session.close()
                turns[agent.session()] = 0
                counts["sessions"] += 1

            while time.monotonic() - began < 60 * minutes:
                some = luck.sample(list(turns), TOGETHER)
                async with anyio.create_task_group() as group:
                    for session in some:
                        group.start_soon(turn, session)
                for session in some:
                    turns[session] += luck.randint(1, 3)  # so that they do not all end together
                    if turns[session] >= TURNS:
                        await renew(session)
                if len(samples) < (time.monotonic() - began) / 10:
                    gc.collect()
                    stats = runtime.stats()
                    samples.append(
                        {
                            "seconds": round(time.monotonic() - began),
                            "mib": round(memory(), 1),
                            "threads": threading.active_count(),
                            "files": len(os.listdir("/proc/self/fd")),
                            "evicted": stats.evicted_pages,
                            "preempted": stats.preemptions,
                            **counts,
                        }
                    )
                    if len(samples) % 6 == 0:
                        print(samples[-1], flush=True)
            for session in turns:
                await session.close()
            with anyio.fail_after(10):
                while runtime.stats().used_pages:
                    await anyio.sleep(0.01)
            assert runtime.stats().active_requests == 0
    half = len(samples) // 2
    growth = samples[-1]["mib"] - samples[half]["mib"]
    print(f"{counts}\nmemory grew by {growth:.1f} MiB in the second half, from {samples[half]['mib']:.0f} MiB")
    RESULTS.write_text(json.dumps({"minutes": minutes, "growth": growth, "samples": samples}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    anyio.run(main, parser.parse_args().minutes)
