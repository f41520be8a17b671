"""A slice of MiniMax-M3 at full width on one GPU, through the ordinary runtime: `python -m benchmarks.m3_slice`.

One dense and seven sparse MoE layers with random bf16 weights made on the card (102 GiB; an H200 holds them), M3's
vocabulary. Measures prefill, a turn of 444 tokens behind 142,000 cached ones with and without the cache, and decoding
of 1, 8 and 32 sequences. Writes benchmarks/results/m3_slice.json and the roofline docs/m3_slice.svg; `--plot` draws the
latter from the former without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import torch
from torch import Tensor

from benchmarks.gpu import RESULTS, ceilings, require_gpu
from m3agent.chat import ChatFormat, Tokenizer
from m3agent.model import KVPages, M3Config, M3Model, TextConfig, fused
from m3agent.model.flops import span_flops
from m3agent.model.released import released_tensors
from m3agent.runtime import Runtime, Sampling, Sequence
from m3agent.runtime.defaults import Defaults
from m3agent.runtime.runtime import EMBEDDED

PLOT = Path(__file__).parent.parent / "docs" / "m3_slice.svg"
PREFILL, CACHED, NEW = 32768, 142_000, 444
DECODE_CONTEXT, DECODE_STEPS, SEQUENCES = 8192, 64, (1, 8, 32)
LAYERS = 8
BARS = {"prefill": 0.45, "turn_ms": 40.0, "host_ms": 1.0, "sooner": 45.0, "decode": 0.75}


def slice_config() -> M3Config:
    """M3's widths; the first layer is dense with full attention, as M3's first three are."""
    first = (False,) + (True,) * (LAYERS - 1)
    text = TextConfig(
        vocab_size=200_064,
        hidden_size=6144,
        num_hidden_layers=LAYERS,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        rotary_dim=64,
        rope_theta=5_000_000.0,
        rms_norm_eps=1e-6,
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        intermediate_size=3072,
        shared_intermediate_size=3072,
        dense_intermediate_size=12288,
        num_local_experts=128,
        num_experts_per_tok=4,
        routed_scaling_factor=2.0,
        max_position_embeddings=1_048_576,
        index_heads=4,
        index_dim=128,
        block_size=128,
        topk_blocks=16,
        local_blocks=1,
        init_blocks=0,
        sparse_layers=first,
        moe_layers=first,
    )
    return M3Config(text, None, image_token_id=200_025, video_token_id=200_026, projector_hidden_size=6144, raw={})


class RandomTensors(Mapping[str, Tensor]):
    """Released names to random tensors on the card, each made when it is asked for; activations stay near 1."""

    def __init__(self, config: M3Config) -> None:
        self.shapes = released_tensors(config)
        torch.manual_seed(0)

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        scale = 0.0 if len(shape) == 1 else 1.0 if "embed" in name else shape[-1] ** -0.5
        return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0.0, scale)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def layer_products(t: TextConfig) -> tuple[int, int, int]:
    """Numbers in the matrices that one token is multiplied with: dense layer, MoE layer without experts, one expert."""
    kv = 2 * t.num_key_value_heads * t.head_dim
    heads = t.num_attention_heads * t.head_dim
    attention = t.hidden_size * (2 * heads + kv)
    index = t.hidden_size * (t.index_heads + 1) * t.index_dim
    shared = 3 * t.hidden_size * t.shared_intermediate_size + t.hidden_size * t.num_local_experts
    return (
        attention + 3 * t.hidden_size * t.dense_intermediate_size,
        attention + index + shared,
        3 * t.hidden_size * t.intermediate_size,
    )


def step_bytes(t: TextConfig, sequences: int, context: int, experts: float) -> float:
    """The fewest bytes of a decode step: each matrix and each key that is needed read once. experts: that a MoE layer
    reads, on average.
    """
    dense, moe, expert = layer_products(t)
    sparse = sum(t.sparse_layers)
    router = t.hidden_size * t.num_local_experts  # float32: two bytes more a number
    weights = (LAYERS - sparse) * dense + sparse * (moe + router + experts * expert) + t.hidden_size * t.vocab_size
    kv = 2 * t.num_key_value_heads * t.head_dim
    chosen = min(context, (t.topk_blocks - 0.5) * t.block_size)
    cache = (LAYERS - sparse) * context * kv + sparse * (chosen * kv + context * t.index_dim)
    return 2 * (weights + sequences * cache)


class Watched:
    """The model as the worker sees it, with the device's time and the number of spans of every step."""

    def __init__(self, model: M3Model) -> None:
        self.model, self.device = model, model.device
        self.steps: list[tuple[int, float, torch.cuda.Event, torch.cuda.Event]] = []

    def forward(self, spans: list[Any], pages: KVPages, logits: Any) -> list[Tensor]:
        began = time.perf_counter()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = self.model.forward(spans, pages, logits)
        end.record()
        self.steps.append((len(spans), began, begin, end))
        return out

    def device_ms(self) -> float:
        torch.cuda.synchronize()
        return sum(begin.elapsed_time(end) for _, _, begin, end in self.steps)

    def intervals(self, sequences: int) -> list[float]:
        """Milliseconds from the start of a step to that of the next, for steps of so many sequences."""
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return [1e3 * (b[1] - a[1]) for a, b in pairs if a[0] == b[0] == sequences]


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1000, 190_000), k=count)


