"""Spans of runs, turns and calls, with the real SDK; and none, and no cost, where nobody set one up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as names

import m3agent as m3
from m3agent import tracing
from tests.agent.double import ScriptedRuntime, block, call, make_tokenizer

pytestmark = pytest.mark.anyio


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


@pytest.fixture
def runtime(tmp_path: Path) -> ScriptedRuntime:
    return ScriptedRuntime(make_tokenizer(tmp_path))


@m3.tool
def stock(sku: str) -> str:
    if sku == "X":
        raise m3.ToolError("no such article")
    with trace.get_tracer("shop").start_as_current_span("query"):
        return f"3 of {sku}"


def agent(runtime: ScriptedRuntime, *tools: m3.Tool[..., object], **options: object) -> m3.Agent:
    return m3.Agent(runtime, tools=tools, **options)


def parent(span: ReadableSpan, found: list[ReadableSpan]) -> str | None:
    return next((other.name for other in found if span.parent and other.context.span_id == span.parent.span_id), None)


def failures(spans: InMemorySpanExporter) -> list[tuple[str, Any]]:
    """The spans in the order of their ends, each with its `error.type`."""
    found = spans.get_finished_spans()
    for span in found:
        assert span.status.is_ok == ("error.type" not in (span.attributes or {})), span.name
    return [(span.name, (span.attributes or {}).get("error.type")) for span in found]


def finish(span: ReadableSpan) -> Any:
    return (span.attributes or {}).get(names.GEN_AI_RESPONSE_FINISH_REASONS)


async def test_a_run_its_turns_and_its_calls(runtime: ScriptedRuntime, spans: InMemorySpanExporter) -> None:
    runtime.says(block(call("stock", sku="A"), call("stock", sku="X")), "Three.")
    with trace.get_tracer("program").start_as_current_span("request"):
        reply = await agent(runtime, stock).run("How many?", sampling=m3.Sampling(0.5, max_tokens=500))
    found = list(spans.get_finished_spans())
    tree = sorted((span.name, parent(span, found)) for span in found)
    assert tree == [
        ("chat scripted", "invoke_agent"),
        ("chat scripted", "invoke_agent"),
        ("execute_tool stock", "invoke_agent"),
        ("execute_tool stock", "invoke_agent"),
        ("invoke_agent", "request"),
        ("query", "execute_tool stock"),
        ("request", None),
    ]
    by_name = {span.name: span for span in found}
    run = by_name["invoke_agent"].attributes
    assert run is not None
    assert run[names.GEN_AI_OPERATION_NAME] == "invoke_agent"
    assert run[names.GEN_AI_USAGE_OUTPUT_TOKENS] == reply.usage.output_tokens
    assert run[names.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS] == reply.usage.reused_tokens
    assert run[names.GEN_AI_RESPONSE_FINISH_REASONS] == ("end",)
    turns = [span.attributes for span in found if span.name == "chat scripted"]
    assert [turn and turn[names.GEN_AI_RESPONSE_FINISH_REASONS] for turn in turns] == [("tool_calls",), ("stop",)]
    assert turns[0]
    assert turns[0][names.GEN_AI_REQUEST_MAX_TOKENS] == 500
    calls = {
        span.attributes[names.GEN_AI_TOOL_CALL_ID]: span
        for span in found
        if span.name.startswith("execute") and span.attributes
    }
    assert calls["call_1"].status.is_ok
    assert not calls["call_2"].status.is_ok
    assert not any("How many" in str(span.attributes) or "3 of A" in str(span.attributes) for span in found)


async def test_content_is_there_when_it_is_asked_for(runtime: ScriptedRuntime, spans: InMemorySpanExporter) -> None:
    runtime.says(block(call("stock", sku="A")), "Three.")
    await agent(runtime, stock, trace_content=True).run("How many?")
    told = " ".join(str(span.attributes) for span in spans.get_finished_spans())
    assert '{"sku": "A"}' in told
    assert "3 of A" in told
    assert "Three." in told


async def test_runs_that_are_cancelled_dropped_or_closed_elsewhere_end_their_spans(
    runtime: ScriptedRuntime, spans: InMemorySpanExporter
) -> None:
    waiting = anyio.Event()

    @m3.tool
    async def wait() -> None:
        waiting.set()
        await anyio.sleep_forever()

    runtime.says(block(call("wait")), "a long answer", "another", "fine")
    async with anyio.create_task_group() as group:
        group.start_soon(agent(runtime, wait).run, "x")
        await waiting.wait()
        group.cancel_scope.cancel()
    assert failures(spans) == [
        ("chat scripted", None), ("execute_tool wait", "cancelled"), ("invoke_agent", "cancelled"),
    ]  # fmt: skip

    spans.clear()
    stream = agent(runtime).session().stream("x")
    await anext(stream)
    async with anyio.create_task_group() as group:  # read here, closed there
        group.start_soon(stream.aclose)
    assert failures(spans) == [("chat scripted", "cancelled"), ("invoke_agent", "cancelled")]

    spans.clear()
    stream = agent(runtime).session().stream("x")
    await anext(stream)
    del stream
    assert failures(spans) == [("chat scripted", "cancelled"), ("invoke_agent", "cancelled")]
    assert trace.get_current_span() is trace.INVALID_SPAN


class Broken(Exception):
    pass


def raises(*arguments: object) -> None:
    raise Broken("for a reason")


async def test_what_ends_a_turn_is_in_its_span_and_its_runs(
    runtime: ScriptedRuntime, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = runtime.fuse.point

    async def point() -> None:
        await real()
        if runtime.fuse.count == 5:
            raise m3.NumericalError("logits are not finite")

    monkeypatch.setattr(runtime.fuse, "point", point)
    with pytest.raises(m3.NumericalError):
        await agent(runtime.says("one two")).run("x")
    assert failures(spans) == [("chat scripted", "NumericalError"), ("invoke_agent", "NumericalError")]
    assert [finish(span) for span in spans.get_finished_spans()] == [("error",), None]


@pytest.mark.parametrize(
    ("hooks", "on_event", "found"),
    [
        ({"before_model": raises}, None, []),
        ({"after_model": raises}, None, [("chat scripted", None)]),
        ({"before_tool": raises}, None, [("chat scripted", None), ("execute_tool stock", "Broken")]),
        ({"after_tool": raises}, None, [("chat scripted", None), ("execute_tool stock", "Broken")]),
        ({}, raises, [("chat scripted", "Broken")]),
    ],
    ids=["before_model", "after_model", "before_tool", "after_tool", "on_event"],
)
async def test_hooks_that_fail_are_no_cancellation(
    runtime: ScriptedRuntime, spans: InMemorySpanExporter, hooks: Any, on_event: Any, found: list[Any]
) -> None:
    runtime.says(block(call("stock", sku="A")), "Three.")
    with pytest.raises(Broken):
        await agent(runtime, stock, hooks=m3.Hooks(**hooks)).run("x", on_event=on_event)
    told = [pair for pair in failures(spans) if pair[0] != "query"]
    assert told == [*found, ("invoke_agent", "Broken")]


async def test_a_turn_that_a_time_limit_cuts(runtime: ScriptedRuntime, spans: InMemorySpanExporter) -> None:
    real = runtime.fuse.point

    async def point() -> None:
        await real()
        if runtime.fuse.count > 5:
            await anyio.sleep_forever()

    runtime.fuse.point = point  # pyright: ignore
    reply = await agent(runtime.says("one two")).run("x", max_seconds=0.2)
    assert reply.stop == "seconds"
    assert failures(spans) == [("chat scripted", "timeout"), ("invoke_agent", None)]
    assert [finish(span) for span in spans.get_finished_spans()] == [("timeout",), ("seconds",)]


async def test_nobody_looks(runtime: ScriptedRuntime) -> None:
    assert tracing.start_run("x") is None
    runtime.says("ok")
    assert (await agent(runtime).run("x")).text == "ok"


def test_opentelemetry_is_not_imported() -> None:
    code = "import sys, m3agent; m3agent.Agent; print([m for m in sys.modules if m.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_the_names_are_those_of_the_conventions() -> None:
    pinned = [value for value in vars(tracing).values() if isinstance(value, str) and value.startswith("gen_ai.")]
    known = [value for value in vars(names).values() if isinstance(value, str)]
    assert len(pinned) >= 14
    assert set(pinned) <= set(known)
