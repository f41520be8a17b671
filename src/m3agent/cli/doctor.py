"""`m3agent doctor`: what is here, what it can run, what is missing and how to get it."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from m3agent.render.chromium import VARIABLE, find_chromium

if TYPE_CHECKING:
    import torch

REQUIRED = ("torch", "numpy", "pillow", "tokenizers", "safetensors", "pydantic", "anyio", "jinja2", "docstring-parser")
OPTIONAL = {  # distribution: (module, extra, what for)
    "typer": ("typer", "cli", "the command line"),
    "rich": ("rich", "cli", "the command line"),
    "resvg-py": ("resvg_py", "svg", "rendering SVG, as the demo does"),
    "opencv-python-headless": ("cv2", "video", "films"),
    "playwright": ("playwright", "browser", "pages in Chromium"),
    "huggingface-hub": ("huggingface_hub", "hub", "models by their hub name"),
}
NANO = Path(__file__).parent.parent / "nano"


@dataclass(frozen=True)
class Finding:
    """One line of the report. `fix` says what to do when `good` is False."""

    what: str
    found: str
    good: bool = True
    fix: str = ""


def examine() -> list[Finding]:
    """All findings, the machine first. Imports torch and runs one tiny product a device and dtype."""
    findings = [
        Finding("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"),
        Finding("CPU", f"{os.cpu_count()} cores"),
    ]
    return findings + _packages() + [_chromium()] + _devices() + [_embedded_model()]


def _packages() -> list[Finding]:
    findings: list[Finding] = []
    for name in REQUIRED:
        version = _version(name)
        findings.append(Finding(name, version or "missing", version is not None, f"pip install {name}"))
    for name, (module, extra, purpose) in OPTIONAL.items():
        here = find_spec(module) is not None
        fix = f"for {purpose}: pip install 'm3agent[{extra}]'"
        findings.append(Finding(name, (_version(name) or "present") if here else "missing", here, fix))
    return findings


def _chromium() -> Finding:
    path = find_chromium()
    fix = f"for pages: install Chromium (Debian: chromium), or name its binary in {VARIABLE}"
    return Finding("Chromium", path or "missing", path is not None, fix)


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[Finding]:
    if find_spec("torch") is None:
        return []
    import torch

    devices = [(torch.device("cpu"), f"{torch.get_num_threads()} threads")]
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        devices.append((torch.device("cuda", index), f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB"))
    if torch.backends.mps.is_available():
        devices.append((torch.device("mps"), "Apple GPU"))
    return [Finding(f"device {device}", f"{facts}; {', '.join(_dtypes(device))}") for device, facts in devices]


def _dtypes(device: torch.device) -> list[str]:
    """The dtypes in which a matrix product really runs on the device."""
    import torch

    working: list[str] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        try:
            a = torch.ones(8, 8, device=device, dtype=dtype)
            (a @ a).sum().item()
        except RuntimeError:
            continue
        working.append(str(dtype).removeprefix("torch."))
    return working


def _embedded_model() -> Finding:
    shards = list(NANO.glob("*.safetensors"))
    if not shards:
        fix = "train it (make nano), or give a model's folder: m3agent demo --model FOLDER"
        return Finding("m3-nano", "not in this installation", False, fix)
    return Finding("m3-nano", f"{sum(shard.stat().st_size for shard in shards) / 2**20:.0f} MiB, embedded")


def show(console: Console) -> bool:
    """Print the report; True when nothing is missing."""
    findings = examine()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        mark = Text("✓", "green") if finding.good else Text("✗", "red")
        told = finding.found if finding.good else f"{finding.found}; {finding.fix}"
        table.add_row(mark, finding.what, Text(told))  # Text: the [extra] in a pip command is no markup
    console.print(table)
    good = all(finding.good for finding in findings)
    console.print("Everything is here." if good else "See the lines marked ✗ for what is missing.")
    return good
