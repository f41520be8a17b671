"""What the GPU benchmarks share: timing by the device's own clock, the card's ceilings, one table printed and kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
REPEATS = 20


def milliseconds(calls: Sequence[Callable[[], Any]], *, graph: bool = False, repeats: int = REPEATS) -> float:
    """The median time of one call, in ms, by device events after a warm-up.

    calls: the same work on different inputs, run in turn, so that none finds its inputs in the cache. graph: captured
    as one graph first, as a decode step runs; else each repetition times one call.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    runs: list[Callable[[], Any]] = list(calls)
    if graph:
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            for call in calls:
                call()
        runs = [captured.replay]
    times: list[float] = []
    for repeat in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200_000)  # the host is ahead before the clock starts
        begin.record()
        runs[repeat % len(runs)]()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / (len(calls) if graph else 1))
    return median(times)


def ceilings() -> dict[str, float]:
    """Copy bandwidth in TB/s (bytes read and written) and bf16 matrix rate in TFLOP/s, measured on this card."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = milliseconds([lambda: target.copy_(source)])
    size = 8192
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = milliseconds([lambda: a @ b])
    return {"copy_tb_s": 2 * source.numel() / copy / 1e9, "bf16_tflop_s": 2 * size**3 / product / 1e9}


def require_gpu() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU; without one the torch meanings run, see nano_cpu")


def report(name: str, ceiling: dict[str, float], rows: list[dict[str, Any]], out: str | None) -> None:
    """Print the rows as a table and write them, with the card and its ceilings, to results/NAME.json."""
    columns = list(rows[0])
    cells = [columns, *([_text(row[column]) for column in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        + ", ".join(f"{k} {v:.4g}" for k, v in ceiling.items())
    )
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    path = Path(out) if out else RESULTS / f"{name}.json"
    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **ceiling, "rows": rows}
    path.write_text(json.dumps(found, indent=1) + "\n")


def _text(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
