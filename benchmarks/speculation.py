"""What drafts are worth: `python -m benchmarks.speculation`.

The embedded m3-nano, on the CPU, decodes each text with drafts and without, in turns. It is held to the text (a guide
allows the next token of it and no other), so that both do the same work and what is measured is the engine: the guide
costs both the same. Texts: a file of 200 lines that is written again with a few edits; the same with every fifth line
changed; tokens by chance, without repetition; prose; and what the model says by itself, sampled. Prints a table and
writes benchmarks/results/speculation.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
from pathlib import Path
from statistics import median
from typing import Any

import anyio
import numpy as np
from numpy.typing import NDArray

from m3agent.runtime import Runtime, Sampling

RESULTS = Path(__file__).parent / "results" / "speculation.json"
SOURCE = Path(__file__).parent.parent / "src" / "m3agent" / "runtime"


class Written:
    """A guide: this text and nothing else."""

    def __init__(self, tokens: list[int], vocabulary: int) -> None:
        self._tokens, self._place = tokens, 0
        self._allowed = np.zeros(vocabulary, np.bool_)

    def allowed(self) -> NDArray[np.bool_]:
        self._allowed[:] = False
        self._allowed[self._tokens[self._place]] = True
        return self._allowed

    def accept(self, token: int) -> None:
        self._place += 1


def edited(lines: list[str], every: int, seed: int) -> str:
    """The lines again, one of `every` of them changed: a word replaced, a line inserted, or the line left out."""
    luck = random.Random(seed)
    found: list[str] = []
    for number, line in enumerate(lines):
        if number % every != every // 2:
            found.append(line)
            continue
        match luck.randrange(3):
            case 0:
                words = line.split(" ")
                words[luck.randrange(len(words))] = f"changed_{number}"
                found.append(" ".join(words))
            case 1:
                found += [line, f"        note = {luck.randrange(10**6)}  # line {number}"]
            case _:
                pass
    return "\n".join(found)


def texts(runtime: Runtime, tokens: int) -> dict[str, tuple[list[int], list[int] | None]]:
    """Name → the prompt, and what is said after it; None: what the model says by itself."""
    encode = runtime.tokenizer.encode
    source = (SOURCE / "sequence.py").read_text().split("\n")[:200]
    few, many = edited(source, 40, 1), edited(source, 5, 2)
    prose = " ".join(
        line.strip() for name in ("runtime.md", "agent.md") for line in (SOURCE.parents[2] / "docs" / name).open()
    )
    luck = random.Random(3)
    file = encode("\n".join(source))
    return {
        "a file of 200 lines again, 5 edits": (file, encode(few)),
        "a file of 200 lines again, 40 edits": (file, encode(many)),
        "prose": (encode(prose)[:512], encode(prose)[512 : 512 + tokens]),
        "tokens by chance": (luck.choices(range(256), k=512), luck.choices(range(256), k=tokens)),
        "the model by itself": (encode(prose)[:512], None),
    }


async def decode(runtime: Runtime, prompt: list[int], text: list[int] | None, tokens: int) -> tuple[float, Any]:
    """Tokens/s of one answer, and its usage."""
    sequence = runtime.sequence()
    sequence.append(prompt)
    count = tokens if text is None else len(text)
    sampling = Sampling(temperature=1.0, seed=7, max_tokens=count, stop=frozenset())
    guide = None if text is None else Written(text, runtime.vocabulary)
    async with sequence.generate(sampling, guide) as stream:
        async for _ in stream:
            pass
    sequence.close()
    return stream.usage.tokens_per_second, stream.usage


async def main(repeats: int, tokens: int) -> None:
    rows: list[dict[str, Any]] = []
    async with await Runtime.open(device="cpu") as with_drafts, await Runtime.open(device="cpu") as without:
        without.engine._steps.speculates = False  # pyright: ignore[reportPrivateUsage]
        for name, (prompt, text) in texts(with_drafts, tokens).items():
            fast: list[float] = []
            plain: list[float] = []
            usage: Any = None
            for _ in range(repeats + 1):  # the first one warms up
                speed, usage = await decode(with_drafts, prompt, text, tokens)
                fast.append(speed)
                plain.append((await decode(without, prompt, text, tokens))[0])
            rows.append(
                {
                    "text": name,
                    "tokens": usage.output_tokens,
                    "drafted": usage.drafted_tokens,
                    "accepted": usage.accepted_tokens,
                    "tokens/s": median(fast[1:]),
                    "without": median(plain[1:]),
                    "ratio": median(a / b for a, b in zip(fast[1:], plain[1:], strict=True)),
                }
            )
            row = rows[-1]
            print(
                f"{name:38} {row['tokens']:5} tokens  drafted {row['drafted']:5}  accepted {row['accepted']:5}"
                f"  {row['tokens/s']:6.0f} tokens/s  without {row['without']:6.0f}  × {row['ratio']:.2f}"
            )
    machine = platform.processor() or platform.machine()
    RESULTS.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=600, help="of the texts that have no length of their own")
    options = parser.parse_args()
    anyio.run(main, options.repeats, options.tokens)
