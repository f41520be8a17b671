"""What differs between two pictures of one size: how much, where, and a picture of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_MARK = (220, 38, 38)
_CELLS = 128  # along the longer side: differences closer than a cell or two are one region


@dataclass(frozen=True)
class Region:
    """A part of the picture that holds differences: pixels left ≤ x < right, top ≤ y < bottom."""

    left: int
    top: int
    right: int
    bottom: int
    pixels: int  # how many of them differ


@dataclass(frozen=True)
class Difference:
    share: float  # of the pixels, 0..1
    largest: int  # difference of one channel, of 255
    mean: float  # difference over all pixels and channels, of 255
    regions: list[Region]  # the one with most differing pixels first
    marked: NDArray[np.uint8]  # [height, width, 3]: the second picture, faded, with differing pixels in red


def difference(first: NDArray[np.uint8], second: NDArray[np.uint8], tolerance: int) -> Difference:
    """A pixel differs when any channel differs by more than `tolerance` of 255. Both are [height, width, 3]."""
    distance = np.abs(first.astype(np.int16) - second.astype(np.int16))
    differs = distance.max(axis=2) > tolerance  # [height, width]
    grey = second.mean(axis=2, keepdims=True)
    marked = np.repeat(255 - (255 - grey) * 0.3, 3, axis=2).astype(np.uint8)
    marked[differs] = _MARK
    return Difference(float(differs.mean()), int(distance.max()), float(distance.mean()), regions(differs), marked)


def regions(differs: NDArray[np.bool_]) -> list[Region]:
    """Groups of neighbouring cells that hold differences, each as the smallest box around its differing pixels."""
    height, width = differs.shape
    size = max(1, -(-max(height, width) // _CELLS))
    cells = {(int(y), int(x)) for y, x in np.argwhere(_by_cell(differs, size))}
    found: list[Region] = []
    while cells:
        group = _take_group(cells)
        only = np.zeros_like(differs)
        for y, x in group:
            part = np.s_[y * size : (y + 1) * size, x * size : (x + 1) * size]
            only[part] = differs[part]
        rows, columns = np.flatnonzero(only.any(axis=1)), np.flatnonzero(only.any(axis=0))
        found.append(Region(int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1, int(only.sum())))
    return sorted(found, key=lambda region: (-region.pixels, region.top, region.left))


def _by_cell(differs: NDArray[np.bool_], size: int) -> NDArray[np.bool_]:
    """[rows of cells, columns of cells]: whether any pixel of the cell differs."""
    height, width = differs.shape
    padded = np.pad(differs, ((0, -height % size), (0, -width % size)))
    blocks = padded.reshape(padded.shape[0] // size, size, padded.shape[1] // size, size)
    return np.asarray(blocks.any(axis=(1, 3)))


def _take_group(cells: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """Take a cell and all that hang together with it, diagonals too, out of `cells`."""
    waiting = [cells.pop()]
    group: list[tuple[int, int]] = []
    while waiting:
        y, x = waiting.pop()
        group.append((y, x))
        for neighbour in [(y + down, x + right) for down in (-1, 0, 1) for right in (-1, 0, 1)]:
            if neighbour in cells:
                cells.remove(neighbour)
                waiting.append(neighbour)
    return group
