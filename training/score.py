"""What the network draws by itself: drafts with its own mistakes for the rows to come, and a score at the end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np

from m3agent.chat.tokenizer import Tokenizer
from training.episodes import Layout, rasterise
from training.net import Net
from training.rollout import Drawing, draw
from training.scenes import HELD_OUT, MAX_SHAPES, scene
from training.tokenizer import NANO

WITHIN = 0.01  # a drawing is right when at most this share of its pixels differs


def write_drafts(
    net: Net, layout: Layout, held: list[tuple[int, int, np.ndarray]], file: Path, renderers: Executor | None
) -> dict[str, Any]:
    """Two rounds on each held scene (seed, shapes, pixels) with the network as it is; workers read them from `file`.

    Half are drawn greedily, half sampled. Drafts that are right already teach little: one in six is kept.
    Returns the scores of the greedy half.
    """
    targets = np.stack([pixels for _, _, pixels in held])
    half = len(held) // 2
    drawings = draw(net, layout, targets[:half], 2, pool=renderers)
    drawings += draw(net, layout, targets[half:], 2, temperature=1.0, pool=renderers)
    made = [
        (seed, shapes, d.codes)
        for i, ((seed, shapes, _), d) in enumerate(zip(held, drawings, strict=True))
        if d.codes and all(d.codes) and (d.misses[-1] > 0 or i % 6 == 0)
    ]
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(made))
    temporary.rename(file)
    return {"drafts": len(made)} | _shares(drawings[:half])


def evaluate(net: Net, scenes: int, rounds: int, renderers: Executor | None) -> dict[str, Any]:
    """Held-out scenes of one to six shapes in turn, drawn greedily by the training network itself."""
    layout = Layout(Tokenizer.load(NANO))
    wanted = [scene(HELD_OUT + i, 1 + i % MAX_SHAPES).svg() for i in range(scenes)]
    targets = np.stack(list((renderers.map if renderers else map)(rasterise, wanted)))
    drawings = draw(net, layout, targets, rounds, pool=renderers)
    by_shapes = {n: _share([min(d.misses, default=1.0) for d in drawings[n - 1 :: MAX_SHAPES]]) for n in range(1, 7)}
    rounds_used = float(np.mean([len(d.codes) for d in drawings]))
    return _shares(drawings) | {"best_by_shapes": by_shapes, "rounds": round(rounds_used, 2)}


def _shares(drawings: Sequence[Drawing]) -> dict[str, float]:
    first, last = ([d.misses[at] if d.misses else 1.0 for d in drawings] for at in (0, -1))
    return {
        "first_right": _share(first),
        "last_right": _share(last),
        "first_exact": _share(first, 0.0),
        "last_exact": _share(last, 0.0),
    }


def _share(misses: Sequence[float], at_most: float = WITHIN) -> float:
    return round(float(np.mean([miss <= at_most for miss in misses])), 4) if misses else 0.0
