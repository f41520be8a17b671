"""What was counted: `Usage` for one call (they add up), `Stats` for the whole runtime."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Usage:
    """The tokens and the seconds of one call, or, after `+`, of several.

    prompt_tokens: the log when the call began. reused_tokens: those of them that were in the cache, from whichever
    sequence. computed_tokens: prompt tokens that went through the model in this call. recomputed_tokens: those of
    them that had gone through it before. output_tokens: tokens that were generated, the stop token too.
    drafted_tokens: guesses at them that were checked; accepted_tokens: the guesses that were right. media_tokens:
    prompt tokens computed in this call that stand for pictures and films. prefill_seconds: from the call to the first
    token, or to the end where none came, waiting for other calls included. decode_seconds: from the first token to
    the last. tool_seconds: in which calls of tools ran, in the usage of an agent's run.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    media_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tool_seconds: float = 0.0
    first_tokens: int = 0  # tokens that came out of a prefill and not of a decode step: one a call

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; 0 when no token came out of a decode step."""
        decoded = self.output_tokens - self.first_tokens
        return decoded / self.decode_seconds if decoded > 0 and self.decode_seconds > 0 else 0.0

    @property
    def seconds(self) -> float:
        """Of the model; calls of tools are not in it."""
        return self.prefill_seconds + self.decode_seconds

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(Usage)})

    def __str__(self) -> str:
        return (
            f"{self.prompt_tokens} prompt tokens ({self.reused_tokens} reused), {self.output_tokens} new tokens, "
            f"{self.seconds:.2f} s, {self.tokens_per_second:.0f} tokens/s"
        )


@dataclass(frozen=True)
class Stats:
    """A runtime at one moment, and its sums since it was opened.

    total_pages: the KV pool; used_pages: those that sequences hold; cached_pages: those that are kept for whoever
    comes with the same tokens; page_tokens: tokens a page. active_requests: calls that generate now;
    waiting_requests: calls that wait for their turn, for pages or for the disk. steps: model steps so far.
    prompt_tokens: those of calls that have ended; reused_tokens: the ones of them that were in the cache.
    computed_tokens: prompt tokens that went through the model; recomputed_tokens: those of them that had done so
    before. found_tokens: prompt tokens that another sequence had computed; promoted_tokens: those that came from the
    host's memory or the disk. output_tokens: tokens generated; drafted_tokens: guesses at them that were checked;
    accepted_tokens: the right ones. evicted_pages: pages that left the device; host_pages: the ones in the host's
    memory now. preemptions: calls that had to give their pages to others.
    """

    total_pages: int
    used_pages: int
    cached_pages: int
    page_tokens: int
    active_requests: int
    waiting_requests: int
    steps: int
    prompt_tokens: int
    reused_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    found_tokens: int
    promoted_tokens: int
    output_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    evicted_pages: int
    host_pages: int
    preemptions: int

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were in the cache."""
        return self.reused_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(frozen=True)
class SequenceStats:
    """One open sequence. tokens: of its log, as far as its last call knew it; cached: those whose pages it holds;
    pages: how many, and shared: those of them that others hold or may find. state: "running", "waiting" or "idle".
    """

    name: str
    state: str
    tokens: int
    cached: int
    pages: int
    shared: int
