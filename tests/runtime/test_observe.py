"""What a runtime tells of itself: sums, rates, sequences, metrics, and to other processes."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from m3agent.cli.app import app
from m3agent.errors import CacheError
from m3agent.model import KVPages, M3Model, Span
from m3agent.model.flops import span_flops
from m3agent.runtime import Runtime, Sampling, Sequence
from m3agent.runtime.meter import Meter, Rates, StepTime
from m3agent.runtime.monitor import folder, reports
from m3agent.runtime.runtime import Opening
from tests.runtime.test_engine import Gate
from tests.runtime.tiny import TEXT, watch

pytestmark = pytest.mark.anyio
Open = Callable[..., Opening]
GREEDY = Sampling(0.0, max_tokens=4, stop=frozenset())


async def said(sequence: Sequence) -> None:
    async with sequence.generate(GREEDY) as stream:
        async for _ in stream:
            pass


async def test_sums_of_prompts_and_of_what_was_found(opening: Open) -> None:
    async with opening() as runtime:
        for _ in range(2):
            sequence = runtime.sequence()
            sequence.append(list(range(40)))
            await said(sequence)
        stats = runtime.stats()
        assert stats.prompt_tokens == 80
        assert stats.reused_tokens == stats.found_tokens == 39
        assert stats.hit_rate == 39 / 80
        assert (await runtime_rates(runtime)).output_tokens_per_second > 0


async def runtime_rates(runtime: Runtime) -> Rates:
    await anyio.sleep(0.001)
    return runtime.rates()


def test_rates_are_over_the_time_of_recent_steps() -> None:
    meter = Meter()
    assert meter.rates(100.0) == Rates()
    meter.learn(StepTime(80.0, 1.0, 1000, 1000, 10**12))  # too old
    for n in range(4):
        meter.learn(StepTime(95.0 + n, 0.5, 100, 2, 10**9))
    rates = meter.rates(99.0)
    assert rates == Rates(4.0, 200.0, 2e9, 0.5, 0.5)


async def test_sequences_and_their_parts_of_the_cache(opening: Open) -> None:
    async with opening() as runtime:
        first = runtime.sequence()
        first.name = "alice"
        first.append(list(range(20)))
        await said(first)
        second = first.fork()
        second.name = "bob"
        gate = Gate()
        watch(runtime, gate)
        second.append([1, 2, 3])
        async with second.generate(GREEDY) as stream:
            await gate.reached()
            rows = {each.name: each for each in runtime.sequences()}
            assert rows["bob"].state == "running"
            assert rows["alice"].state == "idle"
            assert rows["alice"].cached == 23
            assert rows["alice"].pages == 3
            assert rows["alice"].shared == 3
            assert rows["bob"].tokens == 27
            gate.open.release(99)
            async for _ in stream:
                pass
        first.close()
        assert [each.name for each in runtime.sequences()] == ["bob"]


def counted(model: M3Model, tokens: int) -> int:
    """What torch counts for so many first tokens: the products, without its fused attention."""
    pages = KVPages.allocate(model.config, 3, model.dtype, model.device)
    with FlopCounterMode(display=False) as counter:
        model.forward([Span(torch.randint(0, 250, (tokens,)), 0, torch.arange(3))], pages)
    return counter.get_total_flops()


@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (0, 40), (24, 8), (100, 1), (60, 33), (20, 10)])
def test_operations_are_those_that_torch_counts_and_those_of_attention(model: M3Model, start: int, tokens: int) -> None:
    each = counted(model, 20) - counted(model, 19)
    head = counted(model, 20) - 20 * each
    expected = head + tokens * each
    for position in range(start, start + tokens):
        for sparse in TEXT.sparse_layers:
            read = min(position + 1, TEXT.topk_blocks * TEXT.block_size) if sparse else position + 1
            expected += 4 * read * TEXT.num_attention_heads * TEXT.head_dim
            expected += 2 * (position + 1) * TEXT.index_heads * TEXT.index_dim * sparse
    assert span_flops(TEXT, start, tokens) == pytest.approx(expected, rel=0.01)


async def test_metrics_of_calls_and_of_the_cache(opening: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    monkeypatch.setattr(metrics, "get_meter", provider.get_meter)
    async with opening() as runtime:
        for _ in range(3):
            sequence = runtime.sequence()
            sequence.append(list(range(30)))
            await said(sequence)
        sequence.append([255] * 3000)
        with pytest.raises(Exception, match="longer than"):
            await said(sequence)
        found = collected(reader)
        assert found["gen_ai.client.token.usage"][("input", None)].sum == 90
        assert found["gen_ai.client.token.usage"][("output", None)].sum == 12
        assert found["gen_ai.client.operation.duration"][(None, None)].count == 3
        assert found["gen_ai.client.operation.duration"][(None, "ContextOverflow")].count == 1
        assert found["gen_ai.server.time_to_first_token"][(None, None)].count == 3
        assert found["gen_ai.server.time_per_output_token"][(None, None)].count == 3
        assert found["m3agent.kv.pages"][("used", None)].value == runtime.stats().used_pages
        assert found["m3agent.tokens"][("output", None)].value == 12
        assert found["m3agent.steps"][(None, None)].value == runtime.stats().steps
    del runtime, sequence
    collected(reader)  # of a runtime that is gone, nothing is told, and nothing fails


def collected(reader: InMemoryMetricReader) -> dict[str, dict[tuple[Any, Any], Any]]:
    data: Any = reader.get_metrics_data()
    found: dict[str, dict[tuple[Any, Any], Any]] = {}
    for metric in data.resource_metrics[0].scope_metrics[0].metrics:
        for point in metric.data.data_points:
            kind = next(
                (point.attributes[k] for k in ("gen_ai.token.type", "state", "kind") if k in point.attributes), None
            )
            found.setdefault(metric.name, {})[kind, point.attributes.get("error.type")] = point
    return found


async def test_another_process_sees_a_runtime_with_a_monitor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    assert list(reports()) == []
    shown = await anyio.to_thread.run_sync(CliRunner().invoke, app, ["top", "--once"])
    assert "No runtime is open with a monitor" in shown.output
    async with Runtime.open(checkpoint, cache_tokens=1024, monitor=True) as runtime:
        sequence = runtime.sequence()
        sequence.name = "alice [1]"
        sequence.append(list(range(40)))
        await said(sequence)
        assert stat.S_IMODE(folder().stat().st_mode) == 0o700
        program = [sys.executable, "-c", "from m3agent.cli import main; main()", "top", "--json"]
        done = await anyio.run_process(program, env=dict(os.environ), stderr=subprocess.PIPE)
        (report,) = json.loads(done.stdout)
        assert report["pid"] == os.getpid()
        assert report["stats"]["output_tokens"] == 4
        assert report["sequences"][0]["name"] == "alice [1]"
        shown = await anyio.to_thread.run_sync(CliRunner().invoke, app, ["top", "--once"])
        assert "alice [1]" in shown.output
        assert "idle" in shown.output
    assert list(reports()) == []
    (tmp_path / "m3agent" / "1-0.sock").touch()  # no socket
    assert list(reports()) == []


async def test_a_dead_process_leaves_nothing_for_long(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    program = (
        "import anyio, os, sys, m3agent as m3\n"
        "async def main():\n"
        "    await m3.Runtime.open(sys.argv[1], cache_tokens=64, monitor=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "anyio.run(main)\n"
    )
    await anyio.run_process([sys.executable, "-c", program, str(checkpoint)], check=False)
    assert len(list(folder().glob("*.sock"))) == 1
    assert list(reports()) == []
    assert list(folder().glob("*.sock")) == []


async def test_a_folder_that_others_may_enter_holds_no_monitor(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder().mkdir()
    folder().chmod(0o755)
    with pytest.raises(CacheError, match="others may enter"):
        await Runtime.open(checkpoint, cache_tokens=64, monitor=True)
