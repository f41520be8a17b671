"""OpenTelemetry metrics of a runtime, where the program has set a meter provider up; it is not imported here.

Names follow the semantic conventions for generative AI where these have one; the cache's own begin with `m3agent`.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from m3agent.runtime.usage import Stats, Usage

if TYPE_CHECKING:
    from m3agent.runtime.request import Request

# https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, as of 1.37
DURATION, TOKENS = "gen_ai.client.operation.duration", "gen_ai.client.token.usage"
FIRST_TOKEN, PER_TOKEN = "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"


def _api() -> Any:
    """opentelemetry.metrics, if the program has set a provider up."""
    api = sys.modules.get("opentelemetry.metrics")
    if api is None or "Proxy" in type(api.get_meter_provider()).__name__:
        return None
    return api


class Metrics:
    """Of one runtime, called `model`. stats: is asked when the program's provider collects."""

    def __init__(self, model: str, stats: Callable[[], Stats | None]) -> None:
        self._attributes = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "m3agent"}
        self._attributes["gen_ai.request.model"] = model
        api = _api()
        self._on = api is not None
        if api is None:
            return
        meter = api.get_meter("m3agent")
        self._duration = meter.create_histogram(DURATION, "s", "From the call to its end")
        self._tokens = meter.create_histogram(TOKENS, "{token}", "Tokens of a call")
        self._first = meter.create_histogram(FIRST_TOKEN, "s", "From the call to its first token")
        self._each = meter.create_histogram(PER_TOKEN, "s", "From token to token behind the first")

        def observe(fields: dict[str, dict[str, str]]) -> Callable[[Any], Iterable[Any]]:
            def read(options: Any) -> Iterable[Any]:
                found = stats()
                for name, attributes in {} if found is None else fields.items():
                    yield api.Observation(getattr(found, name), attributes | {"gen_ai.request.model": model})

            return read

        meter.create_observable_up_down_counter(
            "m3agent.kv.pages", [observe(_of("state", "used_pages", "cached_pages", "host_pages"))], "{page}"
        )
        meter.create_observable_up_down_counter(
            "m3agent.requests", [observe(_of("state", "active_requests", "waiting_requests"))], "{request}"
        )
        told = _of("kind", "prompt_tokens", "reused_tokens", "computed_tokens", "recomputed_tokens", "output_tokens")
        told |= _of("kind", "drafted_tokens", "accepted_tokens", "found_tokens", "promoted_tokens")
        meter.create_observable_counter("m3agent.tokens", [observe(told)], "{token}")
        meter.create_observable_counter("m3agent.steps", [observe({"steps": {}})], "{step}")
        meter.create_observable_counter("m3agent.kv.evictions", [observe({"evicted_pages": {}})], "{page}")
        meter.create_observable_counter("m3agent.preemptions", [observe({"preemptions": {}})], "{request}")

    def ended(self, request: Request, finish: str, error: BaseException | None) -> None:
        """A call is over."""
        if not self._on:
            return
        usage: Usage = request.usage()
        attributes = dict(self._attributes)
        if finish in ("error", "cancelled"):
            attributes["error.type"] = "cancelled" if error is None else type(error).__name__
        self._duration.record(usage.seconds, attributes)
        for kind, tokens in (("input", usage.prompt_tokens), ("output", request.made)):
            self._tokens.record(tokens, attributes | {"gen_ai.token.type": kind})
        if request.made:
            self._first.record(usage.prefill_seconds, attributes)
        if request.made > 1:
            self._each.record(usage.decode_seconds / (request.made - 1), attributes)


def weak_stats(stats: Callable[[], Stats]) -> Callable[[], Stats | None]:
    """A runtime that is forgotten is observed no more. stats: a bound method."""
    found = weakref.WeakMethod(stats)

    def read() -> Stats | None:
        bound = found()
        return None if bound is None else bound()

    return read


def _of(key: str, *names: str) -> dict[str, dict[str, str]]:
    return {name: {key: name.rpartition("_")[0]} for name in names}
