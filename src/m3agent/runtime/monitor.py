"""`Monitor`: what a runtime does, for other processes of the same user: a socket that answers with one JSON object.

`m3agent top` reads it. The sockets lie in a folder that only the user may enter.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from m3agent.errors import CacheError

_NUMBERS = count()


def folder() -> Path:
    """Where this user's sockets are."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base) / "m3agent" if base else Path(tempfile.gettempdir()) / f"m3agent-{getpass.getuser()}"


class Monitor:
    """Answers until it is closed. report() is called in a thread of its own."""

    def __init__(self, report: Callable[[], dict[str, Any]]) -> None:
        self._report = report
        here = folder()
        try:
            here.mkdir(mode=0o700, parents=True, exist_ok=True)
            if here.stat().st_uid != os.getuid() or here.stat().st_mode & 0o077:
                raise CacheError(f"{here} belongs to somebody else, or others may enter it; it cannot hold a monitor")
            self.path = here / f"{os.getpid()}-{next(_NUMBERS)}.sock"
            self.path.unlink(missing_ok=True)
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(self.path))
            self._socket.listen(4)
        except (OSError, AttributeError) as error:
            raise CacheError(f"{here}: a monitor cannot be opened ({error})") from error
        threading.Thread(target=self._serve, name="m3agent-monitor", daemon=True).start()

    def close(self) -> None:
        """As often as you like."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                reader, _ = self._socket.accept()
            except OSError:
                return
            with reader, suppress(OSError):
                reader.settimeout(1)
                reader.sendall(json.dumps(self._report()).encode())


def reports() -> Iterator[dict[str, Any]]:
    """Of all runtimes of this user that are open with a monitor. What a dead process left is removed."""
    for path in sorted(folder().glob("*.sock")):
        try:
            with socket.socket(socket.AF_UNIX) as reader:
                reader.settimeout(2)
                reader.connect(str(path))
                data = b"".join(iter(lambda: reader.recv(1 << 16), b""))
            yield json.loads(data)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except (OSError, ValueError):
            continue  # it closes just now
