"""What pages in 8 bits lose, and what they save: `python -m benchmarks.eight_bit`.

The embedded m3-nano on the CPU reads a long text. Its pages go to the disk exactly, and in 8 bits; new runtimes take
them up from there and go on with the rest of the text. Compared are the expectations for every token of the rest: the
mean Kullback-Leibler divergence from those on exact pages, and how often the likeliest token is the same; and the bytes
of the files. Prints a table and writes benchmarks/results/eight_bit.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import anyio
import torch

from m3agent.runtime import Runtime

RESULTS = Path(__file__).parent / "results" / "eight_bit.json"
DOCS = Path(__file__).parent.parent / "docs"
KEPT, REST = 6144, 256  # tokens that come from the disk, and tokens that follow


async def measure(folder: Path, eight_bit: bool, tokens: list[int]) -> tuple[torch.Tensor, int, int]:
    """Log-probabilities [REST, vocab] on pages from the disk, bytes a page, tokens that came from there."""
    options: dict[str, Any] = {"device": "cpu", "disk_cache": folder, "eight_bit_tiers": eight_bit}
    async with Runtime.open(**options) as runtime:
        sequence = runtime.sequence()
        sequence.append(tokens[:KEPT])
        await sequence.logits()
    sizes = [path.stat().st_size for path in folder.rglob("*.safetensors")]
    async with Runtime.open(**options) as runtime:
        sequence = runtime.sequence()
        sequence.append(tokens[:KEPT])
        rows: list[torch.Tensor] = []
        for token in tokens[KEPT:]:
            sequence.append([token])
            rows.append((await sequence.logits()).log_softmax(-1))
        return torch.stack(rows), sum(sizes) // len(sizes), runtime.stats().promoted_tokens


async def main() -> None:
    async with Runtime.open(device="cpu") as runtime:
        text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
        tokens = runtime.tokenizer.encode(text)[: KEPT + REST]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as exact_folder, tempfile.TemporaryDirectory() as folder:
        exact, bytes_exact, _ = await measure(Path(exact_folder), False, tokens)
        near, bytes_near, promoted = await measure(Path(folder), True, tokens)
    found["tokens from the disk"] = promoted
    found["bytes a page"] = {"exact": bytes_exact, "8 bits": bytes_near, "ratio": bytes_exact / bytes_near}
    found["divergence, nats"] = (exact.exp() * (exact - near)).sum(-1).mean().item()
    found["same likeliest token"] = (exact.argmax(-1) == near.argmax(-1)).float().mean().item()
    for key, value in found.items():
        print(f"{key:24} {value}")
    RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    anyio.run(main)
