"""The training loop: rows from worker processes, one step each, drafts of the model's own between steps.

Runs until the plan's steps are done or the time is over; the state is on disk then, and the same call goes on from it.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import Executor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from m3agent.chat.tokenizer import Tokenizer
from m3agent.model.checkpoint import read_tensors
from training.config import CONFIG
from training.data import Batch, batches
from training.episodes import AGAIN, FIRST, WORDS, Layout
from training.net import Net, load_released
from training.optim import optimisers
from training.plan import Plan
from training.score import write_drafts
from training.tokenizer import NANO

PROBES = 32  # queries of each row at which the index branch is taught
LOG_EVERY = 50


class State:
    """The network and its optimisers at a step; on disk as state.pt."""

    def __init__(self, plan: Plan, folder: Path, base: Path | None, device: torch.device) -> None:
        self.file = folder / "state.pt"
        self.net = Net(CONFIG).to(device)
        if base:
            load_released(self.net, read_tensors(base))
        self.optims, self.step = optimisers(self.net, plan.lr), 0
        if self.file.exists():
            saved = torch.load(self.file, map_location=device, weights_only=True)
            self.net.load_state_dict(saved["net"])
            for optim, state in zip(self.optims, saved["optims"], strict=True):
                optim.load_state_dict(state)
            self.step = saved["step"]

    def save(self) -> None:
        optims = [optim.state_dict() for optim in self.optims]
        temporary = self.file.with_suffix(".tmp")
        torch.save({"net": self.net.state_dict(), "optims": optims, "step": self.step}, temporary)
        temporary.rename(self.file)


class Log:
    """Lines of JSON, on the screen and in log.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.file = (folder / "log.jsonl").open("a")

    def __call__(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry)
        print(line, flush=True)
        self.file.write(line + "\n")


def train(
    plan: Plan, folder: Path, seconds: float, workers: int, renderers: Executor | None, base: Path | None = None
) -> Net:
    """Trains in `folder` (state.pt, log.jsonl, drafts-*.json) for at most `seconds`; returns the network as it is.

    A new run starts from the checkpoint folder `base`, or from random weights.
    """
    began, device = time.monotonic(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(plan.seed)
    torch.set_float32_matmul_precision("high")
    state = State(plan, folder, base, device)
    (folder / "plan.json").write_text(json.dumps(asdict(plan), indent=1))
    if device.type == "cuda":
        for layer in [*state.net.layers, *state.net.vision]:
            layer.compile(dynamic=False)
    rows = batches(plan, state.step, folder, workers, pin=device.type == "cuda")
    layout, log, held = Layout(Tokenizer.load(NANO)), Log(folder), []
    mark, mark_step, waited = time.monotonic(), state.step, 0.0
    while state.step < plan.steps and time.monotonic() - began < seconds:
        asked = time.monotonic()
        batch = next(rows)
        waited += time.monotonic() - asked
        if state.step / plan.steps >= plan.drafts_from:
            held += [(seed, shapes, batch.pictures[i].numpy().copy()) for seed, shapes, i in batch.firsts]
        report = one_step(plan, state, batch.to(device))
        if state.step % LOG_EVERY == 0:
            now = time.monotonic()
            speed = (state.step - mark_step) * plan.rows * plan.length / (now - mark)
            times = {"tokens_per_second": round(speed), "waited": round(waited, 1), "seconds": round(now - began, 1)}
            log({"step": state.step, **report(), **times})
            mark, mark_step, waited = now, state.step, 0.0
        if state.step % plan.drafts_every == 0 and len(held) >= plan.drafts // 2:
            file = folder / f"drafts-{state.step:07d}.json"
            log(write_drafts(state.net, layout, held[-plan.drafts :], file, renderers))
            held.clear()
            mark, mark_step = time.monotonic(), state.step
    log.file.close()
    state.save()
    for layer in state.net.layers:
        layer.quantized = True  # as it will be exported
    print(f"at step {state.step} of {plan.steps} after {time.monotonic() - began:.0f} s", flush=True)
    return state.net


def one_step(plan: Plan, state: State, batch: Batch):
    """Forward, backward, update. Returns a function that reads the step's figures off the device, for the log."""
    net, share, lr = state.net, state.step / plan.steps, plan.lr_at(state.step)
    for layer in net.layers:
        layer.quantized = share >= plan.quantized_from
    for optim in state.optims:
        optim.param_groups[0]["lr"] = lr
        optim.zero_grad(set_to_none=True)
    probe = torch.randint(0, plan.length, (PROBES,), device=batch.ids.device)
    select = share >= plan.select_from
    hidden, loads, index_loss = net(batch.ids, batch.pictures, batch.slots, probe, select)
    logits = net.logits(hidden.flatten(0, 1)[batch.sources])
    losses = F.cross_entropy(logits, batch.targets, reduction="none")  # [learned tokens]
    (losses.mean() + plan.index_weight * index_loss).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optim in state.optims:
        optim.step()
    balance(net, loads, plan.balance_rate * lr / plan.lr)
    state.step += 1
    return lambda: {
        "loss": round(losses.mean().item(), 4),
        **_by_lesson(losses, batch.lessons),
        "index": round(index_loss.item(), 4),
        "lr": round(lr, 6),
        "imbalance": round((loads.max(1).values / loads.mean(1)).max().item(), 2),
    }


def balance(net: Net, loads: Tensor, rate: float) -> None:
    """Moves each router's correction bias against the load, without an auxiliary loss (Wang et al. 2024)."""
    for layer, load in zip((layer for layer in net.layers if layer.moe), loads, strict=True):
        layer.router_bias += rate * torch.sign(load.mean() - load)


def _by_lesson(losses: Tensor, lessons: Tensor) -> dict[str, float]:
    """Mean loss of each kind of turn: where the network still errs."""
    kinds = {"first": FIRST, "again": AGAIN, "words": WORDS}
    means = {name: losses.detach()[lessons == kind] for name, kind in kinds.items()}
    return {name: round(values.mean().item(), 4) for name, values in means.items() if len(values)}
