"""`make_room`: a session's messages and its log are shortened together, by the rule of a `Compaction`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio.to_thread

from m3agent import chat
from m3agent.chat import ChatMessage
from m3agent.compaction import Compaction, place_after, recent_from, without_old_results, without_old_turns
from m3agent.events import Compacted
from m3agent.history import History
from m3agent.rebuild import Rebuilt, rebuild
from m3agent.token_log import TokenLog, whole

if TYPE_CHECKING:
    from m3agent.runtime import Usage

SUMMARY = 1024  # tokens at most, and an eighth of the context
_ASK = (
    "The conversation is getting too long. Write down, for yourself, what matters of your work so far: what was found "
    "and decided, what was changed, what is left to do. Names, numbers and paths exactly. Nothing else."
)


async def make_room(
    history: History, rule: Compaction, target: float, spend: Callable[[Usage], None]
) -> Compacted | None:
    """Shorten until the log takes `target` of the context or nothing more may go; None when nothing could. spend: told
    what a summary took, whatever becomes of it.

    Between turns only. Raises RuntimeClosed, MediaError, ConversationError; then nothing has changed, and the same
    holds when it is cancelled.
    """
    log, before = history.log, history.logged
    if log is None or not before:
        return None
    began, rest = len(log), history.messages[len(before) :]
    recent = recent_from(before, rule.keep_turns)
    if history.hanging:
        recent = min(recent, len(before) - 1)  # the last turn stays with what hangs on it
    after, notes = without_old_results(before, recent)
    built = await anyio.to_thread.run_sync(rebuild, history, log, before, after)
    usage, summarised, run_began = _no_usage(), 0, history.began
    turns = sum(message.role == "assistant" for message in before[:recent])
    if rule.summarise and turns and len(built.tokens) > target * history.runtime.context_length:
        summary, usage = await _summary(history, log, built, spend)
        shorter = without_old_turns(after, recent, summary)
        rebuilt = await anyio.to_thread.run_sync(rebuild, history, log, before, shorter)
        if len(rebuilt.tokens) < len(built.tokens):
            run_began = place_after(run_began, after, shorter, recent)
            after, built, summarised = shorter, rebuilt, turns
    if len(built.tokens) >= began:
        return None
    sequence = built.sequence(log.sequence)
    # Nothing below waits: log and messages change together.
    history.become(TokenLog(sequence, history.runtime.tokenizer, built.starts), [*after, *rest])
    history.began = run_began
    return Compacted(began, len(built.tokens), notes, summarised, usage)


async def _summary(
    history: History, log: TokenLog, built: Rebuilt, spend: Callable[[Usage], None]
) -> tuple[str, Usage]:
    """What the model makes of its past, on a fork; "" where there is no room to ask."""
    runtime = history.runtime
    # A turn that is still open, or waits for results, cannot be followed by a question.
    end = whole(built.tokens, runtime.tokenizer, built.starts[-1]) if history.hanging else None
    fork = built.sequence(log.sequence, end)
    try:
        segments = runtime.chat_format.render_next([ChatMessage("user", [_ASK])], "disabled")
        prompt = chat.encode(segments, runtime.tokenizer)
        most = min(SUMMARY, runtime.context_length // 8)
        most = min(most, runtime.context_length - len(fork) - len(prompt.ids) - 1)
        if most < 16:
            return "", _no_usage()
        fork.append(prompt.ids, prompt.media)
        parser = chat.ReplyParser([], "disabled", tokens=True)
        detokenizer = chat.Detokenizer(runtime.tokenizer)
        events: list[chat.ParseEvent] = []
        stream = fork.generate(replace(runtime.defaults.sampling(), max_tokens=most))
        try:
            async with stream:
                async for token in stream:
                    for text, control in detokenizer.push(token.id):
                        events += parser.feed(text, control)
        finally:
            spend(stream.usage)
        events += parser.finish()
        return "".join(event.text for event in events if isinstance(event, chat.TextDelta)).strip(), stream.usage
    finally:
        fork.close()


def _no_usage() -> Usage:
    from m3agent.runtime import Usage

    return Usage()
