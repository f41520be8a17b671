"""Trains m3-nano and exports it: `python -m training.run`, on one GPU. Run it again to go on where time ran out.

--out FOLDER     where the state lives, and the exported checkpoint when the last step is done   [runs/nano]
--seconds S      stop after S seconds, with the state on disk                                    [no limit]
--steps N        length of the whole run; the schedule is laid over it
"""

from __future__ import annotations

import argparse
import json
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

from training.export import export
from training.plan import POLISH, Plan
from training.score import evaluate
from training.train import train


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("runs/nano"))
    arguments.add_argument("--seconds", type=float, default=float("inf"))
    arguments.add_argument("--steps", type=int)
    arguments.add_argument("--polish", type=Path)
    arguments.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 2) - 2))
    arguments.add_argument("--scenes", type=int, default=512, help="held-out scenes for the score at the end")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    plan = POLISH if options.polish else Plan()
    if options.steps:
        plan = replace(plan, steps=options.steps)
    with ProcessPoolExecutor(max(1, options.workers // 2), mp_context=get_context("spawn")) as renderers:
        net = train(plan, options.out, options.seconds, options.workers, renderers, options.polish)
        score = evaluate(net, options.scenes, 4, renderers)
        print(json.dumps(score), flush=True)
        (options.out / "score.json").write_text(json.dumps(score, indent=1))
    export(net, options.out / "checkpoint")


if __name__ == "__main__":
    main()
