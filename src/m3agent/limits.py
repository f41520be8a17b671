"""Where a run ends at the latest: `Limits` and what was used of them, and the `Price` of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from m3agent.events import Stop

if TYPE_CHECKING:
    from m3agent.runtime.usage import Usage

MILLION = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Price:
    """Of a million tokens, in any currency: prompt tokens that are new, those in the cache, generated ones."""

    prompt: float
    cached: float
    output: float

    def __post_init__(self) -> None:
        if min(self.prompt, self.cached, self.output) < 0:
            raise ValueError(f"a price cannot be negative: {self}")

    def of(self, usage: Usage) -> float:
        """What these tokens cost."""
        fresh = usage.prompt_tokens - usage.reused_tokens
        cost = fresh * self.prompt + usage.reused_tokens * self.cached + usage.output_tokens * self.output
        return cost / MILLION


@dataclass(frozen=True)
class Limits:
    """Of one run; `price` is what cost is counted by."""

    turns: int
    tokens: int | None = None
    seconds: float | None = None
    cost: float | None = None
    price: Price | None = None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"max_turns must be at least 1, not {self.turns}")
        if self.tokens is not None and self.tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, not {self.tokens}")
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"max_seconds must be above 0, not {self.seconds}")
        if self.cost is not None and not self.cost > 0:
            raise ValueError(f"max_cost must be above 0, not {self.cost}")
        if self.cost is not None and self.price is None:
            raise ValueError("max_cost needs the price of tokens: Agent(…, price=m3agent.Price(…))")

    def cost_of(self, usage: Usage) -> float | None:
        return None if self.price is None else self.price.of(usage)

    def reached(self, turns: int, usage: Usage) -> Stop | None:
        """The limit that leaves no further turn."""
        if turns >= self.turns:
            return "turns"
        tokens = self._tokens_left(usage)
        return next((stop for left, stop in tokens if left < 1), None)

    def of_turn(self, usage: Usage, own: int | None) -> tuple[int | None, Stop]:
        """How many tokens the next turn may generate, and the limit it has reached when it did.

        own: a limit of the turn itself. The turn's prompt is not known yet and may cost more than there is.
        """
        tokens = self._tokens_left(usage)
        if own is not None:
            tokens.append((own, "tokens"))
        return min(tokens, default=(None, "tokens"), key=lambda pair: pair[0])

    def _tokens_left(self, usage: Usage) -> list[tuple[int, Stop]]:
        left: list[tuple[int, Stop]] = []
        if self.tokens is not None:
            left.append((self.tokens - usage.output_tokens, "tokens"))
        if self.cost is not None and self.price is not None:
            rest = self.cost - self.price.of(usage)
            if rest <= 0 or self.price.output > 0:
                left.append((int(rest * MILLION / self.price.output) if rest > 0 else 0, "cost"))
        return left
