"""Test doubles for programs that use m3agent: models that say what a test wrote, or what a real one said before.

`scripted` takes the replies from the test; `record` keeps a real runtime's, and `replay` says them again without the
model. Both stand where a Runtime stands; the sessions, tools, streams and the chat format on top are the real ones.
"""

from m3agent.testing.replay import ReplayMismatch, record, replay
from m3agent.testing.scripted import ScriptedRuntime, ScriptError, scripted
from m3agent.testing.turns import Shown, Turn, call, raw

__all__ = [
    "ReplayMismatch",
    "ScriptError",
    "ScriptedRuntime",
    "Shown",
    "Turn",
    "call",
    "raw",
    "record",
    "replay",
    "scripted",
]
