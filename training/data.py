"""Rows as batches of fixed shape, made by worker processes: batch n is the same whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from m3agent.chat.tokenizer import Tokenizer
from training.episodes import IMAGE_TOKENS, Drafts, Layout, Row, row
from training.plan import Plan
from training.scenes import CANVAS
from training.tokenizer import NANO


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

    def to(self, device: torch.device) -> Batch:
        for name in Batch.TENSORS:
            setattr(self, name, getattr(self, name).to(device, non_blocking=True))
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


def batches(plan: Plan, start: int, folder: Path, workers: int, pin: bool) -> Iterator[Batch]:
    """Batches from number `start` on; drafts are read from `folder`."""
    loader = torch.utils.data.DataLoader(
        Rows(plan, start, folder),
        batch_size=None,
        num_workers=workers,
        pin_memory=pin,
        prefetch_factor=2 if workers else None,
    )
    return iter(loader)
