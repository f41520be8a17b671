"""`TokenLog`: the tokens of a session, and where in them its messages begin.

A place is written down when a message enters, and as the log is only appended to it stays right, whatever tokens the
model itself generates, those that begin a message included.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

from m3agent.chat import Prompt, markers
from m3agent.errors import ConversationError

if TYPE_CHECKING:
    from m3agent.backend import Sequence
    from m3agent.chat import Tokenizer


class TokenLog:
    """`starts` has the token where each message begins, the turn that is being generated included; None where the
    checkpoint's chat template does not mark its messages.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, starts: list[int] | None) -> None:
        self.sequence = sequence
        self._starts = starts
        self._tokenizer = tokenizer

    @property
    def tokens(self) -> list[int]:
        return self.sequence.tokens

    def __len__(self) -> int:
        return len(self.sequence)

    @property
    def starts(self) -> list[int]:
        """Raises ConversationError where they are not known."""
        if self._starts is None:
            raise ConversationError(
                "this checkpoint's chat template does not mark its messages: the session can neither be compacted nor "
                "rewound"
            )
        return self._starts

    @property
    def known_starts(self) -> list[int] | None:
        """`starts`, or None where they are not known."""
        return None if self._starts is None else list(self._starts)

    @property
    def cut(self) -> bool:
        """The log ends in a turn without its end token."""
        return self.sequence.last != self._tokenizer.control_id(markers.END)

    def append(self, prompt: Prompt, messages: int) -> None:
        """A prompt of this many messages, the opening of the model's turn among them. Raises RuntimeClosed,
        SessionBusy.
        """
        before = len(self)
        self.sequence.append(prompt.ids, prompt.media)
        found = rendered_starts(prompt.ids, self._tokenizer, messages)
        if self._starts is None or found is None:
            self._starts = None
        else:
            self._starts += [before + place for place in found]

    def fork(self) -> TokenLog:
        return TokenLog(self.sequence.fork(), self._tokenizer, None if self._starts is None else list(self._starts))

    def first(self, messages: int) -> TokenLog:
        """A fork that has the first `messages` alone, up to the end token of the last of them. Raises SessionBusy,
        RuntimeClosed, ConversationError.
        """
        starts = self.starts
        if messages == len(starts):
            return self.fork()
        length = whole(self.tokens, self._tokenizer, starts[messages])
        return TokenLog(self.sequence.fork(length), self._tokenizer, starts[:messages])

    def close(self) -> None:
        self.sequence.close()


def whole(ids: Items[int], tokenizer: Tokenizer, length: int) -> int:
    """How many of the first `length` tokens end with an end token; what follows it comes with the next prompt."""
    end = tokenizer.control_id(markers.END)
    return next((place + 1 for place in range(length - 1, -1, -1) if ids[place] == end), 0)


def rendered_starts(ids: Items[int], tokenizer: Tokenizer, messages: int) -> list[int] | None:
    """Where the last `messages` of a rendered prompt begin: no text in it can have become a token that begins one. None
    where there are fewer of these tokens.
    """
    begin = tokenizer.control_id(markers.ROLE)
    starts = [place for place, token in enumerate(ids) if token == begin]
    return starts[len(starts) - messages :] if len(starts) >= messages else None
