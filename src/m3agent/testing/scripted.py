"""`scripted`: a model that says what a test wrote."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from m3agent.errors import M3Error
from m3agent.testing.double import DoubleRuntime, parts_of
from m3agent.testing.turns import Reply, Shown, shown, turn_of

if TYPE_CHECKING:
    from m3agent.runtime import Sampling

Script = Iterable[Reply | Callable[[list[Shown]], Reply]] | Callable[[list[Shown]], Reply]
"""Replies, one a turn, over all sessions of the runtime; or functions from what the model is shown to a reply."""


class ScriptError(M3Error):
    """The script of a test and what happened do not fit together."""


@dataclass
class ScriptedRuntime(DoubleRuntime):
    """Made by `scripted`; stands where a Runtime stands: `Agent(runtime, tools=[…])`."""

    replies: list[Any] = field(default_factory=list[Any])
    always: Callable[[list[Shown]], Reply] | None = None

    @property
    def conversations(self) -> list[list[Shown]]:
        """What the model was shown, once for every turn."""
        return [shown(prompt, self.tokenizer) for prompt in self.prompts]

    def reply(self, log: list[int], sampling: Sampling) -> list[int]:
        if not self.replies and self.always is None:
            last = (shown(log, self.tokenizer) or [Shown("nobody", "")])[-1]
            raise ScriptError(
                f"the script is over after {len(self.prompts) - 1} turns, and the model was asked for another one; "
                f"it was last shown ({last.role}): {last.text[-300:]!r}"
            )
        reply: Any = self.replies.pop(0) if self.replies else self.always
        if callable(reply):
            reply = cast(Any, reply(shown(log, self.tokenizer)))
        return turn_of(reply).ids(self.tokenizer)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        if self.replies and error is None:
            raise ScriptError(f"{len(self.replies)} replies of the script were not asked for: {self.replies!r:.500}")


def scripted(script: Script, *, model: str | Path | None = None, thinking: str = "disabled") -> ScriptedRuntime:
    """A runtime whose model says `script`; use it as `async with scripted([…]) as runtime:`.

    script: one reply a turn, over all sessions: a text, `call("stock", sku="A1")`, several calls, a `Turn`, `raw(…)`,
    or a function that is given the conversation so far (a list of `Shown`) and returns one of these. A function alone
    answers every turn. Leaving the block raises ScriptError when replies are left; a turn too many raises it, too.
    model: whose tokenizer, chat format and picture sizes to use, by default those of the embedded m3-nano; no weights
    are read. thinking: the mode of sessions whose agent does not say.
    """
    parts: dict[str, Any] = parts_of(model)
    parts["defaults"] = replace(parts["defaults"], thinking_mode=thinking)
    if callable(script):
        return ScriptedRuntime(**parts, always=script)
    return ScriptedRuntime(**parts, replies=list(script))
