"""What guided decoding costs m3-nano on a CPU: `python -m benchmarks.guide_cost`.

Tokens/s of one stream, greedy, after a prompt with a tool: free text, inside a call, and inside a typed answer, each
with the guide and without. Guided and not in turn, the median of each. Both write the same number of tokens. Also the
time to compile the grammars of some tools: first of all (llguidance and the vocabulary included), again, and with one
tool more. Writes benchmarks/results/guide_cost.json.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import anyio

from m3agent.chat import markers
from m3agent.runtime import Guide, Runtime, Sampling, Sequence
from m3agent.tools import shell, tool, workspace

RESULTS = Path(__file__).parent / "results" / "guide_cost.json"
TOKENS, PROMPT, REPEATS = 256, 400, 9
BAR = 0.05


@tool
def note(text: str, tags: list[str] | None = None) -> str:
    """Keep a note."""
    return text


async def speed(sequence: Sequence, guide: Guide | None) -> float:
    """Tokens/s of TOKENS tokens on a fork; a guide that would let the turn end is kept from it by `stop`."""
    fork = sequence.fork()
    try:
        async with fork.generate(Sampling(0.0, max_tokens=TOKENS, stop=frozenset()), guide) as stream:
            async for _ in stream:
                pass
        return stream.usage.tokens_per_second
    finally:
        fork.close()


async def measure() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async with Runtime.open() as runtime:
        definitions = [each.definition for each in [*workspace("."), *shell(".")]]
        seconds: list[float] = []
        for tools in (definitions, definitions, [*definitions, note.definition]):
            began = time.perf_counter()
            runtime.guides.turn(tools, "disabled")
            seconds.append(time.perf_counter() - began)
        rows.append(
            {"where": f"{len(definitions)} tools", **dict(zip(("first", "again", "other"), seconds, strict=True))}
        )
        tokenizer, tools = runtime.tokenizer, [note.definition]
        ns = tokenizer.control_id(markers.NS)
        opened = f'<invoke name="note">{markers.NS}<text>'

        def in_a_call() -> Guide | None:
            guide = runtime.guides.turn(tools, "disabled")
            assert guide is not None
            for token in [ns, tokenizer.control_id(markers.TOOL_CALL), *tokenizer.encode("\n"), ns]:
                guide.accept(token)
            for token in [*tokenizer.encode(opened.split(markers.NS)[0]), ns, *tokenizer.encode("<text>")]:
                guide.accept(token)
            return guide

        def in_an_answer() -> Guide | None:
            return runtime.guides.turn(
                [], "disabled", {"type": "array", "items": {"type": "integer"}, "minItems": TOKENS}
            )

        def in_text() -> Guide | None:
            return runtime.guides.turn(tools, "disabled")

        places: list[tuple[str, Callable[[], Guide | None]]] = [
            ("free text", in_text), ("a string in a call", in_a_call), ("a typed answer", in_an_answer),
        ]  # fmt: skip
        sequence = runtime.sequence()
        sequence.append(tokenizer.encode("The quick brown fox. " * PROMPT)[:PROMPT])
        await sequence.logits()
        for name, make in places:
            with_guide, without = [], []
            for _ in range(REPEATS):
                without.append(await speed(sequence, None))
                with_guide.append(await speed(sequence, make()))
            free, guided = median(without), median(with_guide)
            rows.append({"where": name, "free": free, "guided": guided, "cost": 1 - guided / free})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    rows = anyio.run(measure)
    for row in rows:
        if "cost" in row:
            print(
                f"{row['where']:20} {row['free']:7.1f} → {row['guided']:7.1f} tokens/s: "
                f"{row['cost']:+.1%} (≤ {BAR:.0%})"
            )
        else:
            print(
                f"{row['where']:20} first guide of the process {row['first'] * 1000:.0f} ms, again "
                f"{row['again'] * 1e6:.0f} µs, other tools {row['other'] * 1000:.1f} ms"
            )
    arguments.out.write_text(json.dumps({"tokens": TOKENS, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
