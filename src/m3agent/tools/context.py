"""`Context`: what a tool may know about the call that runs it."""

from __future__ import annotations

import threading


class Context:
    """Handed to every parameter that is annotated `m3agent.Context`; the model does not see that parameter.

    `tool` is the tool's name and `call_id` the id of the call in the session's messages.
    """

    def __init__(self, tool: str, call_id: str) -> None:
        self.tool = tool
        self.call_id = call_id
        self.abandoned = False  # a synchronous tool that did not return in time after a cancellation
        self._cancelled = threading.Event()

    @property
    def cancelled(self) -> bool:
        """True once the run is being cancelled. A synchronous tool that runs long should look at it and return."""
        return self._cancelled.is_set()

    def cancel(self) -> None:
        """Set `cancelled`; done for the tool when its run is cancelled."""
        self._cancelled.set()
