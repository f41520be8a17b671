"""The benchmark's own half runs on the tiny model, and its table names what it compared."""

from pathlib import Path

import anyio

from benchmarks.nano_cpu import Plan, Result, measure_m3agent, table


def test_the_benchmark_measures_and_reports(checkpoint: Path) -> None:
    ours = anyio.run(measure_m3agent, Plan(str(checkpoint), prompt=300, decode=8, repeats=1))
    assert min(ours.prefill, ours.decode, ours.later_turn, ours.later_turn_uncached, ours.peak_memory) > 0
    theirs = Result(100.0, 10.0, 0.5, 5.0, 900.0)
    report = {
        "prompt_tokens": 300,
        "m3agent": vars(ours),
        "transformers": vars(theirs),
        "ratios": {"decode": 3.25, "prefill": 1.5, "later turn": 20.0},
        "machine": {"processor": "a processor", "cores": 2, "torch": "2"},
    }
    text = table(report)
    assert "decode: 3.2x (bar 3x)" in text
    assert f"{ours.decode:.1f}" in text
    assert "5000.0  ms" in text
