"""`Context`: what a tool may know about the call that runs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Generic

import anyio
import anyio.lowlevel
from typing_extensions import TypeVar

Deps = TypeVar("Deps", default=Any)


class Context(Generic[Deps]):
    """Handed to every parameter that is annotated `m3agent.Context`; the model does not see that parameter.

    `tool` is the tool's name and `call_id` the id of the call in the session's messages; `deps` is what the run was
    given, `session` the running session, None outside one. `scope` holds this one call while it runs: cancelled, the
    call alone ends, and the model is told so.

    Annotated `Context[Shop]`, `deps` is a `Shop` for type checkers; when the tool runs, nothing is checked.
    """

    scope: anyio.CancelScope

    def __init__(
        self,
        tool: str,
        call_id: str,
        *,
        deps: Deps = None,
        session: Any = None,
        on_progress: Callable[[Any], None] | None = None,
    ) -> None:
        self.tool = tool
        self.call_id = call_id
        self.deps = deps
        self.session = session
        self.abandoned = False  # a synchronous tool that did not return in time after a cancellation
        self.spent: list[Any] = []  # the `Usage` of agents that ran inside the call; it counts for the run
        self._on_progress = on_progress
        self._cancelled = threading.Event()

    def report(self, value: Any) -> None:
        """Tell the run's readers how far the call is, from any thread."""
        if self._on_progress is not None:
            self._on_progress(value)

    async def progress(self, value: Any) -> None:
        """Tell the run's readers how far the call is."""
        self.report(value)
        await anyio.lowlevel.checkpoint()

    @property
    def cancelled(self) -> bool:
        """True once the run is being cancelled. A synchronous tool that runs long should look at it and return."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Set `cancelled`; done for the tool when its run is cancelled."""
        self._cancelled.set()
