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

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.chat.tokenizer import Tokenizer
from training.config import CONFIG
from training.episodes import IMAGE_TOKENS, Drafts, Layout, Row, rasterise, row
from training.net import Net
from training.optim import optimisers
from training.rollout import draw
from training.scenes import CANVAS, HELD_OUT, MAX_SHAPES, scene
from training.tokenizer import NANO


@dataclass(frozen=True)
class Plan:
    """What makes a training run; recorded with the checkpoint."""

    steps: int = 9000
    rows: int = 32  # conversations a step
    length: int = 2048  # tokens of a row
    pictures: int = 14  # pictures of a row, at most
    lr: float = 2e-3
    warmup: int = 200
    decay_from: float = 0.55  # share of the steps after which the learning rate falls to zero
    ramp: int = 1200  # steps over which scenes grow from one shape to MAX_SHAPES
    drafts_from: float = 0.2  # share of the steps after which the model drafts for itself
    drafts_every: int = 100
    drafts: int = 768  # scenes drafted each time
    quantized_from: float = 0.8  # from here on the weights are trained as MXFP8 will round them
    select_from: float = 0.88  # from here on attention sees only the blocks that the index branch selects
    index_weight: float = 0.1
    seed: int = 0

    def lr_at(self, step: int) -> float:
        falling = (1 - step / self.steps) / (1 - self.decay_from)
        return self.lr * min(1.0, (step + 1) / self.warmup, falling)

    def shapes_at(self, step: int) -> int:
        return min(MAX_SHAPES, 1 + step * MAX_SHAPES // self.ramp)


@dataclass
class Batch:
    ids: Tensor  # int64 [rows, length]
    pictures: Tensor  # uint8 [rows * pictures, CANVAS, CANVAS, 3]
    slots: Tensor  # int64 [rows * pictures * IMAGE_TOKENS]; rows * length stands for nowhere
    sources: Tensor  # int64 [n]: flat positions whose next token is learned
    targets: Tensor  # int64 [n]
    firsts: list[tuple[int, int, int]]  # seed, shapes, picture number in the batch

    def pin_memory(self) -> Batch:
        for name in ("ids", "pictures", "slots", "sources", "targets"):
            setattr(self, name, getattr(self, name).pin_memory())
        return self


def collate(rows: list[Row], plan: Plan) -> Batch:
    ids = np.zeros((plan.rows, plan.length), np.int64)
    pictures = np.zeros((plan.rows * plan.pictures, CANVAS, CANVAS, 3), np.uint8)
    slots = np.full((plan.rows * plan.pictures, IMAGE_TOKENS), plan.rows * plan.length, np.int64)
    sources, targets, firsts, used = [], [], [], 0
    for i, r in enumerate(rows):
        ids[i, : len(r.ids)] = r.ids
        learned = np.flatnonzero(r.learn)
        sources.append(learned - 1 + i * plan.length)
        targets.append(r.ids[learned])
        if r.first:
            firsts.append((r.first[0], r.first[1], used + r.first[2]))
        for picture, offset in zip(r.pictures, r.offsets, strict=True):
            pictures[used] = picture
            slots[used] = i * plan.length + offset + np.arange(IMAGE_TOKENS)
            used += 1
    flat = [np.concatenate(sources), np.concatenate(targets)]
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
            rows = [row(first + i, layout, plan.length, plan.pictures, shapes, drafts) for i in range(plan.rows)]
            yield collate(rows, plan)


def step_loss(net: Net, batch: Batch, probe: Tensor, select: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean cross-entropy over the learned tokens, index loss, expert loads [layers, experts]."""
    hidden, loads, index_loss = net(batch.ids, batch.pictures, batch.slots, probe, select)
    logits = net.logits(hidden.flatten(0, 1)[batch.sources])
    return F.cross_entropy(logits, batch.targets), index_loss, loads


def balance(net: Net, loads: Tensor, rate: float) -> None:
    """Moves each router's correction bias against the load, without an auxiliary loss (Wang et al. 2024)."""
    for layer, load in zip((layer for layer in net.layers if layer.moe), loads, strict=True):
        layer.router_bias += rate * torch.sign(load.mean() - load)


def train(plan: Plan, folder: Path, seconds: float, workers: int, renderers: Executor | None) -> Net:
    """Trains in `folder` (state.pt, log.jsonl, drafts-*.json) for at most `seconds`; returns the network as it is."""
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    net = Net(CONFIG).to(device)
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
        for name in ("ids", "pictures", "slots", "sources", "targets"):
            setattr(batch, name, getattr(batch, name).to(device, non_blocking=True))
        share = step / plan.steps
        for layer in net.layers:
            layer.quantized = share >= plan.quantized_from
        lr = plan.lr_at(step)
        for optim in optims:
            optim.param_groups[0]["lr"] = lr
            optim.zero_grad(set_to_none=True)
        probe = torch.randint(0, plan.length, (32,), device=device)
        loss, index_loss, loads = step_loss(net, batch, probe, share >= plan.select_from)
        (loss + plan.index_weight * index_loss).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        for optim in optims:
            optim.step()
        balance(net, loads, 1e-3 * min(1.0, lr / plan.lr * 2))
        step += 1
        if step % 50 == 0 or step == start + 5:
            now = time.monotonic()
            speed = (step - mark_step) * plan.rows * plan.length / (now - mark)
            entry = {"step": step, "loss": round(loss.item(), 4), "index": round(index_loss.item(), 4), "lr": round(lr, 6),
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


def write_drafts(net: Net, layout: Layout, held: list[tuple[int, int, np.ndarray]], file: Path, log, renderers) -> None:
    """Drafts the held scenes with the network as it is, half of them greedily; the workers read them from `file`."""
    targets = np.stack([pixels for _, _, pixels in held])
    half = len(held) // 2
    drawings = draw(net, layout, targets[:half], 1, pool=renderers)
    drawings += draw(net, layout, targets[half:], 1, temperature=1.0, pool=renderers)
    made = [
        (seed, shapes, d.codes[0])
        for (seed, shapes, _), d in zip(held, drawings, strict=True)
        if d.codes and d.codes[0]
    ]
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(made))
    temporary.rename(file)
    greedy = [d.misses[0] for d in drawings[:half] if d.misses]
    entry = {"drafts": len(made), "greedy_within_1_percent": round(float(np.mean([m <= 0.01 for m in greedy] or [0])), 4),
             "greedy_exact": round(float(np.mean([m == 0 for m in greedy] or [0])), 4)}  # fmt: skip
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
