"""The command line: `m3agent demo`, `m3agent chat`, `m3agent doctor`; each command has a file of its own.

Needs the `cli` extra (typer and rich), which the library itself never imports.
"""

from __future__ import annotations

import io
import sys


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
    app()
