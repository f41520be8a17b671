"""`ToolOptions`: how a tool's calls run, the same for `@tool` and `Tool.from_schema`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, cast

from m3agent.errors import ToolDefinitionError


class ToolOptions(TypedDict, total=False):
    """Options of a tool.

    needs_approval: True, or a function (plain or async) of the validated arguments that says so: such a call runs only
        when the program has approved it.
    timeout: seconds that one call may take, retries included; then it is cancelled, and the model is told. None (as
        without it) sets no limit.
    retries: how often a call is tried again when it raises one of `retry_on`, with a growing pause between.
    retry_on: the exceptions that are worth another try; all others are not retried.
    max_result: characters of text at most that the model is shown of a result; of a longer one it sees the beginning
        and the end. `session.full_result(call_id)` has it whole, and so has the model's tool of `tools.results()`.
    """

    needs_approval: bool | Callable[..., Any]
    timeout: float | None
    retries: int
    retry_on: tuple[type[Exception], ...]
    max_result: int | None


def check_options(tool: str, options: ToolOptions) -> ToolOptions:
    """Raises ToolDefinitionError for an option that does not exist, or a value that makes no sense."""
    for name in options:
        if name not in ToolOptions.__annotations__:
            known = ", ".join(ToolOptions.__annotations__)
            raise ToolDefinitionError(f"tool {tool!r}: there is no option {name!r}; there are: {known}")
    timeout, retries = options.get("timeout"), options.get("retries", 0)
    if timeout is not None and not timeout > 0:
        raise ToolDefinitionError(f"tool {tool!r}: timeout is {timeout}; it has to be more than 0 seconds")
    if retries < 0:
        raise ToolDefinitionError(f"tool {tool!r}: retries is {retries}; it has to be 0 or more")
    kinds: Any = options.get("retry_on", ())
    if not isinstance(kinds, tuple) or not all(map(_is_exception, cast("tuple[Any, ...]", kinds))):
        raise ToolDefinitionError(f"tool {tool!r}: retry_on is a tuple of exception classes, not {kinds!r}")
    if (retries > 0) != (kinds != ()):
        raise ToolDefinitionError(
            f"tool {tool!r}: retries and retry_on belong together: retries=2, retry_on=(OSError,)"
        )
    most = options.get("max_result")
    if most is not None and most < 200:
        raise ToolDefinitionError(f"tool {tool!r}: max_result is {most}; it has to be 200 characters or more")
    return options


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)
