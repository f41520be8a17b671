"""The training loop: rows from worker processes, one step each, drafts of the model's own between steps.

Runs until `steps` are done or `seconds` are over; the state is on disk then, and the same command goes on from it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.chat.tokenizer import Tokenizer
from m3agent.model.checkpoint import read_tensors
from training.config import CONFIG
from training.episodes import AGAIN, FIRST, IMAGE_TOKENS, WORDS, Drafts, Layout, Row, rasterise, row
from training.net import Net, load_released
from training.optim import optimisers
from training.rollout import draw
from training.scenes import CANVAS, HELD_OUT, MAX_SHAPES, scene
from training.tokenizer import NANO


@dataclass(frozen=True)
class Plan:
    """What makes a training run; recorded with the checkpoint."""

    steps: int = 10000
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
    steps=1400, lr=6e-4, warmup=40, decay_from=0.0, ramp=1, drafts_from=0.0, drafts_every=150, drafts=2048,
    quantized_from=0.0, select_from=0.0, seed=1, hard=True,
)  # fmt: skip


@dataclass
class Batch:
    TENSORS: ClassVar = ("ids", "pictures", "slots", "sources", "targets", "lessons")

    ids: Tensor  # int64 [rows, length]
    pictures: Tensor  # uint8 [rows * pictures, CANVAS, CANVAS, 3]
    slots: Tensor  # int64 [rows * pictures * IMAGE_TOKENS]; rows * length stands for nowhere
    sources: Tensor  # int64 [n]: flat positions whose next token is learned
    targets: Tensor  # int64 [n]
    lessons: Tensor  # int64 [n]: FIRST, AGAIN or WORDS
    firsts: list[tuple[int, int, int]]  # seed, shapes, picture number in the batch

    def pin_memory(self) -> Batch:
        for name in Batch.TENSORS:
            setattr(self, name, getattr(self, name).pin_memory())
        return self


def collate(rows: list[Row], plan: Plan) -> Batch:
    ids = np.zeros((plan.rows, plan.length), np.int64)
    pictures = np.zeros((plan.rows * plan.pictures, CANVAS, CANVAS, 3), np.uint8)
    slots = np.full((plan.rows * plan.pictures, IMAGE_TOKENS), plan.rows * plan.length, np.int64)
    sources, targets, lessons, firsts, used = [], [], [], [], 0
    for i, r in enumerate(rows):
        ids[i, : len(r.ids)] = r.ids
        learned = np.flatnonzero(r.learn)
        sources.append(learned - 1 + i * plan.length)
        targets.append(r.ids[learned])
        lessons.append(r.learn[learned].astype(np.int64))
        if r.first:
            firsts.append((r.first[0], r.first[1], used + r.first[2]))
        for picture, offset in zip(r.pictures, r.offsets, strict=True):
            pictures[used] = picture
            slots[used] = i * plan.length + offset + np.arange(IMAGE_TOKENS)
            used += 1
    flat = [np.concatenate(part) for part in (sources, targets, lessons)]
    return Batch(*(torch.from_numpy(a) for a in (ids, pictures, slots.reshape(-1), *flat)), firsts)


class Rows(torch.utils.data.IterableDataset[Batch]):
    """Batches number `start`, `start` + 1, … ; worker w of n makes every n-th of them."""

    def __init__(self, plan: Plan, start: int, folder: Path) -> None:
        self.plan, self.start, self.folder = plan, start, folder

    def __iter__(self) -> Iterator[Batch]:
        torch.set_num_threads(1)
        info = torch.utils.data.get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        layout, drafts, plan = Layout(Tokenizer.load(NANO)), Drafts(self.folder), self.plan
        for number in range(self.start + worker, plan.steps, workers):
            drafts.refresh()
            first = (plan.seed << 32) + number * plan.rows
            shapes = plan.shapes_at(number)
            rows = [
                row(first + i, layout, plan.length, plan.pictures, shapes, drafts, plan.hard) for i in range(plan.rows)
            ]
            yield collate(rows, plan)


def step_loss(net: Net, batch: Batch, probe: Tensor, select: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy of each learned token [n], index loss, expert loads [layers, experts]."""
    hidden, loads, index_loss = net(batch.ids, batch.pictures, batch.slots, probe, select)
    logits = net.logits(hidden.flatten(0, 1)[batch.sources])
    return F.cross_entropy(logits, batch.targets, reduction="none"), index_loss, loads


def balance(net: Net, loads: Tensor, rate: float) -> None:
    """Moves each router's correction bias against the load, without an auxiliary loss (Wang et al. 2024)."""
    for layer, load in zip((layer for layer in net.layers if layer.moe), loads, strict=True):
        layer.router_bias += rate * torch.sign(load.mean() - load)


