"""m3-nano on a CPU, beside transformers on the same weights: `python -m benchmarks.nano_cpu`.

Measures prefill and decode in tokens/s, the time to the first token of a later turn (a long log in the cache, a short
message new) with the cache and without, and the peak memory. Each engine runs in a process of its own, one after the
other, on the same prompt, greedily, one sequence at a time. transformers reads a bf16 copy of the checkpoint, since it
cannot read MXFP8. Once after a short prompt and once after a long one. Prints tables and writes
benchmarks/results/nano_cpu.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results" / "nano_cpu.json"
PROMPTS = (512, 4096)  # tokens in the cache: a demo's prompt, and a long session
NEW = 20  # tokens of the later turn's message
BARS = {"decode": 3.0, "prefill": 1.5, "later turn": 20.0}


@dataclass(frozen=True)
class Plan:
    """What each engine is asked to do. prompt: tokens; decode: tokens; repeats: of which the median counts."""

    folder: str
    prompt: int
    decode: int
    repeats: int

    def tokens(self, count: int, seed: int) -> list[int]:
        """Ordinary tokens, the same ones for both engines; byte tokens come first in every byte-level tokenizer."""
        return random.Random(seed).choices(range(256), k=count)


@dataclass
class Result:
    """Tokens/s, seconds to the first token of a later turn, MiB."""

    prefill: float
    decode: float
    later_turn: float
    later_turn_uncached: float
    peak_memory: float


def peak_memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure_m3agent(plan: Plan) -> Result:
    """Through the public runtime, threads and streams included. Every repeat is a fresh sequence."""
    from m3agent.runtime import Runtime, Sampling, Sequence

    async with Runtime.open(plan.folder) as runtime:

        async def first_token(sequence: Sequence, tokens: list[int]) -> float:
            sequence.append(tokens)
            async with sequence.generate(Sampling(0.0, max_tokens=1, stop=frozenset())) as stream:
                async for _ in stream:
                    pass
            return stream.usage.prefill_seconds

        async def decode(sequence: Sequence) -> float:
            async with sequence.generate(Sampling(0.0, max_tokens=plan.decode + 1, stop=frozenset())) as stream:
                async for _ in stream:
                    pass
            return stream.usage.tokens_per_second

        prefills, decodes, later, uncached = [], [], [], []
        for repeat in range(plan.repeats + 1):  # the first one warms up
            sequence = runtime.sequence()
            prefills.append(plan.prompt / await first_token(sequence, plan.tokens(plan.prompt, repeat)))
            decodes.append(await decode(sequence.fork()))
            later.append(await first_token(sequence, plan.tokens(NEW, -1)))
            assert runtime.stats().recomputed_tokens == 0
            whole = runtime.sequence()
            uncached.append(await first_token(whole, sequence.tokens))
            sequence.close()
            whole.close()
        return Result(*(median(values[1:]) for values in (prefills, decodes, later, uncached)), peak_memory())


def measure_transformers(plan: Plan) -> Result:
    """Through `generate` in bf16; the later turn with the cache that the first call returned, and without any."""
    import warnings

    import torch
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    warnings.simplefilter("ignore", FutureWarning)  # newer releases spell past_key_values another way
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForImageTextToText.from_pretrained(plan.folder, dtype=torch.bfloat16).eval()

    def timed(ids: list[int], count: int, **cache: Any) -> tuple[float, Any]:
        batch = torch.tensor([ids])
        settings = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
        began = time.perf_counter()
        output = model.generate(
            batch, attention_mask=torch.ones_like(batch), return_dict_in_generate=True, **settings, **cache
        )
        return time.perf_counter() - began, output

    prefills, decodes, later, uncached = [], [], [], []
    for repeat in range(plan.repeats + 1):
        prompt = plan.tokens(plan.prompt, repeat)
        first, output = timed(prompt, 1)
        prefills.append(plan.prompt / first)
        decodes.append(plan.decode / max(timed(prompt, plan.decode + 1)[0] - first, 1e-9))
        log = output.sequences[0].tolist() + plan.tokens(NEW, -1)
        later.append(timed(log, 1, past_key_values=output.past_key_values)[0])
        uncached.append(timed(log, 1)[0])
    return Result(*(median(values[1:]) for values in (prefills, decodes, later, uncached)), peak_memory())


def convert(folder: Path, target: Path) -> None:
    """The checkpoint in bf16, for a reader that does not know MXFP8."""
    from m3agent.model import M3Config, read_tensors, save_checkpoint

    save_checkpoint(target, M3Config.load(folder), read_tensors(folder))
    for path in folder.glob("*.json"):
        if not (target / path.name).exists() and "index" not in path.name:
            shutil.copy(path, target)


def in_process(engine: str, plan: Plan) -> Result:
    """Run one engine in a process of its own, so that its peak memory is its own."""
    command = [sys.executable, "-m", "benchmarks.nano_cpu", "--engine", engine, "--plan", json.dumps(asdict(plan))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=Path(__file__).parent.parent)
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def compare(folder: Path, repeats: int, prompt: int) -> dict[str, Any]:
    """Both engines, one after the other, after `prompt` tokens or what the context allows, and what they ran on."""
    import torch
    import transformers

    from m3agent.model import M3Config

    context = M3Config.load(folder).text.max_position_embeddings
    prompt, decode = min(prompt, context * 3 // 4), min(128, context // 8)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "bf16"
        convert(folder, copy)
        ours = in_process("m3agent", Plan(str(folder), prompt, decode, repeats))
        theirs = in_process("transformers", Plan(str(copy), prompt, decode, repeats))
    return {
        "prompt_tokens": prompt,
        "decode_tokens": decode,
        "new_tokens": NEW,
        "repeats": repeats,
        "m3agent": asdict(ours),
        "transformers": asdict(theirs),
        "ratios": {
            "decode": ours.decode / theirs.decode,
            "prefill": ours.prefill / theirs.prefill,
            "later turn": ours.later_turn_uncached / ours.later_turn,
        },
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def table(report: dict[str, Any]) -> str:
    ours, theirs, ratios = report["m3agent"], report["transformers"], report["ratios"]
    machine = report["machine"]
    log = report["prompt_tokens"]

    def line(name: str, key: str, unit: str, scale: float = 1.0) -> str:
        return f"{name:<44}{ours[key] * scale:>10.1f}{theirs[key] * scale:>14.1f}  {unit}"

    lines = [
        f"{machine['processor']}, {machine['cores']} cores, torch {machine['torch']}",
        f"{'':<44}{'m3agent':>10}{'transformers':>14}",
        line(f"prefill of {log} tokens", "prefill", "tokens/s"),
        line(f"decode after {log} tokens", "decode", "tokens/s"),
        line(f"first token, {NEW} new after {log} cached", "later_turn", "ms", 1000),
        line("the same without the cache", "later_turn_uncached", "ms", 1000),
        line("peak memory", "peak_memory", "MiB"),
        "",
        *(f"{name}: {ratio:.1f}x (bar {BARS[name]:g}x)" for name, ratio in ratios.items()),
    ]
    return "\n".join(lines)


def main(show: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder instead of the embedded m3-nano")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--engine", choices=["m3agent", "transformers"], help=argparse.SUPPRESS)
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine:
        import anyio

        plan = Plan(**json.loads(arguments.plan))
        ours = arguments.engine == "m3agent"
        result = anyio.run(measure_m3agent, plan) if ours else measure_transformers(plan)
        show(json.dumps(asdict(result)))
        return
    from m3agent.runtime.runtime import EMBEDDED

    reports = []
    for prompt in PROMPTS:
        report = compare((arguments.model or EMBEDDED).resolve(), arguments.repeats, prompt)
        report["model"] = arguments.model.name if arguments.model else "m3-nano"
        reports.append(report)
        show(table(report) + "\n")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(reports, indent=2) + "\n")


if __name__ == "__main__":
    main()