async def first_token(sequence: Sequence) -> float:
    """Milliseconds from the call to its first token."""
    async with sequence.generate(Sampling(0.0, max_tokens=1, stop=frozenset())) as stream:
        async for _ in stream:
            pass
    return 1e3 * stream.usage.prefill_seconds


async def prefill(runtime: Runtime, t: TextConfig, rate: float) -> dict[str, Any]:
    times: list[float] = []
    for repeat in range(4):  # the first one compiles
        sequence = runtime.sequence()
        sequence.append(tokens(PREFILL, repeat))
        times.append(await first_token(sequence))
        sequence.close()
    ms = median(times[1:])
    reached = span_flops(t, 0, PREFILL) / ms / 1e9
    return {
        "tokens": PREFILL,
        "ms": ms,
        "tokens_s": PREFILL / ms * 1e3,
        "tflop_s": reached,
        "utilisation": reached / rate,
    }


async def turn(runtime: Runtime, watched: Watched) -> dict[str, Any]:
    base = runtime.sequence()
    base.append(tokens(CACHED, 100))
    await first_token(base)
    times: list[tuple[float, float]] = []
    for repeat in range(6):
        sequence = base.fork(CACHED)
        sequence.append(tokens(NEW, 200 + repeat))
        watched.steps.clear()
        whole = await first_token(sequence)
        times.append((whole, whole - watched.device_ms()))
        sequence.close()
    base.close()
    uncached = runtime.sequence()
    uncached.append(tokens(CACHED + NEW, 300))
    without = await first_token(uncached)
    uncached.close()
    ms, host = (median(column) for column in zip(*times[1:], strict=True))
    return {"cached": CACHED, "new": NEW, "ms": ms, "host_ms": host, "uncached_ms": without, "sooner": without / ms}


async def decode(runtime: Runtime, watched: Watched, t: TextConfig, count: int, bandwidth: float) -> dict[str, Any]:
    """All sequences go on together; a step takes as long as from its start to the next one's, the host's work in it."""
    sequences = [runtime.sequence() for _ in range(count)]
    for number, sequence in enumerate(sequences):
        sequence.append(tokens(DECODE_CONTEXT, 1000 + number))
        await first_token(sequence)

    async def go_on(sequence: Sequence, sampling: Sampling) -> None:
        async with sequence.generate(sampling) as stream:
            async for _ in stream:
                pass

    async def together(steps: int, greedy: bool) -> None:
        async with anyio.create_task_group() as group:
            for number, sequence in enumerate(sequences):
                how = {"temperature": 0.0} if greedy else {"temperature": 1.0, "top_k": 40, "seed": number}
                group.start_soon(go_on, sequence, Sampling(**how, max_tokens=steps, stop=frozenset()))

    touched = await experts_touched(watched.model, count, lambda: together(6, True))
    row: dict[str, Any] = {"sequences": count, "context": DECODE_CONTEXT, "experts": touched}
    bound = step_bytes(t, count, DECODE_CONTEXT + DECODE_STEPS / 2, touched) / bandwidth / 1e9
    row["bound_ms"] = bound
    for greedy in (True, False):
        await together(4, greedy)
        watched.steps.clear()
        await together(DECODE_STEPS, greedy)
        ms = median(watched.intervals(count))
        device = median([a.elapsed_time(b) for n, _, a, b in watched.steps if n == count])
        name = "greedy" if greedy else "sampled"
        row |= {f"{name}_ms": ms, f"{name}_device_ms": device, f"{name}_share": bound / ms}
        row[f"{name}_tokens_s"] = count / ms * 1e3
    for sequence in sequences:
        sequence.close()
    return row