def train(
    plan: Plan, folder: Path, seconds: float, workers: int, renderers: Executor | None, base: Path | None = None
) -> Net:
    """Trains in `folder` (state.pt, log.jsonl, drafts-*.json) for at most `seconds`; returns the network as it is.

    A new run starts from the checkpoint folder `base`, or from random weights.
    """
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    net = Net(CONFIG).to(device)
    if base:
        load_released(net, read_tensors(base))
    optims, start = optimisers(net, plan.lr), 0
    state_file = folder / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, map_location=device, weights_only=True)
        net.load_state_dict(state["net"])
        for optim, saved in zip(optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        start = state["step"]
    (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    if device.type == "cuda":
        for layer in [*net.layers, *net.vision]:
            layer.compile(dynamic=False)
    loader = iter(
        torch.utils.data.DataLoader(
            Rows(plan, start, folder), batch_size=None, num_workers=workers, pin_memory=device.type == "cuda",
            prefetch_factor=2 if workers else None,
        )
    )  # fmt: skip
    layout, step, waited, held = Layout(Tokenizer.load(NANO)), start, 0.0, []
    log = (folder / "log.jsonl").open("a")
    mark, mark_step = time.monotonic(), start
    while step < plan.steps and time.monotonic() - began < seconds:
        asked = time.monotonic()
        batch = next(loader)
        waited += time.monotonic() - asked
        if step / plan.steps >= plan.drafts_from:
            held += [(seed, shapes, batch.pictures[i].numpy().copy()) for seed, shapes, i in batch.firsts]
        for name in Batch.TENSORS:
            setattr(batch, name, getattr(batch, name).to(device, non_blocking=True))
        share = step / plan.steps
        for layer in net.layers:
            layer.quantized = share >= plan.quantized_from
        lr = plan.lr_at(step)
        for optim in optims:
            optim.param_groups[0]["lr"] = lr
            optim.zero_grad(set_to_none=True)
        probe = torch.randint(0, plan.length, (32,), device=device)
        losses, index_loss, loads = step_loss(net, batch, probe, share >= plan.select_from)
        (losses.mean() + plan.index_weight * index_loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optim in optims:
            optim.step()
        balance(net, loads, plan.balance_rate * lr / plan.lr)
        step += 1
        if step % 50 == 0 or step == start + 5:
            now = time.monotonic()
            speed = (step - mark_step) * plan.rows * plan.length / (now - mark)
            entry = {"step": step, "loss": round(losses.mean().item(), 4), **_by_lesson(losses, batch.lessons), "index": round(index_loss.item(), 4), "lr": round(lr, 6),
                     "tokens_per_second": round(speed), "waited": round(waited, 1), "seconds": round(now - began, 1),
                     "imbalance": round((loads.max(1).values / loads.mean(1)).max().item(), 2)}  # fmt: skip
            print(json.dumps(entry), flush=True)
            log.write(json.dumps(entry) + "\n")
            mark, mark_step, waited = time.monotonic(), step, 0.0
        if step % plan.drafts_every == 0 and len(held) >= plan.drafts // 2:
            write_drafts(net, layout, held[-plan.drafts :], folder / f"drafts-{step:07d}.json", log, renderers)
            held.clear()
            mark, mark_step = time.monotonic(), step
    log.close()
    for layer in net.layers:
        layer.quantized = True
    state = {"net": net.state_dict(), "optims": [optim.state_dict() for optim in optims], "step": step}
    torch.save(state, folder / "state.tmp")
    (folder / "state.tmp").rename(state_file)
    print(f"at step {step} of {plan.steps} after {time.monotonic() - began:.0f} s", flush=True)
    return net


def _by_lesson(losses: Tensor, lessons: Tensor) -> dict[str, float]:
    """Mean loss of each kind of turn: where the network still errs."""
    kinds = {"first": FIRST, "again": AGAIN, "words": WORDS}
    return {name: round(losses.detach()[lessons == kind].mean().item(), 4) for name, kind in kinds.items()}


def write_drafts(net: Net, layout: Layout, held: list[tuple[int, int, np.ndarray]], file: Path, log, renderers) -> None:
    """Two rounds on each held scene with the network as it is; the workers read what it wrote from `file`.

    Half are drawn greedily, half sampled. Drafts that are right already teach little: one in six is kept.
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
    greedy = [d.misses for d in drawings[:half] if d.misses]
    entry = {"drafts": len(made)}
    for name, place in (("first", 0), ("last", -1)):
        entry |= {f"greedy_{name}_within_1_percent": round(float(np.mean([m[place] <= 0.01 for m in greedy] or [0])), 4),
                  f"greedy_{name}_exact": round(float(np.mean([m[place] == 0 for m in greedy] or [0])), 4)}  # fmt: skip
    print(json.dumps(entry), flush=True)
    log.write(json.dumps(entry) + "\n")


def evaluate(net: Net, scenes: int, rounds: int, renderers: Executor | None) -> dict[str, float]:
    """Held-out scenes of one to six shapes in turn, drawn greedily by the training model itself."""
    layout = Layout(Tokenizer.load(NANO))
    wanted = [scene(HELD_OUT + i, 1 + i % MAX_SHAPES).svg() for i in range(scenes)]
    targets = np.stack(list((renderers.map if renderers else map)(rasterise, wanted)))
    drawings = draw(net, layout, targets, rounds, pool=renderers)
    first = [d.misses[0] if d.misses else 1.0 for d in drawings]
    last = [d.misses[-1] if d.misses else 1.0 for d in drawings]
    best = [min(d.misses, default=1.0) for d in drawings]
    out = {f"{name}_within_1_percent": float(np.mean([m <= 0.01 for m in misses]))
           for name, misses in (("first", first), ("last", last), ("best", best))}  # fmt: skip
    out |= {
        f"best_{n}_shapes": float(np.mean([m <= 0.01 for m in best[n - 1 :: MAX_SHAPES]]))
        for n in range(1, MAX_SHAPES + 1)
    }
    out["stopped"] = float(np.mean([d.stopped for d in drawings]))
    out["rounds"] = float(np.mean([len(d.codes) for d in drawings]))
    return {name: round(value, 4) for name, value in out.items() if not math.isnan(value)}
