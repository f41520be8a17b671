"""The schedule of a training run, in two stages: the long one from nothing, then a short one on its own mistakes."""

from __future__ import annotations

from dataclasses import dataclass

from training.scenes import MAX_SHAPES


@dataclass(frozen=True)
class Plan:
    """What makes a training run; recorded with the checkpoint."""

    steps: int = 7900
    rows: int = 32  # conversations a step
    length: int = 2048  # tokens of a row
    pictures: int = 14  # pictures of a row, at most
    lr: float = 2e-3
    warmup: int = 200
    decay_from: float = 0.55  # share of the steps after which the learning rate falls to zero
    ramp: int = 2400  # steps over which scenes grow from one shape to MAX_SHAPES
    drafts_from: float = 0.2  # share of the steps after which the model drafts for itself
    drafts_every: int = 250
    drafts: int = 1024  # scenes drafted each time
    quantized_from: float = 0.8  # from here on the weights are trained as MXFP8 will round them
    select_from: float = 0.88  # from here on attention sees only the blocks that the index branch selects
    index_weight: float = 0.1
    balance_rate: float = 4e-3  # of the routers' correction bias, a step
    seed: int = 0
    hard: bool = False  # more shapes than an even draw would give

    def lr_at(self, step: int) -> float:
        falling = (1 - step / self.steps) / (1 - self.decay_from)
        return self.lr * min(1.0, (step + 1) / self.warmup, falling)

    def shapes_at(self, step: int) -> int:
        return min(MAX_SHAPES, 1 + step * MAX_SHAPES // self.ramp)


# After the long run, from its checkpoint: crowded scenes, and the model's own wrong drafts from the first step on.
POLISH = Plan(
    steps=1300, lr=6e-4, warmup=40, decay_from=0.0, ramp=1, drafts_from=0.0, drafts_every=150, drafts=2048,
    quantized_from=0.0, select_from=0.0, seed=1, hard=True,
)  # fmt: skip
