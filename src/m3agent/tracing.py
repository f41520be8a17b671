"""OpenTelemetry spans of runs, model turns and tool calls, by the GenAI semantic conventions.

OpenTelemetry is not imported here: a program that wants spans has imported and set it up itself, and where it has not,
every function returns at once. Parents are passed on explicitly, so that a stream may be read and closed by different
tasks; only a tool's own task, in which nothing else runs, has its span as the current one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from m3agent.content import Message, ToolCall, ToolResult
    from m3agent.runtime import Sampling, Usage

# Of the semantic conventions, https://opentelemetry.io/docs/specs/semconv/gen-ai/, pinned here as they are in 1.37.
OPERATION, PROVIDER, MODEL = "gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model"
MAX_TOKENS, TEMPERATURE, TOP_P = "gen_ai.request.max_tokens", "gen_ai.request.temperature", "gen_ai.request.top_p"
FINISH = "gen_ai.response.finish_reasons"
INPUT_TOKENS, OUTPUT_TOKENS = "gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens"
CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
TOOL, CALL_ID, TOOL_TYPE = "gen_ai.tool.name", "gen_ai.tool.call.id", "gen_ai.tool.type"
ARGUMENTS, RESULT = "gen_ai.tool.call.arguments", "gen_ai.tool.call.result"
OUTPUT_MESSAGES = "gen_ai.output.messages"
ERROR = "error.type"
CANCELLED, TIMEOUT = "cancelled", "timeout"  # values of it, beside names of exceptions

Span = Any
"""A span of OpenTelemetry, or None where nobody looks."""


def _api() -> Any:
    """opentelemetry.trace, if the program has set a provider up."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None or type(api.get_tracer_provider()).__name__ == "ProxyTracerProvider":
        return None
    return api


def failure_of(error: BaseException | None) -> str:
    """`error.type` of what ended with this exception; None for a cancellation, whose class is the event loop's."""
    return CANCELLED if error is None or isinstance(error, GeneratorExit) else type(error).__name__


def start_run(model: str) -> Span:
    """The span of a run, a child of what is current now."""
    api = _api()
    if api is None:
        return None
    attributes = {OPERATION: "invoke_agent", PROVIDER: "m3agent", MODEL: model}
    return api.get_tracer("m3agent").start_span("invoke_agent", attributes=attributes)


def end_run(span: Span, usage: Usage, stop: str | None, failure: str = CANCELLED) -> None:
    """stop: why it ended; None for a run that was cancelled or failed, which `failure` says."""
    if span is not None:
        _use(span, usage)
        if stop is None:
            _failed(span, failure)
        else:
            span.set_attribute(FINISH, [stop])
        span.end()


def start_turn(run: Span, model: str, sampling: Sampling) -> Span:
    """The span of one turn of the model."""
    if run is None:
        return None
    attributes: dict[str, Any] = {OPERATION: "chat", PROVIDER: "m3agent", MODEL: model}
    attributes |= {TEMPERATURE: sampling.temperature, TOP_P: sampling.top_p}
    if sampling.max_tokens is not None:
        attributes[MAX_TOKENS] = sampling.max_tokens
    return _child(run, f"chat {model}", attributes)


def end_turn(span: Span, usage: Usage, finish: str | None, message: Message, content: bool, failure: str) -> None:
    """finish: as the runtime says it; None for a turn that was left, of which `failure` says why."""
    if span is not None:
        _use(span, usage)
        if finish is None:
            _failed(span, failure)
            span.set_attribute(FINISH, [failure if failure in (CANCELLED, TIMEOUT) else "error"])
        else:
            span.set_attribute(FINISH, ["tool_calls" if message.calls else finish])
        if content:
            parts: list[dict[str, Any]] = [{"type": "text", "content": message.text}] if message.text else []
            parts += [
                {"type": "tool_call", "id": call.id, "name": call.name, "arguments": call.arguments}
                for call in message.calls
            ]
            span.set_attribute(OUTPUT_MESSAGES, json.dumps([{"role": "assistant", "parts": parts}]))
        span.end()


class ToolSpan:
    """Filled in while a call runs."""

    def __init__(self, span: Span, content: bool) -> None:
        self._span, self._content = span, content

    def result(self, result: ToolResult) -> None:
        if self._span is not None:
            if self._content:
                self._span.set_attribute(RESULT, result.text)
            if result.error:
                _failed(self._span, "tool_error")


@contextmanager
def tool(run: Span, call: ToolCall, content: bool) -> Generator[ToolSpan]:
    """The span of a call, current inside; for the task in which the tool runs, from its beginning to its end."""
    if run is None:
        yield ToolSpan(None, content)
        return
    attributes = {OPERATION: "execute_tool", TOOL: call.name, CALL_ID: call.id, TOOL_TYPE: "function"}
    if content:
        attributes[ARGUMENTS] = json.dumps(call.arguments)
    span = _child(run, f"execute_tool {call.name}", attributes)
    api = sys.modules["opentelemetry.trace"]
    try:
        with api.use_span(span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
            yield ToolSpan(span, content)
    except BaseException as error:
        _failed(span, failure_of(None if isinstance(error, anyio.get_cancelled_exc_class()) else error))
        raise
    finally:
        span.end()


def _child(parent: Span, name: str, attributes: dict[str, Any]) -> Span:
    api = sys.modules["opentelemetry.trace"]
    context = api.set_span_in_context(parent)
    return api.get_tracer("m3agent").start_span(name, context=context, attributes=attributes)


def _use(span: Span, usage: Usage) -> None:
    span.set_attribute(INPUT_TOKENS, usage.prompt_tokens)
    span.set_attribute(OUTPUT_TOKENS, usage.output_tokens)
    span.set_attribute(CACHED_TOKENS, usage.reused_tokens)


def _failed(span: Span, kind: str) -> None:
    status = sys.modules["opentelemetry.trace"].StatusCode.ERROR
    span.set_attribute(ERROR, kind)
    span.set_status(status, kind)
