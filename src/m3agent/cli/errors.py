"""What can be mended by the user ends in one line on stderr and exit code 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from m3agent.errors import M3Error


@contextmanager
def plain_errors() -> Iterator[None]:
    try:
        yield
    except M3Error as error:
        print(f"m3agent: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
