"""How well m3-nano draws held-out scenes through the whole library: `python -m benchmarks.nano_draw`.

    --scenes N     how many; one to six shapes in turn, from seeds that training never used        [516]
    --start N      the first scene's number                                                         [0]
    --processes N  each with a model of its own on one thread                                       [2]
    --model NAME   another checkpoint folder

For each scene the model draws greedily, looks at its render and goes on until it says that it is done (at most 4
drafts); where the picture is not within 1 % of pixels then, it begins anew up to 3 times, as `loops.refine` does.
A second pass withholds all pictures. No grammar constrains the calls. Then, on conversations of eight scenes, the
share of the attention's mass that the index branch's blocks hold. Writes benchmarks/results/nano_draw.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from benchmarks.index_recall import index_recall
from training.scenes import HELD_OUT, MAX_SHAPES, scene

RESULTS = Path(__file__).parent / "results" / "nano_draw.json"
WITHIN = 0.01


async def draw(numbers: list[int], model: str | None) -> list[dict[str, Any]]:
    """One record a scene: misses (differing share of pixels) of the looks, of the attempts after, and blind."""
    import torch

    import m3agent as m3
    from m3agent.content import ToolCall

    torch.set_num_threads(1)
    renderer, records = m3.loops.SvgRenderer(), []
    async with m3.Runtime.open(model) as runtime:
        for number in numbers:
            shapes = 1 + number % MAX_SHAPES
            target = renderer.render(scene(HELD_OUT + number, shapes).svg())
            check = m3.loops.PixelMatch(target, within=WITHIN)
            calls = {"made": 0, "damaged": 0}

            def count(event: object, calls: dict[str, int] = calls) -> None:
                if isinstance(event, m3.CallFinished):
                    calls["made"] += 1
                    damaged = isinstance(event.call, ToolCall) and bool(
                        event.call.damaged or "code" not in event.call.arguments
                    )
                    calls["damaged"] += damaged

            goal, began = ["Draw this picture.", target], time.perf_counter()
            record: dict[str, Any] = {"shapes": shapes}
            for name, options in (
                ("looks", {"max_rounds": 4, "stop": m3.loops.Stop(passing=False)}),
                ("attempts", {"max_rounds": 10, "attempts": 4}),
                ("blind", {"max_rounds": 4, "pictures": False}),
            ):
                if name == "attempts" and min(record["looks"], default=1) <= WITHIN:
                    record[name] = record["looks"]
                    continue
                async with m3.Agent(runtime, guided=False).session() as session:
                    result = await m3.loops.refine(
                        session, goal, render=renderer, checks=[check], on_event=count, **options
                    )
                record[name] = [1 - step.score for step in result.steps]
                if name == "looks":
                    record["seconds"] = time.perf_counter() - began
                    record["ended"] = result.stopped
                    record["tokens"] = result.usage.output_tokens
            records.append(record | calls)
    return records


def _draw(job: tuple[list[int], str | None]) -> list[dict[str, Any]]:
    return anyio.run(draw, *job)


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares of scenes within 1 % of pixels, and what it took."""

    def share(name: str, pick: Any, at_most: float = WITHIN, of: list[dict[str, Any]] = records) -> float:
        return round(float(np.mean([pick(r[name] or [1.0]) <= at_most for r in of])), 4)

    def first(misses: list[float]) -> float:
        return misses[0]

    def last(misses: list[float]) -> float:
        return misses[-1]

    made, damaged = (sum(r[key] for r in records) for key in ("made", "damaged"))
    return {
        "scenes": len(records),
        "first draft": share("looks", first),
        "last draft, after looking": share("looks", last),
        "best draft, after looking": share("looks", min),
        "best of up to 4 attempts": share("attempts", min),
        "first draft, every pixel": share("looks", first, 0.0),
        "best draft, every pixel": share("looks", min, 0.0),
        "pictures withheld": share("blind", min),
        "wrong first drafts that it draws again": _redrawn(records, wrong=True),
        "perfect first drafts that it draws again": _redrawn(records, wrong=False),
        "by shapes, best of up to 4 attempts": {
            n: share("attempts", min, WITHIN, [r for r in records if r["shapes"] == n])
            for n in range(1, MAX_SHAPES + 1)
        },
        "calls that parse": round(1 - damaged / made, 4),
        "ended by itself": round(float(np.mean([r["ended"] == "answered" for r in records])), 4),
        "drafts a scene": round(float(np.mean([len(r["looks"]) for r in records])), 2),
        "seconds a scene, median": round(float(np.median([r["seconds"] for r in records])), 2),
        "seconds a scene, longest": round(float(max(r["seconds"] for r in records)), 2),
    }


def _redrawn(records: list[dict[str, Any]], wrong: bool) -> float:
    """Of the first drafts that are not right (or have every pixel right), the share that a second one follows."""
    firsts = [r["looks"] for r in records if r["looks"]]
    of = [misses for misses in firsts if (misses[0] > WITHIN if wrong else misses[0] == 0)]
    return round(sum(len(misses) > 1 for misses in of) / max(1, len(of)), 4)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--scenes", type=int, default=516)
    arguments.add_argument("--start", type=int, default=0)
    arguments.add_argument("--processes", type=int, default=2)
    arguments.add_argument("--model")
    options = arguments.parse_args()
    numbers = range(options.start, options.start + options.scenes)
    jobs = [(list(numbers[i :: options.processes]), options.model) for i in range(options.processes)]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        records = [record for part in pool.map(_draw, jobs) for record in part]
    result = summary(records) | {
        "index branch": index_recall(options.model),
        "machine": platform.processor() or platform.machine(),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