async def experts_touched(model: M3Model, count: int, run: Any) -> float:
    """How many experts a MoE layer reads in a step of so many tokens, counted in steps that are not replayed."""
    seen: list[Tensor] = []
    whole = fused.routed_experts

    def watching(x: Tensor, chosen: Tensor, *rest: Any) -> Tensor:
        if x.shape[0] == count and not torch.cuda.is_current_stream_capturing():
            seen.append(chosen.clone())
        return whole(x, chosen, *rest)

    model._graphs = None  # so that the first step of this size runs kernel by kernel
    fused.routed_experts = watching
    try:
        await run()
    finally:
        fused.routed_experts = whole
    return sum(chosen.unique().numel() for chosen in seen) / len(seen)


async def measure(out: Path) -> None:
    ceiling = ceilings()
    config = slice_config()
    t = config.text
    began = time.perf_counter()
    model = M3Model(config, RandomTensors(config), dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    found: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, **ceiling}
    found["load_s"] = time.perf_counter() - began
    torch.cuda.empty_cache()
    tokenizer = Tokenizer.load(EMBEDDED)
    runtime = Runtime(
        model,
        tokenizer,
        pixels=None,
        defaults=Defaults(),
        chat_format=ChatFormat.load(EMBEDDED, tokenizer),
        cache_tokens=2 * CACHED + 32 * DECODE_CONTEXT + 65536,
    )
    async with runtime:
        sequence = runtime.sequence()
        sequence.append([1, 2, 3])
        await first_token(sequence)  # the worker has its `Steps` now
        sequence.close()
        watched = Watched(model)
        runtime.engine._steps.model = watched  # type: ignore[assignment]
        runtime.engine._steps.speculates = False  # random weights repeat themselves
        parts = {
            "prefill": lambda: prefill(runtime, t, ceiling["bf16_tflop_s"]),
            "turn": lambda: turn(runtime, watched),
            **{
                f"decode_{count}": lambda count=count: decode(runtime, watched, t, count, ceiling["copy_tb_s"])
                for count in SEQUENCES
            },
        }
        for name, part in parts.items():
            try:
                found[name] = await part()
            except Exception as error:  # the other figures are worth having
                found[name] = {"failed": repr(error)}
            print(name, json.dumps(found[name]), flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")


def plot(found: dict[str, Any], path: Path) -> None:
    """Each figure's operations over bytes against the rate reached, below the card's two ceilings."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    t = slice_config().text
    rate, bandwidth = found["bf16_tflop_s"], found["copy_tb_s"]
    dense, moe, expert = layer_products(t)
    sparse = sum(t.sparse_layers)
    everything = 2 * ((LAYERS - sparse) * dense + sparse * (moe + t.num_local_experts * expert))
    points: list[tuple[str, float, float, float]] = []  # name, operations, bytes, ms
    p, u = found["prefill"], found["turn"]
    points.append(("prefill 32k", span_flops(t, 0, PREFILL), everything * PREFILL / 8192, p["ms"]))
    points.append(("444 on 142k", span_flops(t, CACHED, NEW), everything + 2 * CACHED * 2 * 1024, u["ms"]))
    for count in SEQUENCES:
        d = found[f"decode_{count}"]
        done = count * span_flops(t, DECODE_CONTEXT, 1)
        size = step_bytes(t, count, DECODE_CONTEXT, d["experts"])
        points.append((f"decode {count}", done, size, d["greedy_ms"]))
    figure, axes = plt.subplots(figsize=(7, 4.5))
    intensities = [1, rate / bandwidth, 1e5]
    axes.loglog(intensities, [min(rate, i * bandwidth) for i in intensities], color="black")
    for name, done, size, ms in points:
        x, y = done / size, done / ms / 1e9
        axes.loglog(x, y, "o")
        axes.annotate(f"{name} ({y:.3g})", (x, y), xytext=(6, -10), textcoords="offset points", fontsize=8)
    axes.set(xlabel="operations a byte", ylabel="TFLOP/s reached", title=f"A slice of MiniMax-M3, {found['device']}")
    axes.grid(alpha=0.3, which="both")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "m3"
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="A slice of MiniMax-M3 at full width on one GPU.")
    parser.add_argument("--out", type=Path, default=RESULTS / "m3_slice.json")
    parser.add_argument("--plot", action="store_true", help="only draw docs/m3_slice.svg from the results")
    options = parser.parse_args()
    if not options.plot:
        require_gpu()
        anyio.run(measure, options.out)
    plot(json.loads(options.out.read_text()), PLOT)


if __name__ == "__main__":
    main()
