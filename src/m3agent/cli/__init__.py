"""The command line: `m3agent demo`, `chat`, `doctor`, `top`, `cache`; each command has a file of its own.

Needs the `cli` extra (typer and rich), which the library itself never imports.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import TextIO


def main() -> None:
    """The entry point that the package installs. Exit code 2: something has to be changed before it can work."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        print(f"m3agent: the command line needs {error.name}: pip install 'm3agent[cli]'", file=sys.stderr)
        sys.exit(2)
    from m3agent.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal or pipe that is not UTF-8 gets "?", not a traceback
    try:
        try:
            app()
        finally:  # what is still held back must not fail later, where nobody can catch it
            sys.stdout.flush()
    except OSError as error:
        _drop(sys.stdout)
        print(f"m3agent: cannot write the output: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _drop(stream: TextIO) -> None:
    """Let what is still held back go nowhere: Python writes it once more at its end."""
    with contextlib.suppress(OSError):  # no file behind it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
